#include "receiver/canaries.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace headrace {
namespace {

TEST(Canaries, NameThePoolsThatLostAnyByte) {
  std::vector<std::byte> first(64);
  std::vector<std::byte> second(16);
  const std::vector<Canary> places{{"first", first.data(), 64}, {"second", second.data(), 16}};
  Canaries canaries(places);
  canaries.write();
  EXPECT_TRUE(canaries.lost().empty());
  second[15] ^= std::byte{1};
  EXPECT_EQ(canaries.lost(), std::vector<std::string>{"second"});
  std::fill(first.begin(), first.end(), std::byte{0});
  EXPECT_EQ(canaries.lost(), (std::vector<std::string>{"first", "second"}));
  canaries.write();
  EXPECT_TRUE(canaries.lost().empty());
}

TEST(Canaries, AreNeverTheSamePatternTwice) {
  std::vector<std::byte> pool(64);
  const std::vector<Canary> places{{"pool", pool.data(), 32}, {"other", pool.data() + 32, 32}};
  Canaries canaries(places);
  canaries.write();
  const std::vector<std::byte> before = pool;
  EXPECT_FALSE(std::equal(before.begin(), before.begin() + 32, before.begin() + 32));
  canaries.write();
  pool = before;
  EXPECT_EQ(canaries.lost().size(), 2U) << "content of an earlier pattern is not ours";
}

}  // namespace
}  // namespace headrace
