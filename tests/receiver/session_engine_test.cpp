// What a session asks of the engine around it, and what the engine and tools ask of a receiver.
#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <utility>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

class SessionAndEngine : public ReceiverFixture {
 protected:
  void notify(EngineEvent event) {
    receiver_->ask<int>([&, event](auto answer) {
      receiver_->control().on_engine_event(event);
      answer(0);
    });
  }
};

/// A quiescent hook that says what the test tells it, call by call. The hook owns a part of it: it may be on its way when a test ends.
class ToldQuiescence {
 public:
  std::function<Status()> hook() const {
    return [calls = calls_]() -> Status {
      Call& call = calls->at(calls->next++);
      call.asked.set_value();
      std::future<Status> told = call.told.get_future();
      if (told.wait_for(kPatience) != std::future_status::ready) return Status(Code::kInternal, "the test did not say");
      return told.get();
    };
  }
  bool asked(std::size_t call) const { return calls_->at(call).asked.get_future().wait_for(kPatience) == std::future_status::ready; }
  void tell(std::size_t call, Status status) const { calls_->at(call).told.set_value(std::move(status)); }

 private:
  static constexpr std::chrono::seconds kPatience{10};
  struct Call {
    std::promise<void> asked;
    std::promise<Status> told;
  };
  struct Calls : std::array<Call, 2> {
    std::size_t next = 0;  // of the thread that runs hooks
  };
  std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
};

TEST_F(SessionAndEngine, AnswersTheLeadsManifestOnlyWhenTheEngineIsQuiescentAndTakesNoOthersBefore) {
  const ToldQuiescence quiescence;
  EngineHooks hooks;
  hooks.quiescent = quiescence.hook();
  start({}, hooks);
  WireSender lead = connect("lead");
  WireSender other = connect("other");
  lead.hello();
  other.hello();
  lead.open(1, "run/1");
  lead.manifest(full_manifest());
  EXPECT_TRUE(becomes("open"));
  ASSERT_TRUE(quiescence.asked(0));
  quiescence.tell(0, Status(Code::kFailedPrecondition, "two requests are running"));
  EXPECT_NE(lead.expect<wire::ErrorReport>().failure.message.find("two requests are running"), std::string::npos) << "and no ACCEPT";
  lead.open(2, "run/1", {"lead", "other"});
  lead.manifest(full_manifest());
  EXPECT_TRUE(becomes("open"));
  ASSERT_TRUE(quiescence.asked(1));
  other.session = SessionId{2};
  other.manifest({});
  EXPECT_NE(other.expect<wire::ErrorReport>().failure.message.find("MANIFEST of sender other before OPENED"), std::string::npos);
  quiescence.tell(1, ok_status());
  EXPECT_EQ(state(), "idle");
}

TEST_F(SessionAndEngine, ChecksTheEngineBeforeItOpensAndTheHooksBeforePrepared) {
  Status quiescent = Status(Code::kFailedPrecondition, "two requests are running");
  std::ptrdiff_t moved = 0;  // bytes that the first storage has moved
  Status derive;
  Status committed;
  int derived = 0;
  int invalidated = 0;
  EngineHooks hooks;
  hooks.quiescent = [&] { return quiescent; };
  hooks.locate = [&] {
    std::vector<StorageLocation> present;
    for (std::uint32_t i = 0; i < storage_->table().size(); ++i) {
      const Storage& storage = storage_->table().at(StorageId{i});
      present.push_back({StorageId{i}, storage.address + (i == 0 ? moved : 0), storage.bytes});
    }
    return present;
  };
  hooks.derive = [&] {
    ++derived;
    return derive;
  };
  hooks.committed = [&] {
    ++invalidated;
    return committed;
  };
  start({}, hooks);
  WireSender sender = connect("lead");
  sender.hello();
  sender.open(1, "run/1");
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("two requests are running"), std::string::npos);
  quiescent = ok_status();
  moved = 64;
  sender.open(2, "run/1");
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("plain"), std::string::npos);
  EXPECT_EQ(state(), "idle");
  moved = 0;
  update(sender, 3, "run/1", 1);
  EXPECT_EQ(derived, 1);
  EXPECT_EQ(invalidated, 1);
  derive = Status(Code::kInternal, "no room for the transposed copy");
  open_update(sender, 4, "run/2");
  const auto data = payload(2);
  sender.send(wire::Bucket{0, payload_extents()}, data);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, payload_sums(data)});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("no room for the transposed copy"), std::string::npos);
  EXPECT_EQ(state(), "torn");
  derive = ok_status();
  committed = Status(Code::kInternal, "cache is stuck");
  prepare_update(sender, 5, "run/3", 3);
  sender.send(wire::Commit{});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("cache is stuck"), std::string::npos);
  EXPECT_NE(guard().slots[0].state, SlotState::kCommitted) << "nobody may serve with stale caches";
}

TEST_F(SessionAndEngine, TurnsAThrowingHookIntoAFailureWithItsText) {
  EngineHooks hooks;
  hooks.derive = []() -> Status { throw std::runtime_error("python said no"); };
  start({}, hooks);
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 4, "run/2");
  const auto data = payload(2);
  sender.send(wire::Bucket{0, payload_extents()}, data);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, payload_sums(data)});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("python said no"), std::string::npos);
}

