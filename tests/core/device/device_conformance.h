#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/device/device.h"

namespace headrace {

/// What every device promises. `Backend` has `static std::unique_ptr<Device> make()`.
template <class Backend>
class DeviceConformance : public ::testing::Test {
 protected:
  static std::unique_ptr<DeviceMemory> allocate(Device& device, std::size_t bytes, bool exportable) {
    auto memory = device.allocate({.bytes = bytes, .exportable = exportable, .touch = true, .label = "test"});
    EXPECT_TRUE(memory.ok()) << memory.status().to_string();
    return memory.ok() ? std::move(memory).value() : nullptr;
  }

  std::unique_ptr<Device> device_ = Backend::make();
};

/// The byte that the tests write at `offset`.
inline std::byte pattern(std::size_t offset) {
  return static_cast<std::byte>((offset * 131 + offset / 4096 * 17 + 7) & 0xff);
}

inline void fill_pattern(std::span<std::byte> bytes) {
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(i);
}

inline bool has_pattern(std::span<const std::byte> bytes) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != pattern(i)) return false;
  }
  return true;
}

inline constexpr std::int64_t kTestDeadlineMs = 10'000;

/// Runs `body` in a forked process; its exit status, -1 when a signal ended it. The child must not have to start threads.
template <class Body>
int exit_status_of_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TYPED_TEST_SUITE_P(DeviceConformance);

TYPED_TEST_P(DeviceConformance, GivesZeroedAlignedMemoryOfExactlyTheSizeAskedFor) {
  for (const bool exportable : {false, true}) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{4097}, (std::size_t{2} << 20), (std::size_t{5} << 20) + 3}) {
      const auto memory = this->allocate(*this->device_, bytes, exportable);
      ASSERT_NE(memory, nullptr);
      EXPECT_EQ(memory->size(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->data()) % (bytes >= (std::size_t{2} << 20) ? std::size_t{2} << 20 : 4096), 0U);
      for (const std::byte byte : memory->bytes()) ASSERT_EQ(byte, std::byte{0});
      memory->bytes()[bytes - 1] = std::byte{1};
    }
  }
}

TYPED_TEST_P(DeviceConformance, RefusesNoBytes) {
  const auto memory = this->device_->allocate({.bytes = 0, .exportable = true, .touch = true, .label = "nothing"});
  EXPECT_EQ(memory.status().code(), Code::kInvalidArgument);
}

TYPED_TEST_P(DeviceConformance, NamesAskedAndFreeBytesWhenMemoryDoesNotFit) {
  for (const bool exportable : {false, true}) {
    for (const std::size_t bytes : {std::size_t{1} << 46, SIZE_MAX - 4096}) {
      const auto memory = this->device_->allocate({.bytes = bytes, .exportable = exportable, .touch = true, .label = "too much"});
      EXPECT_EQ(memory.status().code(), Code::kResourceExhausted);
      EXPECT_NE(memory.status().message().find(std::to_string(bytes) + " bytes asked for"), std::string::npos) << memory.status().message();
      EXPECT_NE(memory.status().message().find("bytes free"), std::string::npos) << memory.status().message();
      EXPECT_NE(memory.status().message().find("too much"), std::string::npos) << memory.status().message();
    }
  }
}

TYPED_TEST_P(DeviceConformance, AnotherProcessReadsWhatWasExported) {
  const std::size_t bytes = (std::size_t{3} << 20) + 5;
  const auto memory = this->allocate(*this->device_, bytes, true);
  ASSERT_NE(memory, nullptr);
  auto descriptor = this->device_->export_memory(*memory);
  ASSERT_TRUE(descriptor.ok()) << descriptor.status().to_string();
  fill_pattern(memory->bytes());
  // A device of its own, as another process has: the parent's would hand out the exporter's mapping.
  const int status = exit_status_of_child([&] {
    const auto device = TypeParam::make();
    const auto imported = device->import_memory(std::move(descriptor).value(), bytes);
    if (!imported.ok() || imported.value()->size() != bytes) return 1;
    if (imported.value()->data() == memory->data()) return 2;
    return has_pattern(imported.value()->bytes()) ? 0 : 3;
  });
  EXPECT_EQ(status, 0);
}

