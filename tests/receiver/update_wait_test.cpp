// Waiting for an update that senders bring.
#include <chrono>
#include <future>
#include <stop_token>
#include <utility>
#include <vector>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

constexpr std::chrono::seconds kPatience{10};

class UpdateWait : public ReceiverFixture {
 protected:
  using Outcome = Result<wire::Receipt>;

  static WeightVersion version(std::uint64_t step) { return {"run", step}; }
  UpdateMark mark() {
    return receiver_->ask<UpdateMark>([this](auto answer) { answer(UpdateMark{receiver_->control().sessions_ended()}); });
  }
  std::size_t waiting() {
    return receiver_->ask<std::size_t>([this](auto answer) { answer(receiver_->control().waiting()); });
  }
  void end_waits(const std::string& reason) {
    receiver_->ask<int>([this, reason](auto answer) {
      receiver_->control().end_waits(reason);
      answer(0);
    });
  }
  /// On a thread of its own; returns when it waits, or has ended.
  std::future<Outcome> wait(std::uint64_t step, std::int64_t deadline_ms = 0, std::stop_token stop = {}) {
    const WaitOptions options{mark(), deadline_ms};
    const std::size_t before = waiting();
    std::future<Outcome> begun = std::async(
        std::launch::async, [this, step, options, stop = std::move(stop)] { return receiver_->wait_for(version(step), options, stop); });
    while (waiting() == before && begun.wait_for(std::chrono::seconds(0)) == std::future_status::timeout) {
    }
    return begun;
  }
  Outcome ended(std::future<Outcome>& outcome) {
    if (outcome.wait_for(kPatience) != std::future_status::ready) end_waits("it still waits");
    return outcome.get();
  }
  static bool says(const Status& status, std::string_view words) { return status.message().find(words) != std::string::npos; }
};

TEST_F(UpdateWait, ReturnsTheReceiptOfTheCommitToAllThatWaitAndAtOnceToWhoeverComesLater) {
  start();
  std::vector<std::future<Outcome>> all;
  for (int i = 0; i < 3; ++i) all.push_back(wait(7));
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 1, "run/6", 1);
  update(sender, 2, "run/7", 2);
  for (auto& each : all) {
    const Outcome outcome = ended(each);
    ASSERT_TRUE(outcome.ok()) << outcome.status().to_string();
    EXPECT_EQ(outcome.value().version, version(7));
    EXPECT_EQ(outcome.value().session, 2u);
  }
  auto later = wait(7);
  const Outcome outcome = ended(later);
  ASSERT_TRUE(outcome.ok()) << outcome.status().to_string();
  EXPECT_EQ(outcome.value().session, 2u);
}

