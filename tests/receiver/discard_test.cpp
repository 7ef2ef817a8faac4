// Content that is lost while addresses stay, and updates that bring only a part of what an engine holds.
#include <algorithm>
#include <cstring>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

class Discard : public ReceiverFixture {
 protected:
  /// What the driver does when a pool is given back and mapped again.
  void overwrite_pool() {
    for (const Storage& storage : storage_->table().all()) std::fill_n(storage.address, storage.bytes, std::byte{0xA5});
    for (const Canary& canary : storage_->table().canaries()) std::fill_n(canary.address, canary.bytes, std::byte{0xA5});
  }
  SlotState slot() { return guard().slots[0].state; }
  /// Offers some entries of full_manifest() for some scopes.
  std::vector<std::uint32_t> offer(WireSender& sender, std::uint64_t id, const std::string& version, std::vector<std::string> scopes,
                                   const std::vector<std::uint32_t>& chosen) {
    sender.session = SessionId{id};
    sender.send(wire::Open{version, std::move(scopes), {"lead"}, 0});
    sender.expect<wire::Opened>();
    std::vector<wire::ManifestEntry> list;
    for (const std::uint32_t e : chosen) list.push_back(full_manifest()[e]);
    sender.manifest(list);
    return chosen;
  }
  /// From ACCEPT to CONSUMED, with the chosen parts of payload(seed).
  std::vector<wire::EntryFingerprint> bring(WireSender& sender, const std::vector<std::uint32_t>& chosen, std::uint32_t seed) {
    sender.expect<wire::Accept>();
    sender.send(wire::Confirm{});
    sender.expect<wire::Begin>();
    const auto data = payload(seed);
    wire::Bucket bucket;
    std::vector<wire::EntryFingerprint> sums;
    for (std::uint32_t i = 0; i < chosen.size(); ++i) {
      if (chosen[i] >= 4) continue;  // an expert of another rank
      bucket.extents.push_back(payload_extents()[chosen[i]]);
      bucket.extents.back().entry = i;
      sums.push_back({i, payload_sums(data)[chosen[i]].sum});
    }
    sender.send(bucket, data);
    sender.expect<wire::Consumed>();
    return sums;
  }
  void update_part(WireSender& sender, std::uint64_t id, const std::string& version, std::vector<std::string> scopes,
                   const std::vector<std::uint32_t>& chosen, std::uint32_t seed) {
    offer(sender, id, version, std::move(scopes), chosen);
    const auto sums = bring(sender, chosen, seed);
    sender.send(wire::End{1, sums});
    sender.expect<wire::Prepared>();
    sender.send(wire::Commit{});
    sender.expect<wire::Committed>();
  }
  wire::Failure refusal(WireSender& sender) {
    const auto reject = sender.expect<wire::Reject>();
    return reject.defects.empty() ? wire::Failure{} : reject.defects.front();
  }
  /// "rows.weight" is the draft's.
  void start_with_draft(bool optional) {
    layout_.named[1].rule.scope = "draft";
    layout_.storages[1].optional = optional;
    start();
  }
};

const std::vector<std::uint32_t> kAll{0, 1, 2, 3};
const std::vector<std::uint32_t> kTargetOnly{0, 2, 3};
const std::vector<std::uint32_t> kDraftOnly{1};

TEST_F(Discard, IsFoundAtOpenAndPaddingIsWrittenAgain) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 1, "run/1", 1);
  overwrite_pool();
  sender.open(2, "run/2");
  sender.expect<wire::Opened>();
  EXPECT_NE(slot(), SlotState::kCommitted) << "nobody may serve what is gone";
  EXPECT_EQ(status().version, "");
  EXPECT_EQ(status().discards, 1U);
  EXPECT_NE(status().last_failure.find("memory pool host was discarded"), std::string::npos);
  sender.manifest(full_manifest());
  const auto sums = bring(sender, kAll, 2);
  sender.send(wire::End{1, sums});
  sender.expect<wire::Prepared>();
  sender.send(wire::Commit{});
  sender.expect<wire::Committed>();
  expect_live(2);
  EXPECT_EQ(slot(), SlotState::kCommitted);
  update(sender, 3, "run/3", 3);
  EXPECT_EQ(status().discards, 1U) << "the canaries are back";
}