TYPED_TEST_P(DeviceConformance, ImportedMemoryIsReadOnly) {
  const auto memory = this->allocate(*this->device_, 4096, true);
  auto descriptor = this->device_->export_memory(*memory);
  ASSERT_TRUE(descriptor.ok());
  const int status = exit_status_of_child([&] {
    const auto device = TypeParam::make();
    const auto imported = device->import_memory(std::move(descriptor).value(), 4096);
    if (!imported.ok()) return 1;
    const int zero = ::open("/dev/zero", O_RDONLY | O_CLOEXEC);
    return ::read(zero, imported.value()->data(), 1) == -1 && errno == EFAULT ? 0 : 2;
  });
  EXPECT_EQ(status, 0);
}

TYPED_TEST_P(DeviceConformance, ImportInTheExportingProcessSharesItsMapping) {
  const auto memory = this->allocate(*this->device_, 8192, true);
  auto first = this->device_->export_memory(*memory);
  auto second = this->device_->export_memory(*memory);
  ASSERT_TRUE(first.ok() && second.ok());
  const auto once = this->device_->import_memory(std::move(first).value(), 8192);
  const auto twice = this->device_->import_memory(std::move(second).value(), 8192);
  ASSERT_TRUE(once.ok() && twice.ok());
  EXPECT_EQ(once.value()->data(), memory->data());
  EXPECT_EQ(twice.value()->data(), memory->data());
}

TYPED_TEST_P(DeviceConformance, AnImportOutlivesTheExportersMemory) {
  auto memory = this->allocate(*this->device_, 8192, true);
  fill_pattern(memory->bytes());
  auto descriptor = this->device_->export_memory(*memory);
  ASSERT_TRUE(descriptor.ok());
  auto imported = this->device_->import_memory(std::move(descriptor).value(), 8192);
  ASSERT_TRUE(imported.ok());
  memory.reset();
  EXPECT_TRUE(has_pattern(imported.value()->bytes()));
  this->device_.reset();
  EXPECT_TRUE(has_pattern(imported.value()->bytes()));
}

TYPED_TEST_P(DeviceConformance, AnImportOutlivesTheExportingProcess) {
  const std::size_t bytes = std::size_t{1} << 20;
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto device = TypeParam::make();
    const auto memory = device->allocate({.bytes = bytes, .exportable = true, .touch = true, .label = "child"});
    if (!memory.ok()) ::_exit(1);
    fill_pattern(memory.value()->bytes());
    auto descriptor = device->export_memory(*memory.value());
    const int number = descriptor.ok() ? descriptor.value().get() : -1;
    if (::write(pipe[1], &number, sizeof number) != sizeof number) ::_exit(1);
    while (true) ::pause();
  }
  int number = -1;
  ASSERT_EQ(::read(pipe[0], &number, sizeof number), static_cast<ssize_t>(sizeof number));
  ASSERT_GE(number, 0);
  UniqueFd descriptor(::open(("/proc/" + std::to_string(child) + "/fd/" + std::to_string(number)).c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(descriptor.valid());
  const auto imported = this->device_->import_memory(std::move(descriptor), bytes);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(pipe[0]);
  ::close(pipe[1]);
  ASSERT_TRUE(imported.ok()) << imported.status().to_string();
  EXPECT_TRUE(has_pattern(imported.value()->bytes()));
}

TYPED_TEST_P(DeviceConformance, RefusesToImportAnotherSizeThanTheDescriptorHas) {
  const auto memory = this->allocate(*this->device_, 8192, true);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{8191}, std::size_t{8193}, std::size_t{1} << 40}) {
    auto descriptor = this->device_->export_memory(*memory);
    ASSERT_TRUE(descriptor.ok());
    EXPECT_EQ(this->device_->import_memory(std::move(descriptor).value(), bytes).status().code(), Code::kInvalidArgument) << bytes;
  }
}

TYPED_TEST_P(DeviceConformance, RefusesToExportPrivateMemory) {
  const auto memory = this->allocate(*this->device_, 4096, false);
  EXPECT_EQ(this->device_->export_memory(*memory).status().code(), Code::kInvalidArgument);
}

