#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/device/device.h"
#include "core/transport/data_path.h"

namespace headrace {

/// What every data path promises. `Backend` has `static constexpr DataPathKind kKind`.
template <class Backend>
class DataPathConformance : public ::testing::Test {
 protected:
  /// Does for one memory what the protocol does: hand over its descriptor if it has one.
  Status offer(MemoryId memory) {
    const int descriptor = source_->descriptor(memory);
    if (descriptor < 0) return ok_status();
    return sink_->attach(memory, source_->bytes(memory).size(), UniqueFd(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0)));
  }

  std::unique_ptr<Device> sender_device_ = make_host_device();
  std::unique_ptr<Device> receiver_device_ = make_host_device();
  std::unique_ptr<DataSource> source_ = make_data_source(Backend::kKind, *sender_device_);
  std::unique_ptr<DataSink> sink_ = make_data_sink(Backend::kKind, *receiver_device_);
};

TYPED_TEST_SUITE_P(DataPathConformance);

TYPED_TEST_P(DataPathConformance, SaysWhichPathItIs) {
  EXPECT_EQ(this->source_->kind(), TypeParam::kKind);
  EXPECT_EQ(this->sink_->kind(), TypeParam::kKind);
  EXPECT_EQ(parse_data_path(data_path_name(TypeParam::kKind)), TypeParam::kKind);
  EXPECT_EQ(parse_data_path("pigeon"), std::nullopt);
}

TYPED_TEST_P(DataPathConformance, TheReceiverReadsWhatTheSenderPacked) {
  const std::size_t used = 9'999;
  auto first = this->source_->allocate(10'000);
  auto second = this->source_->allocate(10'000);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first.value(), second.value());
  ASSERT_TRUE(this->offer(first.value()).ok());
  ASSERT_TRUE(this->offer(second.value()).ok());
  for (int round = 0; round < 3; ++round) {
    for (const MemoryId memory : {first.value(), second.value()}) {
      const auto packed = this->source_->bytes(memory);
      ASSERT_EQ(packed.size(), 10'000U);
      for (std::size_t i = 0; i < used; ++i) packed[i] = static_cast<std::byte>(i * 31 + memory.value + static_cast<std::size_t>(round));
      auto read = this->sink_->resolve(memory, this->source_->attachment(memory, used));
      ASSERT_TRUE(read.ok()) << read.status().to_string();
      ASSERT_GE(read.value().size(), used);
      for (std::size_t i = 0; i < used; ++i) {
        ASSERT_EQ(read.value()[i], static_cast<std::byte>(i * 31 + memory.value + static_cast<std::size_t>(round)));
      }
    }
  }
}

TYPED_TEST_P(DataPathConformance, ReleasedMemoryIsGone) {
  auto memory = this->source_->allocate(4'096);
  ASSERT_TRUE(memory.ok());
  ASSERT_TRUE(this->offer(memory.value()).ok());
  this->sink_->detach(memory.value());
  this->source_->release(memory.value());
  EXPECT_TRUE(this->source_->bytes(memory.value()).empty());
  EXPECT_EQ(this->source_->descriptor(memory.value()), -1);
  EXPECT_FALSE(this->sink_->resolve(memory.value(), {}).ok());
}

TYPED_TEST_P(DataPathConformance, RefusesToReadMemoryThatItWasNotGiven) {
  EXPECT_FALSE(this->sink_->resolve(MemoryId{12'345}, {}).ok());
}

TYPED_TEST_P(DataPathConformance, SaysWhenThereIsNoMemory) {
  const auto memory = this->source_->allocate(std::size_t{1} << 46);
  EXPECT_TRUE(memory.status().code() == Code::kResourceExhausted || memory.status().code() == Code::kInvalidArgument);
  EXPECT_NE(memory.status().message().find(std::to_string(std::size_t{1} << 46)), std::string::npos) << memory.status().message();
}

REGISTER_TYPED_TEST_SUITE_P(DataPathConformance, SaysWhichPathItIs, TheReceiverReadsWhatTheSenderPacked, ReleasedMemoryIsGone,
                            RefusesToReadMemoryThatItWasNotGiven, SaysWhenThereIsNoMemory);

}  // namespace headrace
