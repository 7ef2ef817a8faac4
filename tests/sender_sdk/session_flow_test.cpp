#include "sender_sdk/session_flow.h"

#include <gtest/gtest.h>

#include "core/wire/codec.h"

namespace headrace {
namespace {

constexpr SessionId kFirst{11};
constexpr SessionId kSecond{22};
constexpr Incarnation kLife{7};
const WeightVersion kVersion{"run", 5};

class SessionFlowTest : public ::testing::Test {
 protected:
  SessionFlowTest() : flow({receiver(0), receiver(1)}) {}

  static ReceiverFlow receiver(std::uint32_t rank) {
    ReceiverFlow made;
    made.engine = "engine-0";
    made.rank = rank;
    made.incarnation = kLife;
    return made;
  }
  SessionFlow::Outcome hear(std::size_t r, SessionId session, wire::Body body) {
    return flow.on_message(r, {session, kLife, std::move(body)});
  }
  SessionFlow::Outcome hear_opened(std::size_t r, SessionId session, const WeightVersion& version = kVersion) {
    return hear(r, session, wire::Opened{version.to_string(), {"a", "b"}});
  }
  SessionFlow::Outcome hear_error(std::size_t r, SessionId session) {
    wire::Failure failure;
    failure.code = static_cast<std::uint32_t>(Code::kCancelled);
    return hear(r, session, wire::ErrorReport{failure, 0});
  }
  void queue_bucket(std::size_t r, std::uint32_t slot) {
    Outgoing outgoing;
    outgoing.sequence = flow.receivers()[r].next_sequence++;
    outgoing.slot = slot;
    flow.receivers()[r].outbox.push_back(std::move(outgoing));
  }