TEST_F(UpdateWait, ReturnsWhenTheEnginesCommittedHookHasAndFailsWhereItFails) {
  std::promise<void> inside;
  std::promise<Status> told;
  EngineHooks hooks;
  hooks.committed = [&] {
    inside.set_value();
    return told.get_future().get();
  };
  start({}, hooks);
  auto before = wait(1);
  WireSender sender = connect("lead");
  sender.hello();
  prepare_update(sender, 1, "run/1", 1);
  sender.send(wire::Commit{});
  ASSERT_EQ(inside.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(status().version, "run/1") << "published, and the hook has not returned";
  auto within = wait(1);
  EXPECT_EQ(state(), "idle");
  EXPECT_EQ(before.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  told.set_value(Status(Code::kUnavailable, "the caches are gone"));
  for (auto* each : {&before, &within}) {
    const Outcome outcome = ended(*each);
    EXPECT_EQ(outcome.status().code(), Code::kFailedPrecondition);
    EXPECT_TRUE(says(outcome.status(), "the caches are gone")) << outcome.status().to_string();
  }
}

TEST_F(UpdateWait, OfWhatIsCommittedHasNoDeadlineWhileTheEnginesHookRuns) {
  std::promise<void> inside;
  std::promise<Status> told;
  EngineHooks hooks;
  hooks.committed = [&] {
    inside.set_value();
    return told.get_future().get();
  };
  start({}, hooks);
  auto early = wait(1, 1'000);
  auto other = wait(2, 1'000);
  WireSender sender = connect("lead");
  sender.hello();
  prepare_update(sender, 1, "run/1", 1);
  sender.send(wire::Commit{});
  ASSERT_EQ(inside.get_future().wait_for(kPatience), std::future_status::ready);
  clock_.advance_ms(60'000);
  EXPECT_EQ(ended(other).status().code(), Code::kDeadlineExceeded) << "the same tick looks at both";
  EXPECT_EQ(waiting(), 1u);
  told.set_value(ok_status());
  const Outcome outcome = ended(early);
  ASSERT_TRUE(outcome.ok()) << outcome.status().to_string();
  EXPECT_EQ(outcome.value().version, version(1));
}

TEST_F(UpdateWait, SeesASessionThatCameAndWentBetweenTheMarkAndTheCall) {
  start();
  const UpdateMark before = mark();
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 1, "run/1");
  sender.send(wire::Abort{wire::make_failure(Status(Code::kCancelled, "the trainer lost its shard"), "transfer")});
  sender.expect<wire::ErrorReport>();
  update(sender, 2, "run/2", 2);
  update(sender, 3, "run/3", 3);
  const Outcome failed = receiver_->wait_for(version(1), {before, 0}, {});
  EXPECT_EQ(failed.status().code(), Code::kFailedPrecondition);
  EXPECT_TRUE(says(failed.status(), "the update to run/1 has failed, rank 0 of engine-0 is idle")) << failed.status().to_string();
  EXPECT_TRUE(says(failed.status(), "the trainer lost its shard")) << failed.status().to_string();
  ASSERT_NE(failed.status().detail(), nullptr);
  EXPECT_EQ(failed.status().detail()->rank, 0);
  EXPECT_EQ(failed.status().detail()->engine, "engine-0");
  EXPECT_EQ(failed.status().detail()->phase, "transfer");
  const Outcome overtaken = receiver_->wait_for(version(2), {before, 0}, {});
  ASSERT_TRUE(overtaken.ok()) << "it was committed, although another one has been since: " << overtaken.status().to_string();
  EXPECT_EQ(overtaken.value().session, 2u);
}

TEST_F(UpdateWait, GoesByTheFirstEndSinceTheMarkHoweverLateItLooks) {
  start();
  const UpdateMark before = mark();
  auto early = wait(1);
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 1, "run/1");
  sender.send(wire::Abort{wire::make_failure(Status(Code::kCancelled, "once more"), "transfer")});
  sender.expect<wire::ErrorReport>();
  update(sender, 2, "run/1", 1);
  EXPECT_TRUE(says(ended(early).status(), "once more"));
  EXPECT_TRUE(says(receiver_->wait_for(version(1), {before, 0}, {}).status(), "once more"));
  EXPECT_TRUE(receiver_->wait_for(version(1), {}, {}).ok()) << "without a mark it is what is held now";
}

TEST_F(UpdateWait, FailsWithASessionThatIsTornRejectedOrInDoubtAndSaysWhichStateItLeft) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  auto torn = wait(1);
  open_update(sender, 1, "run/1");
  sender.send(wire::Bucket{0, payload_extents()}, payload(1));
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, payload_sums(payload(2))});
  sender.expect<wire::ErrorReport>();
  const Status corrupt = ended(torn).status();
  EXPECT_EQ(corrupt.code(), Code::kFailedPrecondition);
  EXPECT_TRUE(says(corrupt, "is torn: corruption: ")) << corrupt.to_string();
  EXPECT_EQ(corrupt.detail()->name, "a.weight") << corrupt.to_string();

  auto rejected = wait(2);
  sender.open(2, "run/2");
  sender.expect<wire::Opened>();
  sender.manifest({});
  sender.expect<wire::Reject>();
  const Status missing = ended(rejected).status();
  EXPECT_TRUE(says(missing, "the update to run/2 has failed, rank 0 of engine-0 is torn")) << missing.to_string();
  EXPECT_EQ(missing.detail()->name, "a.weight") << missing.to_string();

  auto doubted = wait(3);
  {
    WireSender lead = connect("other");
    lead.hello();
    prepare_update(lead, 3, "run/3", 3);
  }
  EXPECT_TRUE(says(ended(doubted).status(), "is in_doubt")) << "its lead is gone";
  auto finished = wait(3);
  sender.session = SessionId{3};
  sender.send(wire::Commit{});
  sender.expect<wire::Committed>();
  EXPECT_TRUE(ended(finished).ok());
}

TEST_F(UpdateWait, FailsWithAnOpeningThatIsRefusedButNotWithASecondOneOfTheSameVersion) {
  start();
  WireSender sender = connect("lead");
  WireSender stranger = connect("stranger");
  sender.hello();
  stranger.hello();
  update(sender, 1, "run/5", 1);
  auto refused = wait(4);
  sender.open(2, "run/4");
  sender.expect<wire::ErrorReport>();
  const Status status = ended(refused).status();
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_TRUE(says(status, "steps rise within a run")) << status.to_string();

  auto patient = wait(6);
  open_update(sender, 3, "run/6");
  stranger.open(4, "run/6");
  stranger.expect<wire::ErrorReport>();
  const auto data = payload(6);
  sender.send(wire::Bucket{0, payload_extents()}, data);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, payload_sums(data)});
  sender.expect<wire::Prepared>();
  sender.send(wire::Commit{});
  sender.expect<wire::Committed>();
  EXPECT_TRUE(ended(patient).ok());
}

TEST_F(UpdateWait, EndsWhenNothingBeganInTime) {
  start();
  auto patient = wait(7, 500);
  clock_.advance_ms(499);
  EXPECT_EQ(waiting(), 1u);
  clock_.advance_ms(1);
  const Status status = ended(patient).status();
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(says(status, "the update to run/7 did not begin within 500 ms: rank 0 of engine-0 is idle, its version none"))
      << status.to_string();
  ASSERT_NE(status.detail(), nullptr);
  EXPECT_EQ(status.detail()->expected, "run/7");
  EXPECT_EQ(status.detail()->actual, "none");
}

