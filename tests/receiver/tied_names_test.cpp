// Checkpoint names of one tensor: what comes under several of them must be equal before the first byte.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

class TiedNames : public ReceiverFixture {
 protected:
  static constexpr std::uint32_t kTied = 5;  // the entry behind those of full_manifest()

  void SetUp() override {
    layout_.tied = {{"a.weight", "tied.weight"}};
    layout_.scan = [](std::string_view name) {
      ScanAnswer answer;
      if (name == "tied.weight") answer.kind = ScanAnswer::Kind::kDropped;
      return answer;
    };
  }
  static std::vector<wire::ManifestEntry> both() {
    std::vector<wire::ManifestEntry> list = full_manifest();
    list.push_back({"tied.weight", Dtype::kBF16, {6, 8}, Box::whole({6, 8})});
    return list;
  }
  /// Of the bytes of a.weight in payload(seed), under the name that both are tied to.
  static std::vector<std::byte> told(std::uint32_t seed) {
    const auto data = payload(seed);
    const FingerprintSum sum =
        fingerprint(tensor_key("a.weight", Dtype::kBF16, std::vector<std::int64_t>{6, 8}), 0, std::span(data).first(96));
    std::vector<std::byte> bytes;
    for (const std::uint64_t lane : sum.lanes)
      for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<std::byte>(lane >> (8 * i)));
    return bytes;
  }
  /// From ACCEPT to COMMITTED.
  static wire::Accept bring(WireSender& sender, std::uint32_t seed) {
    auto accept = sender.expect<wire::Accept>();
    sender.send(wire::Confirm{});
    sender.expect<wire::Begin>();
    const auto data = payload(seed);
    sender.send(wire::Bucket{0, payload_extents()}, data);
    sender.expect<wire::Consumed>();
    sender.send(wire::End{1, payload_sums(data)});
    sender.expect<wire::Prepared>();
    sender.send(wire::Commit{});
    sender.expect<wire::Committed>();
    return accept;
  }
  wire::Failure refused(WireSender& sender, std::uint64_t id, std::vector<wire::EntryValue> values) {
    sender.open(id, "run/" + std::to_string(id));
    sender.expect<wire::Opened>();
    sender.manifest(both(), std::move(values));
    const auto reject = sender.expect<wire::Reject>();
    EXPECT_EQ(state(), "idle") << "nothing was written";
    return reject.defects.empty() ? wire::Failure{} : reject.defects.front();
  }
};

TEST_F(TiedNames, AreAskedForAsFingerprintsWithoutExperts) {
  start();
  WireSender sender = connect("lead");
  EXPECT_EQ(sender.hello().values, (std::vector<wire::ValueRule>{{"a.weight", "a.weight", 0}, {"a.weight", "tied.weight", 0}}));
}

TEST_F(TiedNames, MayComeAloneAndThenNeedNoValue) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 1, "run/1", 1);
  expect_live(1);
}

TEST_F(TiedNames, AreTakenWhenEqualAndOneOfThemIsWritten) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  sender.open(1, "run/1");
  sender.expect<wire::Opened>();
  sender.manifest(both(), {{0, told(1)}, {kTied, told(1)}});
  const wire::Accept accept = bring(sender, 1);
  ASSERT_EQ(accept.wanted.size(), 6u);
  EXPECT_TRUE(accept.wanted[kTied].ignored);
  expect_live(1);
}

TEST_F(TiedNames, AreComparedWithNothingWhereOneComesAloneWhateverIsToldOfIt) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  for (std::uint64_t id = 1; id <= 2; ++id) {
    sender.open(id, "run/" + std::to_string(id));
    sender.expect<wire::Opened>();
    // Another sender might have had the other name.
    sender.manifest(full_manifest(), {{0, told(1)}});
    bring(sender, 1);
  }
  expect_live(1);
}

TEST_F(TiedNames, OfAnotherEngineAreToldToThisOneAndMeanNothingHere) {
  layout_.tied.clear();
  layout_.scan = nullptr;
  start();
  WireSender sender = connect("lead");
  EXPECT_TRUE(sender.hello().values.empty());
  sender.open(1, "run/1");
  sender.expect<wire::Opened>();
  sender.manifest(full_manifest(), {{0, told(1)}});
  bring(sender, 1);
  expect_live(1);
}