TEST_F(Discard, IsFollowedByPaddingAlsoWhereAnUpdateBringsNothing) {
  for (StorageSpec& storage : layout_.storages) storage.optional = true;
  for (NamedRule& named : layout_.named) named.rule.optional = true;
  for (ExpertRule& expert : layout_.expert_rules) expert.rule.optional = true;
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 1, "run/1", 1);
  overwrite_pool();
  offer(sender, 2, "run/2", {"target"}, {4});  // an expert of another rank
  sender.expect<wire::Accept>();
  sender.send(wire::Confirm{});
  sender.expect<wire::Begin>();
  sender.send(wire::End{});
  sender.expect<wire::Prepared>();
  sender.send(wire::Commit{});
  sender.expect<wire::Committed>();
  const Storage& experts = storage_->table().all()[2];
  for (std::int64_t pad = 4; pad < experts.bytes; pad += 8) {
    std::uint32_t word = 0;
    std::memcpy(&word, experts.address + pad, sizeof(word));
    ASSERT_EQ(word, small_model::kPad) << "at byte " << pad;
  }
  update(sender, 3, "run/3", 3);
  EXPECT_EQ(status().discards, 1U) << "the canaries are back";
}

TEST_F(Discard, IsFoundBeforePrepared) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 1, "run/1");
  const auto data = payload(1);
  sender.send(wire::Bucket{0, payload_extents()}, data);
  sender.expect<wire::Consumed>();
  overwrite_pool();
  sender.send(wire::End{1, payload_sums(data)});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("discarded and nobody said so"), std::string::npos);
  EXPECT_EQ(state(), "torn");
  update(sender, 2, "run/1", 2);
  expect_live(2);
}

TEST_F(Discard, IsFoundBeforeCommit) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  prepare_update(sender, 1, "run/1", 1);
  overwrite_pool();
  sender.send(wire::Commit{});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("discarded and nobody said so"), std::string::npos);
  EXPECT_EQ(state(), "torn");
  EXPECT_NE(slot(), SlotState::kCommitted);
  update(sender, 2, "run/1", 2);
  expect_live(2);
}

TEST_F(Discard, LeavesNothingOfADoubtfulSessionToCommit) {
  start();
  {
    WireSender lead = connect("lead");
    lead.hello();
    prepare_update(lead, 1, "run/1", 1);
  }
  ASSERT_TRUE(becomes("in_doubt"));
  overwrite_pool();
  WireSender sender = connect("second");
  sender.hello();
  sender.open(2, "run/2");
  sender.expect<wire::Opened>();
  sender.send(wire::Abort{wire::make_failure(Status(Code::kCancelled, "changed my mind"), "manifest")});
  sender.expect<wire::ErrorReport>();
  EXPECT_EQ(state(), "torn");
  sender.session = SessionId{1};
  sender.send(wire::Commit{});
  sender.expect<wire::ErrorReport>();
  EXPECT_NE(slot(), SlotState::kCommitted);
}

TEST_F(Discard, TakesOneScopeAloneAfterAWholeUpdate) {
  start_with_draft(false);
  WireSender sender = connect("lead");
  EXPECT_EQ(sender.hello().scopes, (std::vector<std::string>{"target", "draft"}));
  update_part(sender, 1, "run/1", {"target", "draft"}, kAll, 1);
  update_part(sender, 2, "run/2", {"draft"}, kDraftOnly, 2);
  const auto before = payload(1);
  const auto after = payload(2);
  EXPECT_TRUE(std::equal(live("plain").begin(), live("plain").end(), before.begin()));
  EXPECT_TRUE(std::equal(live("rows").begin(), live("rows").end(), after.begin() + 96));
  EXPECT_EQ(status().version, "run/2");
  EXPECT_EQ(slot(), SlotState::kCommitted);
}

TEST_F(Discard, RefusesOneScopeAloneWhereTheOthersWereNeverWritten) {
  start_with_draft(false);
  WireSender sender = connect("lead");
  sender.hello();
  offer(sender, 1, "run/1", {"target"}, kTargetOnly);
  const wire::Failure defect = refusal(sender);
  EXPECT_NE(defect.message.find("storage rows"), std::string::npos) << defect.message;
  EXPECT_NE(defect.message.find("scope draft"), std::string::npos) << defect.message;
  EXPECT_EQ(state(), "idle");
  update_part(sender, 2, "run/1", {"target", "draft"}, kAll, 1);
  expect_live(1);
}

TEST_F(Discard, RefusesOneScopeAloneAfterADiscardOrATornUpdateOfTheOthers) {
  start_with_draft(false);
  WireSender sender = connect("lead");
  sender.hello();
  update_part(sender, 1, "run/1", {"target", "draft"}, kAll, 1);
  offer(sender, 2, "run/2", {"target"}, kTargetOnly);
  bring(sender, kTargetOnly, 2);
  sender.send(wire::Abort{wire::make_failure(Status(Code::kCancelled, "out of time"), "transfer")});
  sender.expect<wire::ErrorReport>();
  EXPECT_EQ(state(), "torn");
  offer(sender, 3, "run/2", {"draft"}, kDraftOnly);
  EXPECT_NE(refusal(sender).message.find("storage plain"), std::string::npos);
  EXPECT_EQ(state(), "torn");
  // What was torn is enough: the draft is as it was.
  update_part(sender, 4, "run/2", {"target"}, kTargetOnly, 3);
  EXPECT_EQ(state(), "idle");
  overwrite_pool();
  offer(sender, 5, "run/3", {"draft"}, kDraftOnly);
  EXPECT_NE(refusal(sender).message.find("storage plain"), std::string::npos);
  EXPECT_NE(slot(), SlotState::kCommitted);
  update_part(sender, 6, "run/3", {"target", "draft"}, kAll, 4);
  expect_live(4);
}

