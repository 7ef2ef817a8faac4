#include "receiver/storage_table.h"

#include <gtest/gtest.h>

#include <array>

namespace headrace {
namespace {

class StorageTableTest : public ::testing::Test {
 protected:
  Storage storage(std::string name, std::size_t offset, std::int64_t bytes) {
    Storage s;
    s.name = std::move(name);
    s.shape = {bytes};
    s.address = memory_.data() + offset;
    s.bytes = bytes;
    return s;
  }
  void expect_refused(Storage s, Code code, const std::string& reason) {
    const auto result = table_.add(std::move(s));
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), code);
    EXPECT_NE(result.status().message().find(reason), std::string::npos) << result.status().message();
  }

  std::array<std::byte, 4096> memory_{};
  StorageTable table_;
};

TEST_F(StorageTableTest, FindsWhatWasAdded) {
  EXPECT_EQ(table_.add(storage("a", 0, 16)).value_or_throw().value, 0U);
  EXPECT_EQ(table_.add(storage("b", 16, 16)).value_or_throw().value, 1U);
  ASSERT_NE(table_.find("b"), nullptr);
  EXPECT_EQ(table_.find("b")->address, memory_.data() + 16);
  EXPECT_EQ(table_.find("c"), nullptr);
  EXPECT_EQ(table_.size(), 2U);
  EXPECT_EQ(table_.at(StorageId{0}).name, "a");
}

TEST_F(StorageTableTest, RefusesANameTwice) {
  ASSERT_TRUE(table_.add(storage("a", 0, 16)).ok());
  expect_refused(storage("a", 32, 16), Code::kInvalidArgument, "already");
}

TEST_F(StorageTableTest, RefusesAStorageWithoutNameAddressOrBytes) {
  expect_refused(storage("", 0, 16), Code::kInvalidArgument, "no name");
  Storage lost = storage("lost", 0, 16);
  lost.address = nullptr;
  expect_refused(lost, Code::kInvalidArgument, "no address");
  expect_refused(storage("empty", 0, 0), Code::kInvalidArgument, "empty");
}

TEST_F(StorageTableTest, RefusesSizesThatDoNotFitDtypeAndShape) {
  Storage s = storage("a", 0, 16);
  s.dtype = Dtype::kBF16;
  expect_refused(s, Code::kInvalidArgument, "takes 32 bytes, the storage has 16");
  s.shape = {INT64_MAX, 4};
  expect_refused(s, Code::kInvalidArgument, "no whole number of bytes");
}

TEST_F(StorageTableTest, TakesTransposedViewsAndRefusesStridesThatReachOutside) {
  Storage s = storage("a", 0, 2 * 8 * 3 * 4);
  s.dtype = Dtype::kI32;
  s.shape = {2, 8, 3};
  s.strides = {24, 1, 8};
  EXPECT_TRUE(table_.add(s).ok());
  s = storage("b", 1024, 2 * 8 * 3 * 4);
  s.dtype = Dtype::kI32;
  s.shape = {2, 8, 3};
  s.strides = {24, 1, 9};
  expect_refused(s, Code::kInvalidArgument, "does not fit 192 bytes");
  s.strides = {24, 1};
  expect_refused(s, Code::kInvalidArgument, "has 2 strides");
  s.strides = {24, -1, 8};
  expect_refused(s, Code::kInvalidArgument, "does not fit");
  s.strides = {INT64_MAX, 1, 8};
  expect_refused(s, Code::kInvalidArgument, "does not fit");
}

TEST_F(StorageTableTest, RefusesOverlapOnEitherSideUnlessDeclaredAnAlias) {
  ASSERT_TRUE(table_.add(storage("a", 64, 64)).ok());
  ASSERT_TRUE(table_.add(storage("before", 0, 64)).ok());
  ASSERT_TRUE(table_.add(storage("after", 128, 64)).ok());
  expect_refused(storage("left", 60, 8), Code::kInvalidArgument, "overlap");
  expect_refused(storage("inside", 70, 8), Code::kInvalidArgument, "overlap a");
  expect_refused(storage("same", 64, 64), Code::kInvalidArgument, "overlap a");
  expect_refused(storage("around", 191, 100), Code::kInvalidArgument, "overlap after");
}

TEST_F(StorageTableTest, TakesAnAliasOfTheSameBytesOnly) {
  ASSERT_TRUE(table_.add(storage("a", 64, 64)).ok());
  Storage alias = storage("alias", 64, 64);
  alias.alias_of = "b";
  expect_refused(alias, Code::kInvalidArgument, "not in the table");
  alias.alias_of = "a";
  EXPECT_TRUE(table_.add(alias).ok());
  Storage half = storage("half", 64, 32);
  half.alias_of = "a";
  expect_refused(half, Code::kInvalidArgument, "alias of a");
  EXPECT_EQ(table_.total_bytes(), 64);
}