TEST_F(TiedNames, OfOneTensorCountOnceHoweverManySendersBringThem) {
  start();
  WireSender lead = connect("lead");
  WireSender other = connect("other");
  lead.hello();
  other.hello();
  lead.open(1, "run/1", {"lead", "other"}, wire::OverlapRule::kFirstSenderOwns);
  lead.expect<wire::Opened>();
  other.expect<wire::Opened>();
  other.session = lead.session;
  lead.manifest(full_manifest());
  other.manifest({full_manifest()[0]});
  lead.expect<wire::Accept>();
  other.expect<wire::Accept>();
}

TEST_F(TiedNames, MayComeInPartsAloneAndAreRefusedInPartsBesideAnother) {
  start();
  const auto part = [](std::int64_t from, std::int64_t to) {
    return wire::ManifestEntry{"a.weight", Dtype::kBF16, {6, 8}, Box{{from, 0}, {to, 8}}};
  };
  WireSender lead = connect("lead");
  WireSender other = connect("other");
  lead.hello();
  other.hello();
  std::vector<wire::ManifestEntry> share = both();
  const wire::ManifestEntry tied = share.back();
  share.pop_back();
  share[0] = part(0, 2);
  const auto offer = [&](std::uint64_t id, const std::vector<wire::ManifestEntry>& rest, std::vector<wire::EntryValue> values) {
    lead.open(id, "run/" + std::to_string(id), {"lead", "other"});
    lead.expect<wire::Opened>();
    other.expect<wire::Opened>();
    other.session = lead.session;
    lead.manifest(share);
    other.manifest(rest, std::move(values));
  };
  offer(1, {part(2, 6), tied}, {{1, told(1)}});
  const auto reject = lead.expect<wire::Reject>();
  other.expect<wire::Reject>();
  ASSERT_EQ(reject.defects.size(), 2U);
  EXPECT_EQ(reject.defects[0].message,
            "a.weight: sender lead has a part of it, and it comes under another name too: these are compared as a whole");
  EXPECT_EQ(reject.defects[1].sender, "other");
  offer(2, {part(2, 6)}, {});
  lead.expect<wire::Accept>();
  other.expect<wire::Accept>();
}

TEST_F(TiedNames, AreRefusedBeforeTheFirstByteWhenTheyDifferAreNotToldOrOddly) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  const wire::Failure differ = refused(sender, 1, {{0, told(1)}, {kTied, told(2)}});
  EXPECT_EQ(differ.name, "tied.weight");
  EXPECT_NE(differ.message.find("not what a.weight holds"), std::string::npos) << differ.message;
  EXPECT_NE(differ.expected, differ.actual);
  const wire::Failure silent = refused(sender, 2, {{0, told(1)}});
  EXPECT_NE(silent.message.find("tied.weight: WELCOME asks for its value"), std::string::npos) << silent.message;
  const wire::Failure cut = refused(sender, 3, {{0, told(1)}, {kTied, std::vector<std::byte>(8)}});
  EXPECT_NE(cut.message.find("tied.weight: a value of 8 bytes"), std::string::npos) << cut.message;
}

TEST_F(TiedNames, MustHoldWhatWasTold) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  sender.open(1, "run/1");
  sender.expect<wire::Opened>();
  sender.manifest(both(), {{0, told(2)}, {kTied, told(2)}});
  sender.expect<wire::Accept>();
  sender.send(wire::Confirm{});
  sender.expect<wire::Begin>();
  const auto data = payload(1);
  sender.send(wire::Bucket{0, payload_extents()}, data);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, payload_sums(data)});
  const wire::Failure failure = sender.expect<wire::ErrorReport>().failure;
  EXPECT_EQ(failure.code, static_cast<std::uint32_t>(Code::kCorruption));
  EXPECT_NE(failure.message.find("a.weight: MANIFEST said another fingerprint"), std::string::npos) << failure.message;
}

}  // namespace
}  // namespace headrace
