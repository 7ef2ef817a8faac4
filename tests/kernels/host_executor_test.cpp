#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "core/base/worker_pool.h"
#include "kernels/copy_plan.h"
#include "kernels/executor.h"
#include "kernels/host_kernels.h"
#include "tests/kernels/naive_copy.h"
#include "tests/kernels/random_nest.h"

namespace headrace {
namespace {

using naive::Bytes;

/// Memory that begins `skew` bytes after a cache line.
struct Skewed {
  Skewed(const Bytes& content, std::int64_t skew) : storage(content.size() + 128) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
    begin = storage.data() + (64 - address % 64) % 64 + skew;
    std::copy(content.begin(), content.end(), begin);
    bytes = content.size();
  }
  Bytes content() const { return Bytes(begin, begin + bytes); }

  Bytes storage;
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
};

/// What the executor leaves in a destination that held `before`, for memory that begins anywhere.
Bytes execute(HostExecutor& executor, const StridedCopy& copy, const Bytes& src, const Bytes& before, std::int64_t src_skew = 0,
              std::int64_t dst_skew = 0) {
  const Skewed from(src, src_skew);
  Skewed to(before, dst_skew);
  const CopyStats stats = executor.run({{CopyJob{copy, from.begin, to.begin}}});
  EXPECT_EQ(stats.copies, 1U);
  EXPECT_EQ(stats.bytes, static_cast<std::uint64_t>(copy.dst_bytes()));
  return to.content();
}

void expect_like_oracle(HostExecutor& executor, const StridedCopy& copy, std::int64_t src_skew, std::int64_t dst_skew) {
  const naive::Reach reach = naive::reach(copy);
  const Bytes src = naive::random_bytes(reach.src, 1);
  const Bytes before = naive::random_bytes(reach.dst + 5, 2);
  Bytes expected = before;
  naive::move(copy, src, expected);
  RC_ASSERT(execute(executor, copy, src, before, src_skew, dst_skew) == expected);
}

RC_GTEST_PROP(HostExecutor, MovesWhatTheOracleMoves, ()) {
  WorkerPool pool(2);
  HostExecutor executor(pool, randomly::number(0, 1) == 0 ? 1 : 1 << 20);
  const StridedCopy copy = randomly::nest({.run_max = randomly::number(0, 3) == 0 ? 700 : 24});
  RC_TAG(std::string(copy_path_name(CopyPlan(copy, false).path())));
  expect_like_oracle(executor, copy, randomly::number(0, 63), randomly::number(0, 63));
}

/// Word nests of all kinds of shapes: the ones that scales have, with counts that fill no vector.
StridedCopy random_word_nest() {
  std::vector<CopyDim> dims(static_cast<std::size_t>(randomly::number(2, 4)));
  for (CopyDim& dim : dims) dim.count = randomly::number(1, 40);
  while (StridedCopy::make(0, 0, 4, dims).run_count() > 20000)
    dims[static_cast<std::size_t>(randomly::number(0, static_cast<std::int64_t>(dims.size()) - 1))].count = 3;
  std::int64_t src = 4;
  std::int64_t dst = 4;
  for (const std::size_t j : randomly::order(dims.size())) {
    dims[j].src_stride = src;
    src = src * dims[j].count + (randomly::number(0, 3) == 0 ? 4 : 0);
  }
  for (const std::size_t j : randomly::order(dims.size())) {
    dims[j].dst_stride = dst;
    dst = dst * dims[j].count + (randomly::number(0, 3) == 0 ? 64 : 0);
  }
  return StridedCopy::make(4 * randomly::number(0, 3), 4 * randomly::number(0, 3), 4, dims);
}

RC_GTEST_PROP(HostExecutor, TransposesWordsLikeTheOracle, ()) {
  WorkerPool pool(2);
  HostExecutor executor(pool, randomly::number(0, 1) == 0 ? 1 : 1 << 20);
  const StridedCopy copy = random_word_nest();
  RC_TAG(std::string(copy_path_name(CopyPlan(copy, false).path())));
  for (const std::string& target : simd_targets()) {
    force_simd_target(target);
    expect_like_oracle(executor, copy, randomly::number(0, 3), randomly::number(0, 1) == 0 ? 0 : randomly::number(0, 63));
  }
  force_simd_target("");
}

RC_GTEST_PROP(HostExecutor, FillsConstants, ()) {
  WorkerPool pool(2);
  HostExecutor executor(pool, randomly::number(0, 1) == 0 ? 1 : 1 << 20);
  StridedCopy copy = randomly::nest({.run_max = 300});
  const bool words = randomly::number(0, 1) == 0;
  const std::uint32_t pattern = words ? 0xFF800000U : 0x7F7F7F7FU;
  for (CopyDim& dim : copy.dims) dim.src_stride = 0;
  if (words) {
    copy.run_bytes *= 4;
    copy.dst_offset *= 4;
    for (CopyDim& dim : copy.dims) dim.dst_stride *= 4;
  }
  const naive::Reach reach = naive::reach(copy);
  Bytes expected = naive::random_bytes(reach.dst + 5, 2);
  Skewed to(expected, words ? 4 * randomly::number(0, 15) : randomly::number(0, 63));
  naive::each_byte(copy, [&](std::int64_t, std::int64_t d) {
    expected[static_cast<std::size_t>(d)] = static_cast<std::byte>(pattern >> (8 * (d % 4)));
  });
  executor.run({{CopyJob{copy, nullptr, to.begin, pattern}}});
  RC_ASSERT(to.content() == expected);
}

TEST(HostExecutor, ChoosesThePathFromTheNest) {
  const std::byte byte{};
  const auto path = [&](std::int64_t run, std::vector<CopyDim> dims) {
    return choose_path({StridedCopy::make(0, 0, run, dims), &byte, nullptr, 0});
  };
  EXPECT_EQ(path(100, {}), CopyPath::kFlat);
  EXPECT_EQ(path(4, {{100, 400, 400}, {100, 4, 4}}), CopyPath::kFlat);
  EXPECT_EQ(path(1152, {{5120, 1152, 1280}}), CopyPath::kPitched);
  EXPECT_EQ(path(4, {{36, 64 * 160, 512}, {4, 16 * 160, 4}, {2, 8 * 160, 256}, {8, 160, 16}, {40, 4, 20480}}), CopyPath::kTranspose32);
  EXPECT_EQ(path(4, {{40, 128 * 72, 512}, {4, 32 * 72, 4}, {32, 72, 16}, {18, 4, 20480}}), CopyPath::kTranspose32);
  EXPECT_EQ(path(2, {{40, 2, 80}, {40, 80, 2}}), CopyPath::kGeneric);
  EXPECT_EQ(choose_path({StridedCopy::make(0, 0, 4, {}), nullptr, nullptr, 7}), CopyPath::kConstant);
  EXPECT_EQ(copy_path_name(CopyPath::kTranspose32), "transpose32");
}

/// One large nest of each path, cut over the threads, with and without streaming stores.
TEST(HostExecutor, CutsLargeNestsWithoutLosingABoundary) {
  const std::vector<StridedCopy> large{
      StridedCopy::flat(3, 5, (5 << 20) + 77),
      StridedCopy::make(0, 0, 20000, std::vector<CopyDim>{{300, 20000, 20480}}),
      StridedCopy::make(0, 0, 4, std::vector<CopyDim>{{1024, 4096, 4}, {1024, 4, 4096}}),
      StridedCopy::make(0, 0, 4, std::vector<CopyDim>{{1009, 4000, 4}, {1000, 4, 4036}}),
      StridedCopy::make(0, 0, 2, std::vector<CopyDim>{{1200, 2, 2400}, {1200, 2400, 2}}),
      StridedCopy::make(0, 0, 1000, std::vector<CopyDim>{{4, 0, 1 << 20}, {1000, 1000, 1024}}),
  };
  for (const std::int64_t streaming_min : {std::int64_t{1}, INT64_MAX}) {
    for (const std::size_t threads : {1U, 2U, 5U}) {
      WorkerPool pool(threads);
      HostExecutor executor(pool, streaming_min);
      for (const StridedCopy& copy : large) {
        const naive::Reach reach = naive::reach(copy);
        const Bytes src = naive::random_bytes(reach.src, 1);
        Bytes expected(static_cast<std::size_t>(reach.dst));
        naive::move(copy, src, expected);
        EXPECT_EQ(execute(executor, copy, src, Bytes(expected.size()), 1, 0), expected) << copy.to_string();
      }
    }
  }
}

TEST(HostExecutor, RunsBatchesOfSmallAndLargeJobsTogether) {
  WorkerPool pool(3);
  HostExecutor executor(pool, 1 << 16);
  const Bytes src = naive::random_bytes(4 << 20, 1);
  Bytes expected(8 << 20);
  Bytes actual = expected;
  std::vector<CopyJob> jobs;
  std::mt19937_64 engine(5);
  std::uint64_t bytes = 0;
  for (std::size_t at = 0; at + (1 << 20) < expected.size();) {
    const auto run = static_cast<std::int64_t>(engine() % 8 == 0 ? 900000 + engine() % 1000 : 1 + engine() % 9000);
    const StridedCopy copy = StridedCopy::flat(static_cast<std::int64_t>(engine() % 3000000), static_cast<std::int64_t>(at), run);
    jobs.push_back({copy, src.data(), actual.data()});
    naive::move(copy, src, expected);
    at += static_cast<std::size_t>(run);
    bytes += static_cast<std::uint64_t>(run);
  }
  const CopyStats stats = executor.run(jobs);
  EXPECT_EQ(actual, expected);
  EXPECT_EQ(stats.batches, 1U);
  EXPECT_EQ(stats.copies, jobs.size());
  EXPECT_EQ(stats.bytes, bytes);
}

TEST(HostExecutor, ReadsThroughATableOnTheSourceSide) {
  WorkerPool pool(2);
  HostExecutor executor(pool, 1);
  StridedCopy copy = StridedCopy::make(0, 0, 600, std::vector<CopyDim>{{3, 600, 600}});
  copy.indexed_dim = 0;
  copy.slots = std::make_shared<const std::vector<std::int32_t>>(std::vector<std::int32_t>{4, 0, 2});
  const Bytes src = naive::random_bytes(1800, 1);
  const Bytes live = execute(executor, copy, src, Bytes(3000));
  EXPECT_EQ(execute(executor, inverse(copy), live, Bytes(1800)), src);
}

TEST(HostExecutor, PassesOverEmptyBatchesAndEmptyNests) {
  WorkerPool pool(2);
  HostExecutor executor(pool);
  const CopyStats none = executor.run({});
  EXPECT_EQ(none.copies, 0U);
  EXPECT_EQ(none.batches, 1U);
  std::byte untouched{7};
  EXPECT_EQ(executor.run({{CopyJob{StridedCopy::flat(0, 0, 0), &untouched, &untouched}}}).bytes, 0U);
  EXPECT_EQ(executor.run({{CopyJob{StridedCopy::flat(0, 0, 0), nullptr, &untouched, 1}}}).bytes, 0U);
  EXPECT_EQ(untouched, std::byte{7});
}

}  // namespace
}  // namespace headrace
