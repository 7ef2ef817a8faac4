#include "tests/faults/faulty_data_path.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace headrace {
namespace {

class FaultyDataPath : public ::testing::Test {
 protected:
  std::unique_ptr<DataSource> source(const FaultPlan& plan) {
    return std::make_unique<FaultySource>(make_data_source(DataPathKind::kInline, *device_), plan);
  }
  std::unique_ptr<DataSink> sink(const FaultPlan& plan) {
    return std::make_unique<FaultySink>(make_data_sink(DataPathKind::kInline, *device_), plan);
  }
  static std::int64_t nonzero(std::span<const std::byte> bytes) {
    return std::count_if(bytes.begin(), bytes.end(), [](std::byte byte) { return byte != std::byte{0}; });
  }

  std::unique_ptr<Device> device_ = make_host_device();
};

TEST_F(FaultyDataPath, FailsTheAllocationOfAStep) {
  const FaultPlan plan = {.seed = 3, .at_step = 1, .at_step_fault = Fault::kFail};
  const auto faulty = source(plan);
  EXPECT_TRUE(faulty->allocate(10).ok()) << plan.describe();
  EXPECT_EQ(faulty->allocate(10).status().code(), Code::kResourceExhausted) << plan.describe();
  EXPECT_TRUE(faulty->allocate(10).ok()) << plan.describe();
}

TEST_F(FaultyDataPath, CorruptsOrCutsWhatIsSent) {
  for (const Fault fault : {Fault::kCorrupt, Fault::kDrop}) {
    const FaultPlan plan = {.seed = 4, .at_step = 1, .at_step_fault = fault};
    const auto faulty = source(plan);
    auto memory = faulty->allocate(100);
    ASSERT_TRUE(memory.ok());
    const auto sent = faulty->attachment(memory.value(), 100);
    EXPECT_EQ(sent.size(), fault == Fault::kDrop ? 99U : 100U) << plan.describe();
    EXPECT_EQ(nonzero(sent), fault == Fault::kDrop ? 0 : 1) << plan.describe();
    EXPECT_EQ(nonzero(faulty->attachment(memory.value(), 100)), 0) << plan.describe();
  }
}

TEST_F(FaultyDataPath, CorruptsOrCutsWhatIsRead) {
  const std::vector<std::byte> bytes(100);
  for (const Fault fault : {Fault::kCorrupt, Fault::kDrop}) {
    const FaultPlan plan = {.seed = 5, .at_step = 0, .at_step_fault = fault};
    const auto faulty = sink(plan);
    auto read = faulty->resolve(MemoryId{1}, bytes);
    ASSERT_TRUE(read.ok()) << plan.describe();
    EXPECT_EQ(read.value().size(), fault == Fault::kDrop ? 99U : 100U) << plan.describe();
    EXPECT_EQ(nonzero(read.value()), fault == Fault::kDrop ? 0 : 1) << plan.describe();
    EXPECT_EQ(nonzero(bytes), 0);
  }
}

TEST_F(FaultyDataPath, DiesAtItsStep) {
  const FaultPlan plan = {.seed = 6, .die_at_step = 1};
  const std::vector<std::byte> bytes(100);
  const auto faulty = sink(plan);
  EXPECT_TRUE(faulty->resolve(MemoryId{1}, bytes).ok()) << plan.describe();
  EXPECT_EQ(faulty->resolve(MemoryId{1}, bytes).status().code(), Code::kDeviceLost) << plan.describe();
  EXPECT_EQ(faulty->attach(MemoryId{2}, 1, UniqueFd()).code(), Code::kDeviceLost) << plan.describe();
  EXPECT_EQ(source({.seed = 6, .die_at_step = 0})->allocate(1).status().code(), Code::kDeviceLost);
}

}  // namespace
}  // namespace headrace