TEST_F(Discard, AsksForNoOptionalStorage) {
  start_with_draft(true);
  WireSender sender = connect("lead");
  sender.hello();
  update_part(sender, 1, "run/1", {"target"}, kTargetOnly, 1);
  EXPECT_EQ(slot(), SlotState::kCommitted);
}

TEST_F(Discard, AsksForNothingThatTheOperatorDeclaredOptional) {
  layout_.named[1].rule.scope = "draft";
  ReceiverOptions options;
  options.optional_names = {"rows.*"};
  start(options);
  WireSender sender = connect("lead");
  sender.hello();
  update_part(sender, 1, "run/1", {"target"}, kTargetOnly, 1);
  EXPECT_EQ(slot(), SlotState::kCommitted);
}

TEST_F(Discard, RefusesAScopeThatNoEngineHas) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  sender.session = SessionId{1};
  sender.send(wire::Open{"run/1", {"target", "darft"}, {"lead"}, 0});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("scope \"darft\": this rank has target"), std::string::npos);
}

/// Two ranks' guard page with the other rank played by the test.
class Repair : public Discard {
 protected:
  void other_rank(SlotState state, const WeightVersion& version) {
    if (!other_) other_.emplace(GuardPage::create(guard_path_, "engine-0", 2, 1).value());
    other_->publish(state, 99, version);
  }
  void open_repair(WireSender& sender, std::uint64_t id, const std::string& version, std::vector<std::uint32_t> ranks) {
    sender.session = SessionId{id};
    sender.send(wire::Open{version, {"target"}, {"lead"}, 0, std::move(ranks)});
  }
  std::string refusal(WireSender& sender, std::uint64_t id, const std::string& version, std::vector<std::uint32_t> ranks) {
    open_repair(sender, id, version, std::move(ranks));
    return sender.expect<wire::ErrorReport>().failure.message;
  }
  void repair(WireSender& sender, std::uint64_t id, const std::string& version, std::uint32_t seed) {
    open_repair(sender, id, version, {0});
    sender.expect<wire::Opened>();
    sender.manifest(full_manifest());
    const auto sums = bring(sender, kAll, seed);
    sender.send(wire::End{1, sums});
    sender.expect<wire::Prepared>();
    sender.send(wire::Commit{});
    sender.expect<wire::Committed>();
  }
  std::optional<GuardPage> other_;
};

TEST_F(Repair, BringsARankToTheVersionThatTheOthersHoldAndOpensTheGuard) {
  start();
  other_rank(SlotState::kCommitted, {"run", 5});
  WireSender sender = connect("lead");
  sender.hello();
  EXPECT_FALSE(guard().open());
  repair(sender, 1, "run/5", 1);
  expect_live(1);
  EXPECT_TRUE(guard().open());
  // Again, should its bytes be in doubt: equal versions are no step back.
  repair(sender, 2, "run/5", 2);
  expect_live(2);
  EXPECT_TRUE(guard().open());
  sender.open(3, "run/5");
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("steps rise"), std::string::npos);
}

TEST_F(Repair, MayGoBackToWhatTheOthersHold) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 1, "run/6", 1);
  other_rank(SlotState::kCommitted, {"run", 5});
  repair(sender, 2, "run/5", 2);
  EXPECT_TRUE(guard().open());
}

TEST_F(Repair, RefusesAnyOtherVersionAndRanksThatAreNotItsOwn) {
  start();
  other_rank(SlotState::kCommitted, {"run", 5});
  WireSender sender = connect("lead");
  sender.hello();
  EXPECT_NE(refusal(sender, 1, "run/6", {0}).find("repair to run/6: rank 1 holds step 5 of that run"), std::string::npos);
  EXPECT_NE(refusal(sender, 2, "walk/5", {0}).find("rank 1 holds step 5 of another run"), std::string::npos);
  EXPECT_NE(refusal(sender, 3, "run/5", {1}).find("not of this one"), std::string::npos);
  EXPECT_NE(refusal(sender, 4, "run/5", {0, 2}).find("rank 2 of 2"), std::string::npos);
  other_rank(SlotState::kTorn, {});
  EXPECT_NE(refusal(sender, 5, "run/5", {0}).find("rank 1 holds torn"), std::string::npos);
  EXPECT_EQ(state(), "idle");
}

}  // namespace
}  // namespace headrace
