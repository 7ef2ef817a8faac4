#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/sender_sdk/sender_fixture.h"

namespace headrace::test {
namespace {

using wire::MessageType;

bool contains(const Status& status, std::string_view text) {
  return status.message().find(text) != std::string::npos;
}

/// Lets a manual clock run at the pace of PING and PONG, so that everything sent before has arrived when a deadline expires: an answer
/// brings the next round of the sender's loop, which finds that it is time for the next PING.
FakeReceiver::Intercept pass_time(std::shared_ptr<ManualClock> clock) {
  return [clock](FakeReceiver&, const PeerId&, const wire::Message& message) {
    if (std::holds_alternative<wire::Ping>(message.body)) clock->advance_ms(300);
    return false;
  };
}

class SenderFailureTest : public SenderTest {
 protected:
  const std::vector<TestTensor> tensors{make_tensor("first", {100'000}, 1), make_tensor("second", {200'000}, 2)};
};

TEST_F(SenderFailureTest, CarriesTheDefectsOfEveryReceiverThatRejects) {
  FakeScript script;
  script.ranks = 3;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    script.rank = rank;
    start_receiver(script, [rank](FakeReceiver& fake, const PeerId& peer, const wire::Message& message) {
      if (rank == 1 || !std::holds_alternative<wire::Manifest>(message.body)) return false;
      wire::Failure defect = fake.failure(Code::kInvalidArgument, "shape [100000], table has [99]");
      defect.name = rank == 0 ? "first" : "second";
      defect.phase = "manifest";
      fake.send(peer, wire::Reject{1, {defect}});
      return true;
    });
  }
  auto sender = connect();
  const Status status = sender->open(update_of(tensors));
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_TRUE(contains(status, "engine-0 rank 0, manifest: shape [100000], table has [99] [first]")) << status.message();
  EXPECT_TRUE(contains(status, "engine-0 rank 2, manifest: shape [100000], table has [99] [second]")) << status.message();
  EXPECT_TRUE(contains(status, "2 defects"));
  EXPECT_TRUE(receivers[1]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kAbort) == 1; }));
  EXPECT_EQ(sender->add("first", tensors[0].view()).message(), status.message()) << "the failure sticks";
  for (const auto& receiver : receivers) EXPECT_EQ(receiver->count(MessageType::kConfirm), 0U);
}

TEST_F(SenderFailureTest, NamesEntriesThatNobodyWantsAndTellsTheReceivers) {
  FakeScript script;
  script.wants = [](const wire::ManifestEntry& entry) {
    wire::Wanted wanted{false, {1}, {entry.box}};
    if (entry.name == "second") wanted.boxes.clear();
    return wanted;
  };
  start_receiver(script);
  auto sender = connect();
  const Status status = sender->open(update_of(tensors));
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_TRUE(contains(status, "second")) << status.message();
  EXPECT_FALSE(contains(status, "first"));
  ASSERT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kAbort) == 1; }));
  EXPECT_NE(std::get<wire::Abort>(receivers[0]->last(MessageType::kAbort)->body).failure.message.find("second"), std::string::npos);
}

TEST_F(SenderFailureTest, ReturnsARanksErrorWithRankPhaseBucketAndTensorAndTellsTheOthers) {
  FakeScript script;
  script.ranks = 3;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    script.rank = rank;
    start_receiver(script, [rank](FakeReceiver& fake, const PeerId& peer, const wire::Message& message) {
      const auto* bucket = std::get_if<wire::Bucket>(&message.body);
      if (rank != 1 || bucket == nullptr || bucket->sequence != 1) return false;
      wire::Failure failure = fake.failure(Code::kCorruption, "bytes lie");
      failure.phase = "transfer";
      failure.bucket = 1;
      failure.name = "second";
      fake.send(peer, wire::ErrorReport{failure, static_cast<std::uint32_t>(wire::SessionState::kTorn)});
      return true;
    });
  }
  auto sender = connect();
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  const Status status = add_all(*sender, tensors);
  const Status finished = sender->finish().status();
  EXPECT_EQ(finished.code(), Code::kCorruption);
  EXPECT_EQ(finished.message(), "engine-0 rank 1, transfer, bucket 1: bytes lie [second]");
  if (!status.ok()) {
    EXPECT_EQ(status.message(), finished.message());
  }
  for (const std::size_t r : {0U, 2U}) {
    ASSERT_TRUE(receivers[r]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kAbort) == 1; }));
    const auto failure = std::get<wire::Abort>(receivers[r]->last(MessageType::kAbort)->body).failure;
    EXPECT_EQ(failure.rank, 1);
    EXPECT_EQ(failure.phase, "transfer");
    EXPECT_EQ(failure.bucket, 1);
    EXPECT_EQ(failure.name, "second");
  }
}