TYPED_TEST_P(DeviceConformance, AStreamWorksInOrder) {
  auto stream = this->device_->create_stream("fifo");
  ASSERT_TRUE(stream.ok());
  // Plain memory: the stream's order is what makes it safe.
  std::vector<int> seen;
  for (int i = 0; i < 10'000; ++i) {
    const Status status = stream.value()->enqueue([&seen, i] { seen.push_back(i); });
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  ASSERT_TRUE(stream.value()->synchronize(kTestDeadlineMs).ok());
  ASSERT_EQ(seen.size(), 10'000U);
  for (int i = 0; i < 10'000; ++i) ASSERT_EQ(seen[static_cast<std::size_t>(i)], i);
}

TYPED_TEST_P(DeviceConformance, AnEventIsDoneOnceTheWorkBeforeItIs) {
  auto stream = this->device_->create_stream("events");
  ASSERT_TRUE(stream.ok());
  std::atomic<bool> open{false};
  ASSERT_TRUE(stream.value()->enqueue([&] { open.wait(false); }).ok());
  auto event = stream.value()->record();
  ASSERT_TRUE(event.ok());
  EXPECT_FALSE(event.value()->done());
  EXPECT_EQ(event.value()->wait(1).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(stream.value()->synchronize(1).code(), Code::kDeadlineExceeded);
  open = true;
  open.notify_all();
  EXPECT_TRUE(event.value()->wait(kTestDeadlineMs).ok());
  EXPECT_TRUE(event.value()->done());
}

TYPED_TEST_P(DeviceConformance, AStreamWaitsForAnotherStreamsEvent) {
  auto producer = this->device_->create_stream("producer");
  auto consumer = this->device_->create_stream("consumer");
  ASSERT_TRUE(producer.ok() && consumer.ok());
  for (int round = 0; round < 100; ++round) {
    int value = 0;
    int read = -1;
    ASSERT_TRUE(producer.value()->enqueue([&value, round] { value = round + 1; }).ok());
    auto event = producer.value()->record();
    ASSERT_TRUE(event.ok());
    ASSERT_TRUE(consumer.value()->wait(event.value()).ok());
    ASSERT_TRUE(consumer.value()->enqueue([&] { read = value; }).ok());
    ASSERT_TRUE(consumer.value()->synchronize(kTestDeadlineMs).ok());
    EXPECT_EQ(read, round + 1);
  }
}

TYPED_TEST_P(DeviceConformance, AStreamFinishesItsWorkBeforeItIsDestroyed) {
  int runs = 0;
  {
    auto stream = this->device_->create_stream("short");
    ASSERT_TRUE(stream.ok());
    for (int i = 0; i < 1'000; ++i) ASSERT_TRUE(stream.value()->enqueue([&runs] { ++runs; }).ok());
  }
  EXPECT_EQ(runs, 1'000);
}

TYPED_TEST_P(DeviceConformance, ManyThreadsMayEnqueue) {
  auto stream = this->device_->create_stream("shared");
  ASSERT_TRUE(stream.ok());
  int runs = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 2'000; ++i) EXPECT_TRUE(stream.value()->enqueue([&runs] { ++runs; }).ok());
      });
    }
  }
  ASSERT_TRUE(stream.value()->synchronize(kTestDeadlineMs).ok());
  EXPECT_EQ(runs, 8'000);
}

TYPED_TEST_P(DeviceConformance, SaysWhereItIs) {
  const auto other = TypeParam::make();
  EXPECT_FALSE(this->device_->identity().boot_id.empty());
  EXPECT_FALSE(this->device_->identity().device_uuid.empty());
  EXPECT_EQ(this->device_->identity(), other->identity());
}

REGISTER_TYPED_TEST_SUITE_P(DeviceConformance, GivesZeroedAlignedMemoryOfExactlyTheSizeAskedFor, RefusesNoBytes,
                            NamesAskedAndFreeBytesWhenMemoryDoesNotFit, AnotherProcessReadsWhatWasExported, ImportedMemoryIsReadOnly,
                            ImportInTheExportingProcessSharesItsMapping, AnImportOutlivesTheExportersMemory,
                            AnImportOutlivesTheExportingProcess, RefusesToImportAnotherSizeThanTheDescriptorHas,
                            RefusesToExportPrivateMemory, AStreamWorksInOrder, AnEventIsDoneOnceTheWorkBeforeItIs,
                            AStreamWaitsForAnotherStreamsEvent, AStreamFinishesItsWorkBeforeItIsDestroyed, ManyThreadsMayEnqueue,
                            SaysWhereItIs);

}  // namespace headrace
