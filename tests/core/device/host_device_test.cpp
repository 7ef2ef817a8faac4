#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "core/device/device.h"
#include "core/device/host_stream.h"
#include "tests/core/device/device_conformance.h"

namespace headrace {
namespace {

struct HostBackend {
  static std::unique_ptr<Device> make() { return make_host_device(); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, DeviceConformance, HostBackend);

UniqueFd make_memfd(std::size_t bytes, unsigned seals) {
  UniqueFd fd(::memfd_create("test", MFD_ALLOW_SEALING | MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  if (seals != 0) {
    EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  }
  return fd;
}

TEST(HostDevice, RefusesMemoryThatCouldShrinkUnderIt) {
  const auto device = make_host_device();
  const auto memory = device->import_memory(make_memfd(4096, 0), 4096);
  EXPECT_EQ(memory.status().code(), Code::kInvalidArgument);
  EXPECT_NE(memory.status().message().find("sealed against shrinking"), std::string::npos);
  EXPECT_EQ(device->import_memory(make_memfd(4096, F_SEAL_GROW), 4096).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(device->import_memory(make_memfd(4096, F_SEAL_SHRINK), 4096).ok());
}

TEST(HostDevice, RefusesDescriptorsThatAreNoMemory) {
  const auto device = make_host_device();
  EXPECT_EQ(device->import_memory(UniqueFd(), 4096).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(device->import_memory(UniqueFd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), 4096).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(device->import_memory(UniqueFd(::open("/dev/zero", O_RDWR | O_CLOEXEC)), 4096).status().code(), Code::kInvalidArgument);
}

TEST(HostDevice, ExportsDescriptorsThatCannotShrink) {
  const auto device = make_host_device();
  auto memory = device->allocate({.bytes = 10'000, .exportable = true, .touch = false, .label = "sealed"});
  ASSERT_TRUE(memory.ok());
  auto descriptor = device->export_memory(*memory.value());
  ASSERT_TRUE(descriptor.ok());
  EXPECT_NE(::ftruncate(descriptor.value().get(), 100), 0);
  EXPECT_NE(::ftruncate(descriptor.value().get(), 100'000), 0);
  EXPECT_NE(::fcntl(descriptor.value().get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(HostDevice, AFileSizeLimitIsAnErrorAndNotASignal) {
  const int status = exit_status_of_child([] {
    const struct rlimit limit = {1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    const auto device = make_host_device();
    const auto memory = device->allocate({.bytes = 2 << 20, .exportable = true, .touch = true, .label = "limited"});
    if (memory.status().code() != Code::kResourceExhausted) return 2;
    return memory.status().message().find("1048576") != std::string::npos ? 0 : 3;
  });
  EXPECT_EQ(status, 0);
}

#ifndef HEADRACE_SANITIZED
TEST(HostDevice, AnAddressSpaceLimitIsAnError) {
  const int status = exit_status_of_child([] {
    const struct rlimit limit = {std::size_t{512} << 20, std::size_t{512} << 20};
    if (::setrlimit(RLIMIT_AS, &limit) != 0) return 1;
    const auto device = make_host_device();
    for (const bool exportable : {false, true}) {
      const auto memory = device->allocate({.bytes = std::size_t{600} << 20, .exportable = exportable, .touch = false, .label = "limited"});
      if (memory.status().code() != Code::kResourceExhausted) return 2;
    }
    return 0;
  });
  EXPECT_EQ(status, 0);
}
#endif

TEST(HostDevice, DoesNotFillTheHolesOfAFileLargerThanMemory) {
  constexpr std::size_t kBytes = std::size_t{1} << 44;
  const auto imported = make_host_device()->import_memory(make_memfd(kBytes, F_SEAL_SHRINK), kBytes);
  EXPECT_EQ(imported.status().code(), Code::kResourceExhausted) << imported.status().to_string();
}

TEST(HostDevice, AFailedAllocationLeavesNoDescriptorBehind) {
  const auto device = make_host_device();
  const int before = ::dup(0);
  ::close(before);
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(device->allocate({.bytes = std::size_t{1} << 46, .exportable = true, .touch = true, .label = "huge"}).ok());
    EXPECT_FALSE(device->import_memory(make_memfd(4096, 0), 4096).ok());
  }
  const int after = ::dup(0);
  ::close(after);
  EXPECT_EQ(after, before);
}

TEST(HostDevice, ADebuggerReadsPrivateMemory) {
  const auto device = make_host_device();
  const std::size_t bytes = std::size_t{4} << 20;
  auto memory = device->allocate({.bytes = bytes, .exportable = false, .touch = true, .label = "live"});
  ASSERT_TRUE(memory.ok());
  fill_pattern(memory.value()->bytes());
  const pid_t owner = ::getpid();
  std::vector<std::byte> copy(bytes);
  const iovec local = {copy.data(), bytes};
  const iovec remote = {memory.value()->data(), bytes};
  ASSERT_EQ(::process_vm_readv(owner, &local, 1, &remote, 1, 0), static_cast<ssize_t>(bytes));
  EXPECT_TRUE(has_pattern(copy));
}

TEST(HostDevice, KnowsTheBootOfTheKernel) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string expected;
  ASSERT_TRUE(std::getline(file, expected));
  EXPECT_EQ(make_host_device()->identity().boot_id, expected);
}

class FailedEvent final : public Event {
 public:
  bool done() const override { return true; }
  Status wait(std::int64_t /*timeout_ms*/) const override { return Status(Code::kDeviceLost, "gone"); }
};

TEST(HostStream, WorkAfterAFailedWaitDoesNotRun) {
  HostStream stream("gated");
  bool ran = false;
  ASSERT_TRUE(stream.wait(std::make_shared<FailedEvent>()).ok());
  ASSERT_TRUE(stream.enqueue([&] { ran = true; }).ok());
  EXPECT_EQ(stream.synchronize(kTestDeadlineMs).code(), Code::kDeviceLost);
  EXPECT_EQ(stream.synchronize(kTestDeadlineMs).code(), Code::kDeviceLost);
  EXPECT_FALSE(ran);
}

TEST(HostStream, RefusesToWaitForItself) {
  HostStream stream("own");
  std::vector<Code> codes;
  ASSERT_TRUE(stream
                  .enqueue([&] {
                    codes.push_back(stream.synchronize(1).code());
                    Status status;
                    for (std::size_t i = 0; status.ok() && i <= HostStream::kQueueItemsMax; ++i) status = stream.enqueue([] {});
                    codes.push_back(status.code());
                  })
                  .ok());
  ASSERT_TRUE(stream.synchronize(kTestDeadlineMs).ok());
  EXPECT_EQ(codes, (std::vector<Code>{Code::kFailedPrecondition, Code::kResourceExhausted}));
}

TEST(HostStream, RefusesNothingToDo) {
  HostStream stream("empty");
  EXPECT_EQ(stream.enqueue(nullptr).code(), Code::kInvalidArgument);
  EXPECT_EQ(stream.wait(nullptr).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace headrace