TEST_F(SenderFailureTest, HearsOfAFailureWhileTheCallerIsElsewhere) {
  start_engine(2);
  auto sender = connect();
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  receivers[0]->post([](FakeReceiver& fake) {
    const auto failure = fake.failure(Code::kFailedPrecondition, "the engine sleeps");
    for (const auto& peer : fake.peers()) fake.send(peer, wire::ErrorReport{failure, 0});
  });
  // No call of the sender runs: its own thread tells the other receiver.
  EXPECT_TRUE(receivers[1]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kAbort) == 1; }));
  EXPECT_TRUE(contains(sender->add("first", tensors[0].view()), "the engine sleeps"));
}

TEST_F(SenderFailureTest, WorksAgainAfterAFailureOnTheSameConnections) {
  start_engine(2);
  auto sender = connect();
  ASSERT_TRUE(sender->open(update_of(tensors, 1)).ok());
  ASSERT_TRUE(sender->add("first", tensors[0].view()).ok());
  sender->abort("the learner diverged");
  const Status status = sender->add("second", tensors[1].view());
  EXPECT_EQ(status.code(), Code::kCancelled);
  EXPECT_TRUE(contains(status, "the learner diverged"));
  EXPECT_EQ(sender->finish().status().code(), Code::kCancelled);
  for (std::uint64_t step = 2; step <= 3; ++step) {
    const auto report = run_update(*sender, tensors, step);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
  }
  for (const auto& receiver : receivers) {
    for (const TestTensor& tensor : tensors) EXPECT_TRUE(has(*receiver, tensor));
    EXPECT_EQ(receiver->count(MessageType::kAbort), 1U);
  }
}

TEST_F(SenderFailureTest, IgnoresMessagesOfEarlierSessions) {
  start_engine(1);
  auto sender = connect();
  ASSERT_TRUE(sender->open(update_of(tensors, 1)).ok());
  const SessionId old = receivers[0]->last(MessageType::kOpen)->session;
  sender->abort("first try");
  ASSERT_TRUE(sender->open(update_of(tensors, 2)).ok());
  receivers[0]->post([old](FakeReceiver& fake) {
    for (const auto& peer : fake.peers()) {
      fake.send_in(old, peer, wire::ErrorReport{fake.failure(Code::kInternal, "of the old session"), 0});
      fake.send_in(old, peer, wire::Consumed{77});
      fake.send_in(old, peer, wire::Prepared{});
    }
  });
  ASSERT_TRUE(add_all(*sender, tensors).ok());
  const auto report = sender->finish();
  EXPECT_TRUE(report.ok()) << report.status().to_string();
}

TEST_F(SenderFailureTest, NamesPhaseAndReceiverWhenOneStaysSilent) {
  auto manual = std::make_shared<ManualClock>();
  clock = manual;
  FakeScript script;
  script.ranks = 2;
  start_receiver(script, pass_time(manual));
  script.rank = 1;
  start_receiver(script, [](FakeReceiver&, const PeerId&, const wire::Message& message) {
    return !std::holds_alternative<wire::Hello>(message.body);
  });
  auto sender = connect();
  manual->advance_ms(300);
  const Status status = sender->open(update_of(tensors));
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "engine-0 rank 1, open: no progress within 30000 ms, waiting for OPENED of engine-0 rank 1");
  EXPECT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kAbort) == 1; }));
}

TEST_F(SenderFailureTest, NamesTheBucketThatIsNotConsumed) {
  auto manual = std::make_shared<ManualClock>();
  clock = manual;
  FakeScript script;
  script.ranks = 2;
  start_receiver(script, pass_time(manual));
  script.rank = 1;
  start_receiver(script);
  receivers[1]->hold_consumed(true);
  auto sender = connect();
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  manual->advance_ms(300);
  const Status status = add_all(*sender, tensors);
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "engine-0 rank 1, transfer, bucket 0: no progress within 30000 ms, waiting for CONSUMED of engine-0 rank 1");
}

