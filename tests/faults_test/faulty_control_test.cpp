#include "tests/faults/faulty_control.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "core/transport/in_memory_control.h"

namespace headrace {
namespace {

using Bytes = std::vector<std::byte>;

class FaultyControl : public ::testing::Test {
 protected:
  void start(const FaultPlan& sender, const FaultPlan& receiver = {}) {
    trace_ = sender.describe() + "; " + receiver.describe();
    listener_ = std::make_unique<FaultyListener>(hub_.listen("r").value_or_throw(), receiver);
    connection_ = std::make_unique<FaultyConnection>(hub_.connect("r").value_or_throw(), sender);
  }

  /// Sends messages 0 to count - 1, each of 8 bytes with its number in all of them.
  Status send_numbers(int count) {
    for (int i = 0; i < count; ++i) HEADRACE_RETURN_IF_ERROR(connection_->send(Bytes(8, static_cast<std::byte>(i)), {}));
    return ok_status();
  }

  template <class End>
  std::vector<Bytes> messages(End& end) {
    std::vector<Bytes> all;
    while (true) {
      auto event = end.poll(0);
      EXPECT_TRUE(event.ok()) << trace_;
      if (!event.ok() || !event.value()) return all;
      if (event.value()->kind == ControlEventKind::kPeerLost) lost_ = true;
      if (event.value()->kind == ControlEventKind::kMessage) all.push_back(event.value()->message);
    }
  }

  static std::vector<Bytes> numbers(const std::vector<int>& which) {
    std::vector<Bytes> all;
    for (const int i : which) all.emplace_back(8, static_cast<std::byte>(i));
    return all;
  }

  InMemoryHub hub_;
  std::unique_ptr<FaultyListener> listener_;
  std::unique_ptr<FaultyConnection> connection_;
  std::string trace_;
  bool lost_ = false;
};

TEST_F(FaultyControl, PassesEverythingWithoutFaults) {
  start({});
  ASSERT_TRUE(send_numbers(5).ok());
  EXPECT_EQ(messages(*listener_), numbers({0, 1, 2, 3, 4}));
}

TEST_F(FaultyControl, DropsTheMessageOfAStep) {
  start({.seed = 1, .at_step = 2, .at_step_fault = Fault::kDrop});
  ASSERT_TRUE(send_numbers(5).ok()) << trace_;
  EXPECT_EQ(messages(*listener_), numbers({0, 1, 3, 4})) << trace_;
}

TEST_F(FaultyControl, DuplicatesTheMessageOfAStep) {
  start({.seed = 1, .at_step = 2, .at_step_fault = Fault::kDuplicate});
  ASSERT_TRUE(send_numbers(4).ok()) << trace_;
  EXPECT_EQ(messages(*listener_), numbers({0, 1, 2, 2, 3})) << trace_;
}

TEST_F(FaultyControl, CorruptsOneByteOfTheMessageOfAStep) {
  start({.seed = 1, .at_step = 1, .at_step_fault = Fault::kCorrupt});
  ASSERT_TRUE(send_numbers(3).ok()) << trace_;
  const auto all = messages(*listener_);
  ASSERT_EQ(all.size(), 3U) << trace_;
  EXPECT_EQ(all[0], numbers({0})[0]) << trace_;
  EXPECT_EQ(all[2], numbers({2})[0]) << trace_;
  int changed = 0;
  for (const std::byte byte : all[1]) changed += byte != std::byte{1};
  EXPECT_EQ(changed, 1) << trace_;
}

TEST_F(FaultyControl, DelaysAMessageAndThoseBehindItInOrder) {
  start({.seed = 1, .at_step = 1, .at_step_fault = Fault::kDelay});
  ASSERT_TRUE(send_numbers(4).ok()) << trace_;
  EXPECT_EQ(messages(*listener_), numbers({0})) << trace_;
  for (int i = 0; i < FaultyOutbox::kDelayPolls; ++i) ASSERT_TRUE(connection_->poll(0).ok());
  EXPECT_EQ(messages(*listener_), numbers({1, 2, 3})) << trace_;
}

TEST_F(FaultyControl, RefusesTheMessageOfAStep) {
  start({.seed = 1, .at_step = 0, .at_step_fault = Fault::kFail});
  EXPECT_EQ(send_numbers(1).code(), Code::kResourceExhausted) << trace_;
  EXPECT_TRUE(send_numbers(1).ok()) << trace_;
}

TEST_F(FaultyControl, ADeadSenderIsLostToTheReceiver) {
  start({.seed = 1, .die_at_step = 3});
  EXPECT_EQ(send_numbers(5).code(), Code::kUnavailable) << trace_;
  EXPECT_TRUE(connection_->dead());
  EXPECT_EQ(messages(*listener_), numbers({0, 1, 2})) << trace_;
  EXPECT_TRUE(lost_) << trace_;
  EXPECT_EQ(connection_->poll(0).status().code(), Code::kUnavailable);
}

TEST_F(FaultyControl, ADeadReceiverIsLostToTheSender) {
  start({}, {.seed = 1, .die_at_step = 1});
  ASSERT_TRUE(send_numbers(1).ok());
  messages(*listener_);
  ASSERT_TRUE(listener_->send(connection_->id(), Bytes(1), {}).ok()) << trace_;
  EXPECT_EQ(listener_->send(connection_->id(), Bytes(1), {}).code(), Code::kUnavailable) << trace_;
  EXPECT_EQ(messages(*connection_).size(), 1U) << trace_;
  EXPECT_TRUE(lost_) << trace_;
}

TEST_F(FaultyControl, LosesAndChangesDescriptors) {
  start({.seed = 1, .at_step = 1, .at_step_fault = Fault::kCorrupt}, {.seed = 2, .at_step = 0, .at_step_fault = Fault::kDrop});
  ASSERT_TRUE(send_numbers(1).ok());
  messages(*listener_);
  ASSERT_TRUE(connection_->connect_descriptors(listener_->descriptor_path(), 0).ok());
  const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_TRUE(connection_->send_descriptor(MemoryId{1}, 100, memory.get()).ok());
  auto event = listener_->poll(0);
  ASSERT_TRUE(event.ok() && event.value()) << trace_;
  EXPECT_EQ(event.value()->memory_bytes, 101U) << trace_;
  ASSERT_TRUE(listener_->acknowledge(connection_->id(), MemoryId{1}, ok_status()).ok());
  EXPECT_FALSE(connection_->poll(0).value().has_value()) << trace_;
}

TEST_F(FaultyControl, OneSeedGivesOneRun) {
  const FaultPlan plan = {.seed = 20'260'101, .drop = 0.2, .duplicate = 0.2, .corrupt = 0.2};
  std::vector<std::vector<Bytes>> runs;
  for (int run = 0; run < 2; ++run) {
    start(plan);
    ASSERT_TRUE(send_numbers(200).ok());
    runs.push_back(messages(*listener_));
    connection_.reset();
    listener_.reset();
  }
  EXPECT_EQ(runs[0], runs[1]) << plan.describe();
  std::vector<int> all(200);
  for (int i = 0; i < 200; ++i) all[static_cast<std::size_t>(i)] = i;
  EXPECT_NE(runs[0], numbers(all)) << plan.describe();
  EXPECT_NE(plan.describe().find("20260101"), std::string::npos);
}

}  // namespace
}  // namespace headrace
