#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "core/wire/limits.h"
#include "tests/core/transport/data_path_conformance.h"

namespace headrace {
namespace {

struct ShmBackend {
  static constexpr DataPathKind kKind = DataPathKind::kShm;
};
INSTANTIATE_TYPED_TEST_SUITE_P(Shm, DataPathConformance, ShmBackend);

class ShmDataPath : public ::testing::Test {
 protected:
  static UniqueFd memfd(std::size_t bytes, unsigned seals) {
    UniqueFd fd(::memfd_create("test", MFD_ALLOW_SEALING | MFD_CLOEXEC));
    EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(::pwrite(fd.get(), "weights", 7, 0), 7);
    EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
    return fd;
  }

  std::unique_ptr<Device> device_ = make_host_device();
  std::unique_ptr<DataSource> source_ = make_data_source(DataPathKind::kShm, *device_);
  std::unique_ptr<DataSink> sink_ = make_data_sink(DataPathKind::kShm, *device_);
};

TEST_F(ShmDataPath, AdoptsMemoryOfTheCallerAndSealsIt) {
  UniqueFd mine = memfd(8'192, 0);
  UniqueFd copy(::fcntl(mine.get(), F_DUPFD_CLOEXEC, 0));
  auto memory = source_->adopt(std::move(copy), 8'192);
  ASSERT_TRUE(memory.ok()) << memory.status().to_string();
  EXPECT_NE(::fcntl(mine.get(), F_GET_SEALS) & F_SEAL_SHRINK, 0);
  EXPECT_EQ(std::memcmp(source_->bytes(memory.value()).data(), "weights", 7), 0);
  // What the caller writes later is what a receiver reads.
  ASSERT_EQ(::pwrite(mine.get(), "changed", 7, 0), 7);
  UniqueFd offered(::fcntl(source_->descriptor(memory.value()), F_DUPFD_CLOEXEC, 0));
  ASSERT_TRUE(sink_->attach(memory.value(), 8'192, std::move(offered)).ok());
  auto read = sink_->resolve(memory.value(), {});
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(std::memcmp(read.value().data(), "changed", 7), 0);
}

TEST_F(ShmDataPath, RefusesToAdoptWhatCannotBeSealed) {
  EXPECT_EQ(source_->adopt(UniqueFd(), 10).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(source_->adopt(UniqueFd(::open("/dev/zero", O_RDWR | O_CLOEXEC)), 10).status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(source_->adopt(memfd(4'096, F_SEAL_SEAL), 4'096).ok());
  EXPECT_FALSE(source_->adopt(memfd(4'096, 0), 4'097).ok());
}

TEST_F(ShmDataPath, RefusesUnsealedMemoryAndOtherSizesThanAnnounced) {
  const Status unsealed = sink_->attach(MemoryId{7}, 4'096, memfd(4'096, 0));
  EXPECT_EQ(unsealed.code(), Code::kInvalidArgument);
  EXPECT_NE(unsealed.message().find("memory 0x7"), std::string::npos) << unsealed.message();
  EXPECT_EQ(sink_->attach(MemoryId{7}, 4'095, memfd(4'096, F_SEAL_SHRINK)).code(), Code::kInvalidArgument);
  EXPECT_EQ(sink_->attach(MemoryId{7}, 4'096, UniqueFd()).code(), Code::kInvalidArgument);
  EXPECT_TRUE(sink_->attach(MemoryId{7}, 4'096, memfd(4'096, F_SEAL_SHRINK)).ok());
  EXPECT_EQ(sink_->attach(MemoryId{7}, 4'096, memfd(4'096, F_SEAL_SHRINK)).code(), Code::kInvalidArgument);
}

TEST_F(ShmDataPath, RefusesMoreMemoriesThanAllowed) {
  for (std::uint64_t i = 0; i < limits::kMemoriesMax; ++i) ASSERT_TRUE(sink_->attach(MemoryId{i}, 4'096, memfd(4'096, F_SEAL_SHRINK)).ok());
  EXPECT_EQ(sink_->attach(MemoryId{9'999}, 4'096, memfd(4'096, F_SEAL_SHRINK)).code(), Code::kResourceExhausted);
  sink_->detach(MemoryId{0});
  EXPECT_TRUE(sink_->attach(MemoryId{9'999}, 4'096, memfd(4'096, F_SEAL_SHRINK)).ok());
}

TEST_F(ShmDataPath, RefusesBytesInTheMessage) {
  auto memory = source_->allocate(4'096);
  ASSERT_TRUE(memory.ok());
  EXPECT_TRUE(source_->attachment(memory.value(), 100).empty());
  ASSERT_TRUE(sink_->attach(memory.value(), 4'096, UniqueFd(::fcntl(source_->descriptor(memory.value()), F_DUPFD_CLOEXEC, 0))).ok());
  const std::array<std::byte, 4> attachment{};
  EXPECT_EQ(sink_->resolve(memory.value(), attachment).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace headrace