TEST_F(SenderFailureTest, GivesTimeToAReceiverWhoseProgressRises) {
  auto manual = std::make_shared<ManualClock>();
  clock = manual;
  std::uint64_t progress = 0;
  bool preparing = false;
  start_receiver({}, [&](FakeReceiver& fake, const PeerId& peer, const wire::Message& message) {
    if (std::holds_alternative<wire::End>(message.body)) {
      preparing = true;
      manual->advance_ms(1'000);
      return true;
    }
    if (!std::holds_alternative<wire::Ping>(message.body) || !preparing) return false;
    // Hooks run: each PONG got further, and PREPARED comes ten times as late as the deadline.
    manual->advance_ms(1'000);
    if (++progress < 50) {
      fake.send(peer, wire::Pong{progress, 2});
    } else if (progress == 50) {
      fake.send(peer, wire::Prepared{});
    }
    return true;
  });
  SenderOptions with = options();
  with.deadline_ms = 5'000;
  auto sender = connect(with);
  const auto report = run_update(*sender, tensors);
  EXPECT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_GE(manual->now_ns(), 50'000'000'000);
}

TEST_F(SenderFailureTest, FailsWhenAReceiverDies) {
  start_engine(2);
  auto sender = connect();
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  receivers.erase(receivers.begin());
  ASSERT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kAbort) == 1; }));
  const Status status = sender->add("first", tensors[0].view());
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_TRUE(contains(status, "engine-0 rank 0, transfer")) << status.message();
  const Status again = sender->open(update_of(tensors));
  EXPECT_EQ(again.code(), Code::kUnavailable);
  EXPECT_TRUE(contains(again, "engine-0 rank 0")) << again.message();
}

TEST_F(SenderFailureTest, TellsReceiversWhenItIsDestroyedDuringAnUpdate) {
  start_engine(2);
  auto sender = connect();
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  sender.reset();
  for (const auto& receiver : receivers) {
    ASSERT_TRUE(receiver->await([](const FakeReceiver& fake) { return fake.count(MessageType::kAbort) == 1; }));
    EXPECT_EQ(std::get<wire::Abort>(receiver->last(MessageType::kAbort)->body).failure.sender, "trainer-0");
  }
}

TEST_F(SenderFailureTest, ReleasesAsynchronousTensorsOnceWhenTheUpdateFails) {
  start_engine(1);
  receivers[0]->hold_consumed(true);
  auto sender = connect();
  std::vector<TestTensor> many;
  for (std::uint64_t i = 0; i < 30; ++i) many.push_back(make_tensor("w" + std::to_string(i), {20'000}, i));
  std::vector<std::atomic<int>> released(many.size());
  std::atomic<int> failed = 0;
  ASSERT_TRUE(sender->open(update_of(many)).ok());
  for (std::size_t i = 0; i < many.size(); ++i) {
    ASSERT_TRUE(sender
                    ->add_async(many[i].entry.name, many[i].view(),
                                [&, i](const Status& outcome) {
                                  ++released[i];
                                  if (!outcome.ok()) ++failed;
                                })
                    .ok());
  }
  // Two buffers of three tensors each are on the way; all other tensors wait.
  ASSERT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kBucket) == 2; }));
  sender->abort("enough");
  EXPECT_EQ(sender->finish().status().code(), Code::kCancelled);
  EXPECT_EQ(sender
                ->add_async("w0", many[0].view(),
                            [&](const Status& outcome) {
                              if (!outcome.ok()) ++failed;
                            })
                .code(),
            Code::kCancelled);
  sender.reset();
  for (const auto& count : released) EXPECT_EQ(count.load(), 1);
  EXPECT_GE(failed.load(), 24 + 1);
}

TEST_F(SenderFailureTest, RefusesReceiversOfAnotherJobAndSaysSo) {
  FakeScript script;
  script.job = "other";
  start_receiver(script);
  const auto sender = SenderImpl::connect(options(), environment());
  ASSERT_FALSE(sender.ok());
  EXPECT_EQ(sender.status().code(), Code::kFailedPrecondition);
  EXPECT_TRUE(contains(sender.status(), "'other'")) << sender.status().message();
}

TEST_F(SenderFailureTest, ComesAgainWhileItsEarlierConnectionIsNotGoneYet) {
  int refused = 0;
  start_receiver({}, [&](FakeReceiver& fake, const PeerId& peer, const wire::Message& message) {
    if (!std::holds_alternative<wire::Hello>(message.body) || refused == 2) return false;
    ++refused;
    fake.send_in({}, peer, wire::ErrorReport{fake.failure(Code::kUnavailable, "sender trainer-0 is connected already"), 0});
    return true;
  });
  auto sender = connect();
  ASSERT_NE(sender, nullptr);
  EXPECT_EQ(refused, 2);
  EXPECT_TRUE(run_update(*sender, {make_tensor("w", {100}, 1)}).ok());
}

