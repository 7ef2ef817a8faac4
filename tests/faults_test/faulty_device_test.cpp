#include "tests/faults/faulty_device.h"

#include <gtest/gtest.h>

namespace headrace {
namespace {

TEST(FaultyDevice, FailsMemoryCallsAtTheirStep) {
  const FaultPlan plan = {.seed = 7, .at_step = 2, .at_step_fault = Fault::kFail};
  FaultyDevice device(make_host_device(), plan);
  auto memory = device.allocate({.bytes = 4'096, .exportable = true, .touch = true, .label = "first"});
  ASSERT_TRUE(memory.ok()) << plan.describe();
  auto descriptor = device.export_memory(*memory.value());
  ASSERT_TRUE(descriptor.ok()) << plan.describe();
  const auto imported = device.import_memory(std::move(descriptor).value(), 4'096);
  EXPECT_EQ(imported.status().code(), Code::kResourceExhausted) << plan.describe();
  EXPECT_NE(imported.status().message().find("seed 7"), std::string::npos) << imported.status().message();
}

TEST(FaultyDevice, HoldsAStreamUntilItIsLetGo) {
  const FaultPlan plan = {.seed = 8, .at_step = 1, .at_step_fault = Fault::kDelay};
  FaultyDevice device(make_host_device(), plan);
  auto stream = device.create_stream("held");
  ASSERT_TRUE(stream.ok());
  std::vector<int> seen;
  ASSERT_TRUE(stream.value()->enqueue([&] { seen.push_back(0); }).ok());
  ASSERT_TRUE(stream.value()->synchronize(10'000).ok());
  ASSERT_TRUE(stream.value()->enqueue([&] { seen.push_back(1); }).ok());
  ASSERT_TRUE(stream.value()->enqueue([&] { seen.push_back(2); }).ok());
  auto event = stream.value()->record();
  ASSERT_TRUE(event.ok());
  EXPECT_EQ(event.value()->wait(20).code(), Code::kDeadlineExceeded) << plan.describe();
  device.release_delayed();
  ASSERT_TRUE(event.value()->wait(10'000).ok()) << plan.describe();
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2})) << plan.describe();
}

TEST(FaultyDevice, IsLostFromItsDeathOn) {
  const FaultPlan plan = {.seed = 9, .die_at_step = 1};
  FaultyDevice device(make_host_device(), plan);
  auto stream = device.create_stream("doomed");
  ASSERT_TRUE(stream.ok());
  bool ran = false;
  ASSERT_TRUE(stream.value()->enqueue([&] { ran = true; }).ok()) << plan.describe();
  EXPECT_EQ(stream.value()->enqueue([] {}).code(), Code::kDeviceLost) << plan.describe();
  EXPECT_EQ(device.allocate({.bytes = 1, .label = "none"}).status().code(), Code::kDeviceLost) << plan.describe();
  ASSERT_TRUE(stream.value()->synchronize(10'000).ok());
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace headrace
