#include <gtest/gtest.h>

#include <vector>

#include "receiver/applier.h"

namespace headrace {
namespace {

class SummedCopyOf24Bytes : public testing::Test {
 protected:
  CopyJob job(std::int64_t src_offset, std::int64_t run_bytes, std::vector<CopyDim> dims) {
    return {.copy = StridedCopy::make(src_offset, 0, run_bytes, dims), .src = source_.data(), .dst = live_.data()};
  }
  bool taken(const CopyJob& job) const { return brings_all_once(job, source_); }

  std::vector<std::byte> source_ = std::vector<std::byte>(24);
  std::vector<std::byte> live_ = std::vector<std::byte>(4'096);
};

TEST_F(SummedCopyOf24Bytes, IsAnyNestThatReadsEachOfThemOnce) {
  EXPECT_TRUE(taken(job(0, 24, {})));
  EXPECT_TRUE(taken(job(0, 8, {{3, 8, 100}})));
  EXPECT_TRUE(taken(job(0, 2, {{4, 2, 64}, {3, 8, 1'000}}))) << "a transpose";
}

TEST_F(SummedCopyOf24Bytes, IsNoneThatLeavesSomeOutOrReadsSomeTwice) {
  EXPECT_FALSE(taken(job(0, 23, {})));
  EXPECT_FALSE(taken(job(0, 8, {{2, 8, 100}})));
  EXPECT_FALSE(taken(job(8, 24, {}))) << "reads beyond it";
  EXPECT_FALSE(taken(job(0, 8, {{3, 4, 100}}))) << "as many bytes as it has, but some of them twice";
  EXPECT_FALSE(taken(job(0, 12, {{2, 0, 100}}))) << "two places";
  EXPECT_FALSE(taken(job(0, 24, {{2, 0, 100}}))) << "two places";
}

TEST_F(SummedCopyOf24Bytes, IsNoneFromElsewhereOrOfOtherBytesThanTheyAre) {
  CopyJob other = job(0, 24, {});
  other.src = live_.data();
  EXPECT_FALSE(taken(other));
  CopyJob constant = job(0, 24, {});
  constant.src = nullptr;
  EXPECT_FALSE(taken(constant));
  CopyJob cast = job(0, 24, {});
  cast.cast = {Dtype::kF32, Dtype::kBF16};
  EXPECT_FALSE(taken(cast));
  CopyJob indexed = job(0, 8, {{3, 8, 100}});
  indexed.copy.indexed_dim = 0;
  indexed.copy.slots = std::make_shared<const std::vector<std::int32_t>>(std::vector<std::int32_t>{2, 0, 1});
  EXPECT_FALSE(taken(indexed));
}

}  // namespace
}  // namespace headrace