TEST_F(SessionAndEngine, EndsAsTheTableSaysWhenTheEngineDoesSomethingElse) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/1", 1);
  open_update(sender, 8, "run/2");
  const auto notify = [&](EngineEvent event) {
    receiver_->ask<int>([&, event](auto answer) {
      receiver_->control().on_engine_event(event);
      answer(0);
    });
  };
  notify(EngineEvent::kExpertRebalance);
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("rebalanced its experts"), std::string::npos);
  EXPECT_EQ(status().version, "run/1");
  open_update(sender, 9, "run/2");
  sender.send(wire::Bucket{0, {payload_extents()[0]}}, payload(2));
  sender.expect<wire::Consumed>();
  notify(EngineEvent::kSleep);
  sender.expect<wire::ErrorReport>();
  EXPECT_EQ(state(), "torn");
  update(sender, 10, "run/2", 3);
  notify(EngineEvent::kDiscard);
  EXPECT_EQ(status().version, "") << "what was discarded is not served";
  EXPECT_NE(guard().slots[0].state, SlotState::kCommitted);
}

TEST_F(SessionAndEngine, ReadsTensorsBackAndFingerprintsThemForTools) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/1", 1);
  WireSender tool = connect("");
  tool.hello();
  tool.send(wire::ReadRequest{"layers.0.ffn.experts.1.w1.weight", Box{{1, 0}, {3, 4}}});
  const auto reply = tool.expect<wire::ReadReply>();
  const auto data = payload(1);
  EXPECT_EQ(reply.bytes, (std::vector<std::byte>(data.begin() + 128, data.begin() + 136)));
  tool.send(wire::ReadRequest{"layers.0.ffn.experts.3.w1.weight", Box{{0, 0}, {1, 4}}});
  EXPECT_NE(tool.expect<wire::ErrorReport>().failure.message.find("another rank"), std::string::npos);
  tool.send(wire::FingerprintRequest{0, 100});
  const auto fingerprints = tool.expect<wire::FingerprintReply>();
  EXPECT_EQ(fingerprints.total, 4U);
  EXPECT_EQ(fingerprints.version, "run/1");
  ASSERT_EQ(fingerprints.tensors.size(), 4U);
  for (const auto& tensor : fingerprints.tensors) {
    if (tensor.name == "a.weight") {
      EXPECT_EQ(tensor.sum, payload_sums(data)[0].sum);
    }
    if (tensor.name == "layers.0.ffn.experts.1.w1.weight") {
      EXPECT_EQ(tensor.sum, payload_sums(data)[3].sum);
    }
  }
}

TEST_F(SessionAndEngine, WritesPaddingAgainAfterADiscard) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/1", 1);
  notify(EngineEvent::kDiscard);
  for (const Storage& storage : storage_->table().all()) std::fill_n(storage.address, storage.bytes, std::byte{0xA5});
  update(sender, 8, "run/1", 2);
  expect_live(2);
}

TEST_F(SessionAndEngine, DoesTableWorkOnceAndOnlyWhenRowsArrived) {
  int finished = 0;
  EngineHooks hooks;
  hooks.finish_tables = [&] {
    ++finished;
    return ok_status();
  };
  layout_.named[1].rule.scope = std::string(kTablesScope);
  start({}, hooks);
  WireSender sender = connect("lead");
  EXPECT_EQ(sender.hello().scopes, (std::vector<std::string>{"target", "tables"}));
  // Rows arrive: two buckets, one finish.
  sender.session = SessionId{1};
  sender.send(wire::Open{"run/1", {"target", "tables"}, {"lead"}, 0});
  sender.expect<wire::Opened>();
  sender.manifest(full_manifest());
  sender.expect<wire::Accept>();
  sender.send(wire::Confirm{});
  sender.expect<wire::Begin>();
  const auto data = payload(1);
  const auto extents = payload_extents();
  sender.send(wire::Bucket{0, {extents[0], extents[1]}}, data);
  sender.expect<wire::Consumed>();
  sender.send(wire::Bucket{1, {extents[2], extents[3]}}, data);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{2, payload_sums(data)});
  EXPECT_EQ(sender.expect<wire::Prepared>().receipt.engram_calls, 1U);
  sender.send(wire::Commit{});
  sender.expect<wire::Committed>();
  EXPECT_EQ(finished, 1);
  // None arrive: nothing is done.
  sender.open(2, "run/2");
  sender.expect<wire::Opened>();
  auto list = full_manifest();
  list.erase(list.begin() + 1);
  sender.manifest(list);
  sender.expect<wire::Accept>();
  sender.send(wire::Confirm{});
  sender.expect<wire::Begin>();
  sender.send(wire::Bucket{0, {extents[0], {1, MemoryId{1}, 108, std::nullopt, {}}, {2, MemoryId{1}, 124, std::nullopt, {}}}}, data);
  sender.expect<wire::Consumed>();
  auto sums = payload_sums(data);
  sender.send(wire::End{1, {sums[0], {1, sums[2].sum}, {2, sums[3].sum}}});
  EXPECT_EQ(sender.expect<wire::Prepared>().receipt.engram_calls, 0U);
  EXPECT_EQ(finished, 1);
  EXPECT_EQ(status().engram_calls, 1U);
}

}  // namespace
}  // namespace headrace