TEST_F(SenderFailureTest, IsRefusedWhileItsNameStaysTaken) {
  start_receiver({}, [&](FakeReceiver& fake, const PeerId& peer, const wire::Message& message) {
    if (!std::holds_alternative<wire::Hello>(message.body)) return false;
    fake.send_in({}, peer, wire::ErrorReport{fake.failure(Code::kUnavailable, "sender trainer-0 is connected already"), 0});
    return true;
  });
  SenderOptions with = options();
  with.connect_timeout_ms = 120;
  const auto sender = SenderImpl::connect(with, environment());
  ASSERT_FALSE(sender.ok());
  EXPECT_EQ(sender.status().code(), Code::kUnavailable);
  EXPECT_NE(sender.status().message().find("connected already"), std::string::npos) << sender.status().message();
}

TEST_F(SenderFailureTest, ReturnsWhatAReceiverSaysAgainstHello) {
  start_receiver({}, [](FakeReceiver& fake, const PeerId& peer, const wire::Message&) {
    fake.send_in({}, peer, wire::ErrorReport{fake.failure(Code::kResourceExhausted, "too many connections"), 0});
    return true;
  });
  const auto sender = SenderImpl::connect(options(), environment());
  ASSERT_FALSE(sender.ok());
  EXPECT_EQ(sender.status().code(), Code::kResourceExhausted);
  EXPECT_TRUE(contains(sender.status(), "too many connections"));
}

TEST_F(SenderFailureTest, EndsTheUpdateOfASecondSenderWhenTheLeadGivesUp) {
  std::atomic<bool> hold_manifests = true;
  start_receiver({}, [&](FakeReceiver&, const PeerId&, const wire::Message& message) {
    return hold_manifests && std::holds_alternative<wire::Manifest>(message.body);
  });
  auto lead = connect(options("trainer-0"));
  auto second = connect(options("trainer-1"));
  auto mine = update_of({tensors[0]}, 1);
  auto other = update_of({tensors[1]}, 1);
  mine.senders = other.senders = {"trainer-0", "trainer-1"};
  Status lead_status;
  Status second_status;
  std::thread leading([&] { lead_status = lead->open(mine); });
  std::thread joining([&] { second_status = second->open(other); });
  ASSERT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kManifest) == 2; }));
  lead->abort("no time");
  leading.join();
  joining.join();
  EXPECT_EQ(lead_status.code(), Code::kCancelled);
  EXPECT_EQ(second_status.code(), Code::kCancelled);
  EXPECT_TRUE(contains(second_status, "no time")) << second_status.message();
  hold_manifests = false;
  mine.version.step = other.version.step = 2;
  std::thread again([&] { lead_status = lead->open(mine); });
  second_status = second->open(other);
  again.join();
  EXPECT_TRUE(lead_status.ok()) << lead_status.to_string();
  EXPECT_TRUE(second_status.ok()) << second_status.to_string();
}

TEST_F(SenderFailureTest, RefusesToJoinALeadWithOtherSenders) {
  start_engine(1);
  auto lead = connect(options("trainer-0"));
  auto second = connect(options("trainer-1"));
  auto update = update_of(tensors);
  update.senders = {"trainer-0", "trainer-1"};
  auto other = update;
  other.senders = {"trainer-0", "trainer-1", "trainer-2"};
  Status lead_status;
  std::thread leading([&] { lead_status = lead->open(update); });
  const Status status = second->open(other);
  leading.join();
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_TRUE(contains(status, "(expected [trainer-0, trainer-1, trainer-2], got [trainer-0, trainer-1])")) << status.message();
  EXPECT_FALSE(lead_status.ok()) << "the session was aborted for all";
}

TEST_F(SenderFailureTest, DoesNotTakeConsumedOutOfOrder) {
  start_receiver({}, [](FakeReceiver& fake, const PeerId& peer, const wire::Message& message) {
    if (!std::holds_alternative<wire::Bucket>(message.body)) return false;
    fake.send(peer, wire::Consumed{5});
    return true;
  });
  auto sender = connect();
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  (void)add_all(*sender, tensors);
  const Status status = sender->finish().status();
  EXPECT_TRUE(contains(status, "bucket 5: the receiver sent CONSUMED of bucket 5 (expected 0, got 5)")) << status.message();
}

}  // namespace
}  // namespace headrace::test