TEST_F(StorageTableTest, SealsOnceAndTakesNothingAfterwards) {
  EXPECT_EQ(table_.seal().code(), Code::kFailedPrecondition);
  ASSERT_TRUE(table_.add(storage("a", 0, 16)).ok());
  ASSERT_TRUE(table_.seal().ok());
  EXPECT_TRUE(table_.sealed());
  EXPECT_EQ(table_.seal().code(), Code::kFailedPrecondition);
  expect_refused(storage("b", 16, 16), Code::kFailedPrecondition, "sealed");
}

TEST_F(StorageTableTest, DigestSeesEveryFieldButTheAddress) {
  const auto digest_of_one = [](Storage s) {
    StorageTable table;
    EXPECT_TRUE(table.add(std::move(s)).ok());
    EXPECT_TRUE(table.seal().ok());
    return table.digest();
  };
  const Storage base = storage("a", 0, 16);
  const Digest digest = digest_of_one(base);
  EXPECT_EQ(digest_of_one(storage("a", 512, 16)), digest);
  Storage changed = base;
  changed.name = "b";
  EXPECT_NE(digest_of_one(changed), digest);
  changed = base;
  changed.dtype = Dtype::kI8;
  EXPECT_NE(digest_of_one(changed), digest);
  changed = base;
  changed.shape = {4, 4};
  EXPECT_NE(digest_of_one(changed), digest);
  changed = base;
  changed.strides = {1};
  EXPECT_NE(digest_of_one(changed), digest);
  changed = base;
  changed.owners = {"draft"};
  EXPECT_NE(digest_of_one(changed), digest);
}

TEST_F(StorageTableTest, NamesEveryStorageThatIsNotWhereItWas) {
  for (const std::string name : {"a", "b", "c", "d"}) ASSERT_TRUE(table_.add(storage(name, 64 * table_.size(), 64)).ok());
  ASSERT_TRUE(table_.seal().ok());
  std::vector<StorageLocation> present;
  for (std::uint32_t i = 0; i < 4; ++i) present.push_back({StorageId{i}, table_.at(StorageId{i}).address, 64});
  EXPECT_TRUE(table_.check_identity(present).ok());
  present[1].address = memory_.data() + 2048;
  present[3].bytes = 32;
  present.erase(present.begin() + 2);
  const Status status = table_.check_identity(present);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("b sealed at"), std::string::npos);
  EXPECT_NE(status.message().find("c sealed at"), std::string::npos);
  EXPECT_NE(status.message().find("d sealed at"), std::string::npos);
  EXPECT_EQ(status.message().find("a sealed at 0x"), std::string::npos);
  present[0].storage = StorageId{9};
  EXPECT_EQ(table_.check_identity(present).code(), Code::kInvalidArgument);
}

TEST(StorageTableCanary, IsRefusedWhereItCouldNotTell) {
  std::vector<std::byte> pool(256);
  StorageTable table;
  Storage storage;
  storage.name = "weights";
  storage.shape = {64};
  storage.address = pool.data();
  storage.bytes = 64;
  ASSERT_TRUE(table.add(storage).ok());
  EXPECT_FALSE(table.add_canary({"", pool.data() + 64, 16}).ok());
  EXPECT_FALSE(table.add_canary({"a", nullptr, 16}).ok());
  EXPECT_FALSE(table.add_canary({"a", pool.data() + 64, 8}).ok());
  EXPECT_FALSE(table.add_canary({"a", pool.data() + 64, 20}).ok());
  ASSERT_TRUE(table.add_canary({"a", pool.data() + 64, 16}).ok());
  EXPECT_FALSE(table.add_canary({"a", pool.data() + 96, 16}).ok());
  ASSERT_TRUE(table.seal().ok());
  EXPECT_EQ(table.add_canary({"b", pool.data() + 128, 16}).code(), Code::kFailedPrecondition);
  EXPECT_EQ(table.canaries().size(), 1U);
}

TEST(StorageTableCanary, LiesInNoStorageAndNoOtherCanary) {
  std::vector<std::byte> pool(256);
  const auto sealed = [&](std::ptrdiff_t first, std::ptrdiff_t second) {
    StorageTable table;
    Storage storage;
    storage.name = "weights";
    storage.shape = {64};
    storage.address = pool.data();
    storage.bytes = 64;
    EXPECT_TRUE(table.add(storage).ok());
    EXPECT_TRUE(table.add_canary({"a", pool.data() + first, 16}).ok());
    EXPECT_TRUE(table.add_canary({"b", pool.data() + second, 16}).ok());
    return table.seal();
  };
  EXPECT_TRUE(sealed(64, 80).ok());
  EXPECT_NE(sealed(56, 80).message().find("lies in storage weights"), std::string::npos);
  EXPECT_NE(sealed(64, 72).message().find("canary of pool b lies in the canary of pool a"), std::string::npos);
}

}  // namespace
}  // namespace headrace
