#include <gtest/gtest.h>

#include <variant>

#include "sender_sdk/sender.h"
#include "tests/sender_sdk/sender_fixture.h"

// Which ranks of which engines an update is for, and what they must have in common.
namespace headrace::test {
namespace {

using wire::MessageType;

TEST_F(SenderTest, NeedsEveryRankUnlessSomeAreAsked) {
  FakeScript script;
  script.ranks = 3;
  script.rank = 1;
  start_receiver(script);
  auto sender = connect();
  const auto tensors = some_tensors();
  const Status refused = sender->open(update_of(tensors));
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
  EXPECT_NE(refused.message().find("engine-0: 1 of 3 ranks (missing 0, 2)"), std::string::npos) << refused.message();
  auto update = update_of(tensors);
  update.repair = true;
  ASSERT_TRUE(sender->open(update).ok());
  ASSERT_TRUE(add_all(*sender, tensors).ok());
  EXPECT_TRUE(sender->finish().ok());
  EXPECT_EQ(std::get<wire::Open>(receivers[0]->last(MessageType::kOpen)->body).ranks, std::vector<std::uint32_t>{1});
}

TEST_F(SenderTest, RefusesRanksOfOneEngineThatReportDifferentExpertMaps) {
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    FakeScript script;
    script.rank = rank;
    script.ranks = 3;
    script.expert_map.bytes[0] = rank == 2 ? 1 : 0;
    start_receiver(script);
  }
  auto sender = connect();
  const Status refused = sender->open(update_of(some_tensors()));
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
  EXPECT_NE(refused.message().find("rank 2"), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find("expert map is not that of rank 0"), std::string::npos) << refused.message();
  for (const auto& receiver : receivers) {
    EXPECT_TRUE(receiver->await([](const FakeReceiver& fake) { return fake.count(MessageType::kAbort) == 1; }));
    EXPECT_EQ(receiver->count(MessageType::kConfirm), 0U) << "nothing may be written before it";
  }
}

TEST_F(SenderTest, LetsEnginesDifferInTheirExpertMaps) {
  for (const char* engine : {"engine-0", "engine-1"}) {
    FakeScript script;
    script.engine = engine;
    script.expert_map.bytes[0] = static_cast<std::uint8_t>(engine[7]);
    start_receiver(script);
  }
  auto sender = connect();
  EXPECT_TRUE(run_update(*sender, some_tensors()).ok());
}

TEST_F(SenderTest, ReportsWhatEveryEngineDropsByName) {
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    FakeScript script;
    script.rank = rank;
    script.ranks = 2;
    script.wants = [](const wire::ManifestEntry& entry) {
      wire::Wanted wanted;
      wanted.ignored = entry.name == some_tensors()[0].entry.name;
      if (wanted.ignored) return wanted;
      wanted.granule.assign(entry.shape.size(), 1);
      wanted.boxes = {entry.box};
      return wanted;
    };
    start_receiver(script);
  }
  auto sender = connect();
  const auto report = run_update(*sender, some_tensors());
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().ignored, 1U);
  EXPECT_EQ(report.value().ignored_names, std::vector<std::string>{some_tensors()[0].entry.name});
}

TEST_F(SenderTest, ServesSeveralEngines) {
  for (const char* engine : {"engine-0", "engine-1"}) {
    FakeScript script;
    script.engine = engine;
    start_engine(2, script);
  }
  auto sender = connect();
  const auto report = run_update(*sender, some_tensors());
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().receipts.size(), 4U);
  for (const auto& receiver : receivers) EXPECT_TRUE(has(*receiver, some_tensors()[3]));
}

class DoubtfulSession : public SenderTest {
 protected:
  /// An engine of two ranks: the first is in doubt of session 4711, the second in state `second`.
  std::unique_ptr<SenderImpl> connect_to_doubtful(wire::SessionState second) {
    FakeScript script;
    script.ranks = 2;
    script.state = wire::SessionState::kInDoubt;
    script.state_session = 4'711;
    start_receiver(script);
    script.rank = 1;
    script.state = second;
    start_receiver(script);
    return connect();
  }
};

TEST_F(DoubtfulSession, IsCommittedWhenTheOtherRankHasCommitted) {
  auto sender = connect_to_doubtful(wire::SessionState::kIdle);
  const auto report = sender->resolve_in_doubt();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().session, 4'711U);
  EXPECT_EQ(report.value().receipts.size(), 2U);
  for (const auto& receiver : receivers) EXPECT_EQ(receiver->last(MessageType::kCommit)->session.value, 4'711U);
}

TEST_F(DoubtfulSession, IsCommittedNowhereWhenARankIsTorn) {
  auto sender = connect_to_doubtful(wire::SessionState::kTorn);
  const auto report = sender->resolve_in_doubt();
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), Code::kFailedPrecondition);
  EXPECT_NE(report.status().message().find("engine-0 rank 1: torn"), std::string::npos) << report.status().message();
  for (const auto& receiver : receivers) EXPECT_EQ(receiver->count(MessageType::kCommit), 0U);
}

}  // namespace
}  // namespace headrace::test