TEST_F(UpdateWait, CountsEachStepOfTheSessionAsASignOfProgressAndNoneOfAnother) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  auto other = wait(9, 3'000);
  auto patient = wait(7, 3'000);
  clock_.advance_ms(2'000);
  sender.open(1, "run/7");
  sender.expect<wire::Opened>();
  clock_.advance_ms(2'000);
  EXPECT_EQ(ended(other).status().code(), Code::kDeadlineExceeded);
  sender.manifest(full_manifest());
  sender.expect<wire::Accept>();
  clock_.advance_ms(2'000);
  EXPECT_EQ(state(), "open");
  EXPECT_EQ(waiting(), 1u);
  clock_.advance_ms(1'000);
  const Status status = ended(patient).status();
  EXPECT_TRUE(says(status, "the update to run/7 made no progress within 3000 ms: rank 0 of engine-0 is open")) << status.to_string();
}

TEST_F(UpdateWait, EndsWhenAskedToWhenAllAreEndedAndWhenTheReceiverGoes) {
  start();
  std::stop_source stop;
  auto stopped = wait(1, 0, stop.get_token());
  auto stays = wait(1);
  stop.request_stop();
  EXPECT_EQ(ended(stopped).status().code(), Code::kCancelled);
  EXPECT_EQ(receiver_->wait_for(version(1), {}, stop.get_token()).status().code(), Code::kCancelled) << "asked before it began";
  EXPECT_EQ(stays.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  end_waits("the engine is let go");
  const Status status = ended(stays).status();
  EXPECT_EQ(status.code(), Code::kCancelled);
  EXPECT_EQ(status.message(), "the engine is let go");
  EXPECT_EQ(receiver_->wait_for(version(1), {}, {}).status().message(), "the engine is let go");
}

TEST_F(UpdateWait, OutlivesTheReceiverThatItWaitsFor) {
  start();
  auto patient = wait(1);
  receiver_.reset();
  ASSERT_EQ(patient.wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(patient.get().status().code(), Code::kCancelled);
}

TEST_F(UpdateWait, RefusesWhatIsNoVersionAndNoDeadline) {
  start();
  EXPECT_EQ(receiver_->wait_for({"", 1}, {}, {}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(receiver_->wait_for(version(1), {std::nullopt, -1}, {}).status().code(), Code::kInvalidArgument);
}

TEST_F(UpdateWait, RemembersTheLastEndsOnly) {
  start();
  const UpdateMark before = mark();
  WireSender sender = connect("lead");
  sender.hello();
  for (std::uint64_t step = 1; step <= UpdateWaits::kEndsKept + 1; ++step) {
    sender.open(step, version(step).to_string());
    sender.expect<wire::Opened>();
    sender.send(wire::Abort{wire::make_failure(Status(Code::kCancelled, "no"), "open")});
    sender.expect<wire::ErrorReport>();
  }
  EXPECT_EQ(mark().ended, before.ended + UpdateWaits::kEndsKept + 1);
  EXPECT_TRUE(says(receiver_->wait_for(version(2), {before, 0}, {}).status(), "has failed"));
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(receiver_->wait_for(version(1), {before, 0}, stop.get_token()).status().code(), Code::kCancelled) << "forgotten";
}

TEST_F(UpdateWait, RemembersASessionThatFailedOverAnyNumberOfRefusedOpeningsAndTheLastOfThese) {
  start();
  const UpdateMark before = mark();
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 1, "run/1");
  sender.send(wire::Abort{wire::make_failure(Status(Code::kCancelled, "the trainer lost its shard"), "transfer")});
  sender.expect<wire::ErrorReport>();
  update(sender, 2, "run/50", 1);
  for (std::uint64_t step = 2; step <= UpdateWaits::kEndsKept + 2; ++step) {
    sender.open(step + 1, version(step).to_string());
    sender.expect<wire::ErrorReport>();
  }
  EXPECT_TRUE(says(receiver_->wait_for(version(1), {before, 0}, {}).status(), "the trainer lost its shard"));
  EXPECT_TRUE(receiver_->wait_for(version(50), {before, 0}, {}).ok());
  EXPECT_TRUE(says(receiver_->wait_for(version(UpdateWaits::kEndsKept + 2), {before, 0}, {}).status(), "steps rise within a run"));
  std::stop_source stop;
  stop.request_stop();
  const Outcome forgotten = receiver_->wait_for(version(2), {before, 0}, stop.get_token());
  EXPECT_EQ(forgotten.status().code(), Code::kCancelled) << "refused, and others since";
  const UpdateMark after = mark();
  EXPECT_EQ(receiver_->wait_for(version(UpdateWaits::kEndsKept + 2), {after, 0}, stop.get_token()).status().code(), Code::kCancelled);
}

}  // namespace
}  // namespace headrace
