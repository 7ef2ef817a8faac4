#include "kernels/strided_copy.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "tests/kernels/naive_copy.h"
#include "tests/kernels/random_nest.h"

namespace headrace {
namespace {

using naive::Bytes;

StridedCopy nest(std::int64_t run, std::vector<CopyDim> dims, std::int64_t src = 0, std::int64_t dst = 0) {
  return StridedCopy::make(src, dst, run, dims);
}

StridedCopy with_table(StridedCopy copy, int dim, std::vector<std::int32_t> slots) {
  copy.indexed_dim = static_cast<std::int8_t>(dim);
  copy.slots = std::make_shared<const std::vector<std::int32_t>>(std::move(slots));
  return copy;
}

/// One (source, destination) pair per byte.
std::set<std::pair<std::int64_t, std::int64_t>> moves(const StridedCopy& copy) {
  std::set<std::pair<std::int64_t, std::int64_t>> pairs;
  naive::each_byte(copy, [&](std::int64_t s, std::int64_t d) { pairs.emplace(s, d); });
  return pairs;
}

void expect_refused(const StridedCopy& copy, std::int64_t src_bytes, std::int64_t dst_bytes, const std::string& reason) {
  const Status status = validate(copy, src_bytes, dst_bytes);
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << copy.to_string();
  EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
}

TEST(StridedCopy, CountsRunsAndBytes) {
  const StridedCopy copy = nest(8, {{3, 0, 100}, {5, 8, 20}});
  EXPECT_EQ(copy.run_count(), 15);
  EXPECT_EQ(copy.dst_bytes(), 120);
  EXPECT_EQ(copy.src_bytes(), 40);
  EXPECT_EQ(repeats(copy), 3);
  EXPECT_EQ(copy.to_string(), "src 0 dst 0 run 8 (3,0,100) (5,8,20)");
}

TEST(StridedCopy, ComparesTablesByContent) {
  const StridedCopy base = nest(4, {{2, 4, 4}});
  EXPECT_EQ(with_table(base, 0, {3, 1}), with_table(base, 0, {3, 1}));
  EXPECT_FALSE(with_table(base, 0, {3, 1}) == with_table(base, 0, {1, 3}));
  EXPECT_FALSE(with_table(base, 0, {3, 1}) == base);
}

TEST(StridedCopyValidation, RefusesCountsAndRunsThatAreNotPositive) {
  expect_refused(nest(0, {}), 10, 10, "run of 0 bytes");
  expect_refused(nest(-4, {}), 10, 10, "run of -4 bytes");
  expect_refused(nest(4, {{0, 4, 4}}), 10, 10, "count 0");
  expect_refused(nest(4, {{2, 4, 4}, {-3, 4, 4}}), 10, 10, "dimension 1 has count -3");
  expect_refused(nest(4, {{std::int64_t{1} << 40, 4, 4}, {std::int64_t{1} << 40, 4, 4}}), 10, 10, "2^63");
}

TEST(StridedCopyValidation, RefusesBytesOutsideOfEitherSide) {
  const StridedCopy copy = nest(4, {{3, 10, 8}}, 2, 1);
  EXPECT_TRUE(validate(copy, 26, 21).ok());
  expect_refused(copy, 25, 21, "source bytes [2,26) lie outside of [0,25)");
  expect_refused(copy, 26, 20, "destination bytes [1,21) lie outside of [0,20)");
  expect_refused(nest(4, {}, -1), 26, 21, "source bytes [-1,3)");
  expect_refused(nest(4, {{2, 4, -4}}), 26, 21, "destination bytes [-4,4)");
  expect_refused(nest(4, {{3, 4, INT64_MAX / 2}}), 26, 21, "64-bit");
  EXPECT_TRUE(validate(nest(4, {{3, 10, -8}}, 2, 17), 26, 21).ok());
}

TEST(StridedCopyValidation, RefusesTwoWritesToOneByte) {
  expect_refused(nest(4, {{2, 4, 3}}), 100, 100, "8 bytes are written into a span of 7");
  expect_refused(nest(4, {{5, 4, 0}}), 100, 100, "written");
  expect_refused(nest(2, {{3, 2, 6}, {4, 2, 4}}), 100, 100, "destination byte 12 is written twice");
  // 3 steps of 4 and 2 of 6 over runs of 2 stand apart, and so do they inside a larger step.
  EXPECT_TRUE(validate(nest(2, {{2, 2, 100}, {3, 2, 4}, {2, 2, 6}}), 100, 200).ok());
  expect_refused(nest(2, {{2, 2, 100}, {4, 2, 4}, {2, 2, 8}}), 100, 200, "destination byte 8 is written twice");
}

TEST(StridedCopyValidation, JudgesTheSlotsOfATable) {
  const StridedCopy base = nest(4, {{3, 4, 4}});
  EXPECT_TRUE(validate(with_table(base, 0, {7, 0, 3}), 12, 32).ok());
  expect_refused(with_table(base, 0, {7, 0, 3}), 12, 31, "destination bytes [0,32)");
  expect_refused(with_table(base, 0, {7, 0, 7}), 12, 32, "slot 7 stands twice");
  expect_refused(with_table(base, 0, {7, 0, -1}), 12, 32, "slot -1 is negative");
  expect_refused(with_table(base, 0, {7, 0}), 12, 32, "a table of 2 slots, expected at least 3");
  expect_refused(with_table(base, 1, {0, 1, 2}), 12, 32, "indexed dimension 1 of 1");
  StridedCopy bare = base;
  bare.indexed_dim = 0;
  expect_refused(bare, 12, 32, "a table of 0 slots");
  // Slots with gaps leave room for what a constant step would run into.
  EXPECT_TRUE(validate(with_table(nest(4, {{2, 4, 4}, {2, 4, 8}}), 0, {0, 1}), 100, 100).ok());
  EXPECT_TRUE(validate(with_table(nest(4, {{2, 4, 4}, {2, 4, 4}}), 0, {0, 2}), 100, 100).ok());
  expect_refused(with_table(nest(4, {{2, 4, 4}, {2, 4, 4}}), 0, {0, 1}), 100, 100, "written");
}

RC_GTEST_PROP(StridedCopyValidation, AgreesWithCountingEveryByte, ()) {
  StridedCopy copy = randomly::nest({});
  for (std::size_t j = 0; j < copy.dim_count; ++j) {
    if (randomly::number(0, 2) == 0) copy.dims[j].dst_stride = randomly::number(0, 60);
  }
  const naive::Reach reach = naive::reach(copy);
  std::set<std::int64_t> written;
  bool twice = false;
  naive::each_byte(copy, [&](std::int64_t, std::int64_t d) { twice = !written.insert(d).second || twice; });
  RC_TAG(twice ? "overlaps" : "fits");
  RC_ASSERT(validate(copy, reach.src, reach.dst).ok() == !twice);
  RC_ASSERT(!validate(copy, reach.src - 1, reach.dst).ok());
  RC_ASSERT(!validate(copy, reach.src, reach.dst - 1).ok());
}

RC_GTEST_PROP(StridedCopy, CoalescingMovesTheSameBytesWithNoMoreLoops, ()) {
  const StridedCopy copy = randomly::nest({});
  const StridedCopy merged = coalesce(copy);
  RC_ASSERT(moves(merged) == moves(copy));
  RC_ASSERT(merged.dim_count <= copy.dim_count);
  RC_ASSERT(merged.run_bytes >= copy.run_bytes);
}

TEST(StridedCopy, CoalescesWhatStandsSideBySide) {
  EXPECT_EQ(coalesce(nest(4, {{6, 20, 20}, {5, 4, 4}})), StridedCopy::flat(0, 0, 120));
  EXPECT_EQ(coalesce(nest(4, {{6, 20, 40}, {5, 4, 4}})), nest(20, {{6, 20, 40}}));
  EXPECT_EQ(coalesce(nest(4, {{3, 80, 8}, {2, 40, 4}})), nest(4, {{6, 40, 4}}));
  EXPECT_EQ(coalesce(with_table(nest(4, {{3, 4, 4}}), 0, {5, 6, 7})), StridedCopy::flat(0, 20, 12));
}

RC_GTEST_PROP(StridedCopy, RepeatsTogetherAreTheWhole, ()) {
  const StridedCopy copy = randomly::nest({});
  std::set<std::pair<std::int64_t, std::int64_t>> together;
  for (std::int64_t r = 0; r < repeats(copy); ++r) {
    const StridedCopy one = repeat(copy, r);
    RC_ASSERT(repeats(one) == 1);
    RC_ASSERT(one.dst_bytes() == copy.src_bytes());
    together.merge(moves(one));
  }
  RC_ASSERT(together == moves(copy));
}

RC_GTEST_PROP(StridedCopy, InverseBringsTheSourceBack, ()) {
  const StridedCopy copy = randomly::nest({.distinct_source = true});
  const naive::Reach reach = naive::reach(copy);
  const Bytes src = naive::random_bytes(reach.src, 1);
  Bytes dst(static_cast<std::size_t>(reach.dst));
  naive::move(copy, src, dst);
  Bytes back = naive::random_bytes(reach.src, 2);
  naive::move(inverse(copy), dst, back);
  naive::each_byte(copy,
                   [&](std::int64_t s, std::int64_t) { RC_ASSERT(back[static_cast<std::size_t>(s)] == src[static_cast<std::size_t>(s)]); });
  RC_ASSERT(inverse(copy).dst_bytes() == copy.src_bytes());
  RC_ASSERT(inverse(inverse(copy)) == repeat(copy, 0));
}

/// a -> b: a transposition of blocks, or a plain copy, that covers all of b.
StridedCopy random_cover(std::int64_t rows, std::int64_t columns, std::int64_t run) {
  if (randomly::number(0, 1) == 0) return nest(rows * columns * run, {}, randomly::number(0, 5), 0);
  const std::int64_t repeat_rows = randomly::number(0, 3) == 0 ? 0 : columns * run;
  return nest(run, {{rows, repeat_rows, run}, {columns, run, rows * run}}, randomly::number(0, 5));
}

RC_GTEST_PROP(StridedCopy, ComposingEqualsTwoCopies, ()) {
  const std::int64_t rows = randomly::number(1, 4);
  const std::int64_t columns = randomly::number(1, 4);
  const std::int64_t run = randomly::number(1, 6) * 2;
  const StridedCopy first = random_cover(rows, columns, run);
  const std::int64_t middle_bytes = rows * columns * run;
  const std::int64_t unit = randomly::number(0, 1) == 0 ? run : run / 2;
  const std::int64_t steps = middle_bytes / unit;
  const std::int64_t inner = randomly::number(1, steps);
  RC_PRE(steps % inner == 0);
  const StridedCopy second =
      nest(unit, {{randomly::number(1, 2), 0, middle_bytes * 2}, {steps / inner, inner * unit, unit}, {inner, unit, steps / inner * unit}},
           0, 3);
  const Result<StridedCopy> composed = compose(first, second);
  RC_TAG(composed.ok() ? "composed" : "not one nest");
  if (!composed.ok()) {
    RC_ASSERT(composed.status().code() == Code::kUnsupported);
    return;
  }
  const Bytes a = naive::random_bytes(naive::reach(first).src, 1);
  Bytes b(static_cast<std::size_t>(middle_bytes));
  naive::move(first, a, b);
  Bytes expected(static_cast<std::size_t>(naive::reach(second).dst));
  Bytes actual = expected;
  naive::move(second, b, expected);
  naive::move(composed.value(), a, actual);
  RC_ASSERT(actual == expected);
  RC_ASSERT(composed.value().dst_bytes() == second.dst_bytes());
}

TEST(StridedCopy, ComposesARepeatWithAPermutation) {
  // Rows of 4 scales repeated 32 times, then 16-row blocks moved as a fused query projection wants them.
  const StridedCopy repeated = nest(4, {{8, 4, 128}, {32, 0, 4}});
  const StridedCopy permuted = nest(64, {{2, 512, 64}, {8, 64, 128}});
  const Result<StridedCopy> composed = compose(repeated, permuted);
  ASSERT_TRUE(composed.ok()) << composed.status().to_string();
  const Bytes src = naive::random_bytes(32, 1);
  Bytes middle(1024);
  Bytes expected(1024);
  Bytes actual(1024);
  naive::move(repeated, src, middle);
  naive::move(permuted, middle, expected);
  naive::move(composed.value(), src, actual);
  EXPECT_EQ(actual, expected);
}

TEST(StridedCopy, ComposeRefusesWhatTheFirstDoesNotCover) {
  const Result<StridedCopy> outside = compose(StridedCopy::flat(0, 0, 64), nest(8, {{9, 8, 8}}));
  EXPECT_EQ(outside.status().code(), Code::kUnsupported);
  EXPECT_NE(outside.status().message().find("dimension"), std::string::npos) << outside.status().message();
  // The first leaves holes of 4 bytes between its runs.
  EXPECT_EQ(compose(nest(4, {{8, 4, 8}}), StridedCopy::flat(0, 0, 60)).status().code(), Code::kUnsupported);
  EXPECT_TRUE(compose(nest(4, {{8, 4, 8}}), nest(4, {{8, 8, 4}})).ok());
  EXPECT_EQ(compose(with_table(nest(4, {{3, 4, 4}}), 0, {2, 0, 1}), StridedCopy::flat(0, 0, 12)).status().code(), Code::kUnsupported);
}

TEST(StridedCopy, ComposeKeepsTheTableOfTheSecond) {
  const StridedCopy first = nest(4, {{6, 8, 4}});
  const StridedCopy second = with_table(nest(8, {{3, 8, 8}}), 0, {4, 0, 2});
  const Result<StridedCopy> composed = compose(first, second);
  ASSERT_TRUE(composed.ok()) << composed.status().to_string();
  const Bytes src = naive::random_bytes(48, 1);
  Bytes middle(24);
  Bytes expected(40);
  Bytes actual(40);
  naive::move(first, src, middle);
  naive::move(second, middle, expected);
  naive::move(composed.value(), src, actual);
  EXPECT_EQ(actual, expected);
}

}  // namespace
}  // namespace headrace