  SessionFlow flow;
};

TEST_F(SessionFlowTest, KeepsAnOpenedThatCameBeforeTheCallerAskedForIt) {
  hear_opened(0, kFirst);
  hear_opened(1, kFirst);
  flow.begin(kVersion, std::nullopt);
  EXPECT_EQ(flow.agreed_session(), kFirst);
}

TEST_F(SessionFlowTest, AgreesOnlyWhenAllReceiversOpenedOneSessionOfTheVersion) {
  flow.begin(kVersion, std::nullopt);
  hear_opened(0, kFirst);
  EXPECT_FALSE(flow.agreed_session());
  hear_opened(1, kFirst, {"run", 4});
  EXPECT_FALSE(flow.agreed_session());
  hear_opened(1, kSecond);
  EXPECT_FALSE(flow.agreed_session());
  hear_opened(0, kSecond);
  EXPECT_EQ(flow.agreed_session(), kSecond);
}

TEST_F(SessionFlowTest, ForgetsAnOpenedWhoseSessionFailedBeforeTheCallerAskedForIt) {
  hear_opened(0, kFirst);
  hear_opened(1, kFirst);
  EXPECT_FALSE(hear_error(0, kFirst).failure);
  flow.begin(kVersion, std::nullopt);
  EXPECT_FALSE(hear_error(1, kFirst).failure) << "a late report of what is over";
  EXPECT_FALSE(hear_opened(0, kFirst).progress);
  EXPECT_FALSE(flow.agreed_session());
  hear_opened(0, kSecond);
  hear_opened(1, kSecond);
  EXPECT_EQ(flow.agreed_session(), kSecond);
}

TEST_F(SessionFlowTest, FailsAWaitingSenderWhenItsSessionFails) {
  flow.begin(kVersion, std::nullopt);
  hear_opened(0, kFirst);
  EXPECT_TRUE(hear_error(0, kFirst).failure);
}

TEST_F(SessionFlowTest, HearsNothingNewInAnErrorBehindAReject) {
  flow.begin(kVersion, kFirst);
  hear_opened(0, kFirst);
  hear_opened(1, kFirst);
  hear(0, kFirst, wire::Reject{2, {}});
  EXPECT_FALSE(hear_error(0, kFirst).failure) << "the defects say more";
  EXPECT_TRUE(flow.receivers()[0].opened);
  EXPECT_TRUE(hear_error(1, kFirst).failure) << "of a receiver that did not refuse";
}

TEST_F(SessionFlowTest, KeepsTheOpenedOfTheNextUpdateWhenThisOneEnds) {
  flow.begin(kVersion, std::nullopt);
  hear_opened(0, kFirst);
  hear_opened(1, kFirst);
  flow.adopt(kFirst);
  hear_opened(0, kSecond, {"run", 6});
  flow.end();
  flow.begin({"run", 6}, std::nullopt);
  EXPECT_FALSE(flow.agreed_session());
  hear_opened(1, kSecond, {"run", 6});
  EXPECT_EQ(flow.agreed_session(), kSecond);
}

TEST_F(SessionFlowTest, SendsNoBucketWithoutCreditAndNothingBeforeIt) {
  flow.begin(kVersion, kFirst);
  hear(0, kFirst, wire::Accept{});
  queue_bucket(0, 0);
  queue_bucket(0, 1);
  flow.push(0, wire::End{2, {}});
  EXPECT_FALSE(flow.take_sendable(0)) << "BEGIN has not come";
  hear(0, kFirst, wire::Begin{1});
  EXPECT_EQ(flow.take_sendable(0)->sequence, 0U);
  EXPECT_FALSE(flow.take_sendable(0));
  EXPECT_EQ(hear(0, kFirst, wire::Consumed{0}).freed_slot, 0U);
  EXPECT_EQ(flow.take_sendable(0)->sequence, 1U);
  EXPECT_EQ(std::get<wire::End>(wire::decode(flow.take_sendable(0)->message).value().body).buckets, 2U);
}

TEST_F(SessionFlowTest, GrantsASenderThatIsAloneOneBucketWithItsConfirm) {
  flow.begin(kVersion, kFirst);
  hear(0, kFirst, wire::Accept{});
  flow.confirm(true);
  queue_bucket(0, 0);
  queue_bucket(0, 1);
  EXPECT_TRUE(std::holds_alternative<wire::Confirm>(wire::decode(flow.take_sendable(0)->message).value().body));
  EXPECT_EQ(flow.take_sendable(0)->sequence, 0U);
  EXPECT_FALSE(flow.take_sendable(0)) << "one, until BEGIN says how many";
  hear(0, kFirst, wire::Begin{2});
  EXPECT_EQ(flow.take_sendable(0)->sequence, 1U);
}

TEST_F(SessionFlowTest, GrantsNothingWithConfirmWhereOthersHaveYetToConfirm) {
  flow.begin(kVersion, kFirst);
  hear(0, kFirst, wire::Accept{});
  flow.confirm(false);
  queue_bucket(0, 0);
  EXPECT_TRUE(std::holds_alternative<wire::Confirm>(wire::decode(flow.take_sendable(0)->message).value().body));
  EXPECT_FALSE(flow.take_sendable(0));
}

TEST_F(SessionFlowTest, RefusesPreparedWhileABucketIsOnTheWay) {
  flow.begin(kVersion, kFirst);
  hear(0, kFirst, wire::Accept{});
  hear(0, kFirst, wire::Begin{2});
  queue_bucket(0, 0);
  flow.take_sendable(0);
  EXPECT_TRUE(hear(0, kFirst, wire::Prepared{}).failure);
}

TEST_F(SessionFlowTest, RefusesWhatNoReceiverMaySay) {
  flow.begin(kVersion, kFirst);
  EXPECT_TRUE(hear(0, kFirst, wire::Begin{2}).failure) << "before ACCEPT";
  EXPECT_TRUE(hear(0, kFirst, wire::Consumed{0}).failure) << "nothing is on the way";
  EXPECT_TRUE(hear(0, kFirst, wire::Confirm{}).failure) << "a sender's message";
  hear(0, kFirst, wire::Accept{});
  EXPECT_TRUE(hear(0, kFirst, wire::Accept{}).failure) << "twice";
  EXPECT_TRUE(hear(0, kFirst, wire::Begin{0}).failure) << "no credits";
  EXPECT_TRUE(flow.on_message(1, {kFirst, Incarnation{8}, wire::Accept{}}).failure) << "another life";
}

TEST_F(SessionFlowTest, CountsAPongAsProgressOnlyWhenItGotFurther) {
  flow.begin(kVersion, kFirst);
  EXPECT_TRUE(hear(0, kFirst, wire::Pong{3, 1}).progress);
  EXPECT_FALSE(hear(0, kFirst, wire::Pong{3, 1}).progress);
  EXPECT_TRUE(hear(0, kFirst, wire::Pong{4, 1}).progress);
}

TEST_F(SessionFlowTest, AbortsInPlaceOfWhatWasQueued) {
  flow.begin(kVersion, kFirst);
  queue_bucket(0, 0);
  flow.push_abort(0, wire::Failure{});
  const auto sent = flow.take_sendable(0);
  ASSERT_TRUE(sent);
  EXPECT_TRUE(std::holds_alternative<wire::Abort>(wire::decode(sent->message).value().body));
  EXPECT_FALSE(flow.take_sendable(0));
  hear(1, kFirst, wire::Reject{});
  flow.push_abort(1, wire::Failure{});
  EXPECT_FALSE(flow.take_sendable(1)) << "it has ended the session itself";
}

}  // namespace
}  // namespace headrace
