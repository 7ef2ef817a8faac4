#include "kernels/element_cast.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <random>

#include "core/base/worker_pool.h"
#include "kernels/executor.h"
#include "kernels/host_kernels.h"
#include "tests/kernels/naive_cast.h"
#include "tests/kernels/naive_copy.h"
#include "tests/kernels/random_nest.h"

namespace headrace {
namespace {

constexpr Dtype kFloats[] = {Dtype::kF32, Dtype::kF16, Dtype::kBF16};

/// Converts all patterns in one row and compares each with the oracle, on every instruction set of this machine.
void expect_like_oracle(Dtype from, Dtype to, const std::vector<std::uint32_t>& patterns) {
  const ElementCast cast{from, to};
  std::vector<std::byte> src(patterns.size() * static_cast<std::size_t>(cast.from_bytes()));
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    std::memcpy(src.data() + i * static_cast<std::size_t>(cast.from_bytes()), &patterns[i], static_cast<std::size_t>(cast.from_bytes()));
  }
  std::vector<std::uint32_t> expected;
  for (const std::uint32_t pattern : patterns) expected.push_back(naive::convert_bits(from, to, pattern));
  for (const std::string& target : simd_targets()) {
    force_simd_target(target);
    std::vector<std::byte> dst(patterns.size() * static_cast<std::size_t>(cast.to_bytes()));
    cast_rows(cast, src.data(), dst.data(), 1, 0, 0, static_cast<std::int64_t>(patterns.size()));
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      std::uint32_t actual = 0;
      std::memcpy(&actual, dst.data() + i * static_cast<std::size_t>(cast.to_bytes()), static_cast<std::size_t>(cast.to_bytes()));
      ASSERT_EQ(actual, expected[i]) << target << ": " << dtype_name(from) << " to " << dtype_name(to) << ", pattern " << std::hex
                                     << patterns[i];
    }
  }
  force_simd_target("");
}

TEST(ElementCast, ConvertsEveryPatternOf16BitsLikeTheOracle) {
  std::vector<std::uint32_t> patterns(65'536);
  for (std::uint32_t i = 0; i < patterns.size(); ++i) patterns[i] = i;
  for (const Dtype from : {Dtype::kF16, Dtype::kBF16}) {
    for (const Dtype to : kFloats) {
      if (from != to) expect_like_oracle(from, to, patterns);
    }
  }
}

/// Around every value and every midpoint of the narrow type: the single itself and its neighbours, with both signs, so that ties, carries
/// into the exponent, the step to infinity and the subnormal range are all there.
TEST(ElementCast, RoundsSinglesAroundEveryValueOfTheNarrowTypeLikeTheOracle) {
  for (const Dtype to : {Dtype::kF16, Dtype::kBF16}) {
    const naive::FloatFormat narrow = naive::format_of(to);
    std::vector<std::uint32_t> patterns;
    for (std::uint32_t bits = 0; bits < narrow.infinity(); ++bits) {
      const double here = naive::magnitude(narrow, bits);
      const double next = naive::magnitude(narrow, bits + 1);
      for (const double value : {here, here + (next - here) / 2}) {
        if (value > static_cast<double>(std::numeric_limits<float>::max())) continue;
        const auto single = static_cast<float>(value);
        std::uint32_t pattern = 0;
        std::memcpy(&pattern, &single, 4);
        for (const std::uint32_t near : {pattern - 1, pattern, pattern + 1}) {
          patterns.push_back(near & 0x7FFFFFFFU);
          patterns.push_back(near | 0x80000000U);
        }
      }
    }
    expect_like_oracle(Dtype::kF32, to, patterns);
  }
}

TEST(ElementCast, ConvertsTheEdgesOfSinglesLikeTheOracle) {
  std::vector<std::uint32_t> patterns;
  for (const std::uint32_t edge :
       {0x00000000U, 0x00000001U, 0x007FFFFFU, 0x00800000U, 0x33000000U, 0x33000001U, 0x387FFFFFU, 0x38800000U, 0x477FEFFFU, 0x477FF000U,
        0x47800000U, 0x7F7F7FFFU, 0x7F7F8000U, 0x7F7FFFFFU, 0x7F800000U, 0x7F800001U, 0x7FBFFFFFU, 0x7FC00000U, 0x7FC00001U, 0x7FFFFFFFU}) {
    patterns.push_back(edge);
    patterns.push_back(edge | 0x80000000U);
  }
  std::mt19937 engine(7);
  for (int i = 0; i < 200'000; ++i) patterns.push_back(static_cast<std::uint32_t>(engine()));
  expect_like_oracle(Dtype::kF32, Dtype::kF16, patterns);
  expect_like_oracle(Dtype::kF32, Dtype::kBF16, patterns);
}

TEST(ElementCast, KeepsWhatEverybodyKnows) {
  const auto one = [](Dtype from, Dtype to, std::uint32_t bits) {
    std::byte src[4] = {};
    std::byte dst[4] = {};
    std::memcpy(src, &bits, 4);
    cast_rows({from, to}, src, dst, 1, 0, 0, 1);
    std::uint32_t result = 0;
    std::memcpy(&result, dst, 4);
    return result;
  };
  EXPECT_EQ(one(Dtype::kF32, Dtype::kBF16, 0x3F800000), 0x3F80U);  // 1
  EXPECT_EQ(one(Dtype::kF32, Dtype::kF16, 0x3F800000), 0x3C00U);
  EXPECT_EQ(one(Dtype::kF16, Dtype::kF32, 0x0001), 0x33800000U);   // 2^-24
  EXPECT_EQ(one(Dtype::kF32, Dtype::kF16, 0x477FE000), 0x7BFFU);   // 65504, the largest
  EXPECT_EQ(one(Dtype::kF32, Dtype::kF16, 0x477FF000), 0x7C00U);   // 65520 is half way to the next: infinity
  EXPECT_EQ(one(Dtype::kF32, Dtype::kBF16, 0x3F808000), 0x3F80U);  // a tie goes to even
  EXPECT_EQ(one(Dtype::kF32, Dtype::kBF16, 0x3F818000), 0x3F82U);
  EXPECT_EQ(one(Dtype::kF32, Dtype::kBF16, 0x7F800001), 0x7FC0U);  // a signalling NaN whose payload is cut off stays one, quiet
  EXPECT_EQ(one(Dtype::kBF16, Dtype::kF32, 0xFF81), 0xFFC10000U);
}

TEST(ElementCast, IsThereForThreeTypesOnly) {
  for (const Dtype from : kFloats) {
    for (const Dtype to : kFloats) EXPECT_TRUE(castable(from, to));
    for (const Dtype other : {Dtype::kU8, Dtype::kI32, Dtype::kF64, Dtype::kF8E4M3, Dtype::kU16}) {
      EXPECT_FALSE(castable(from, other));
      EXPECT_FALSE(castable(other, from));
    }
  }
}

/// A nest over elements as the placement of a cast is: the same loops, the two sides in units of their own.
RC_GTEST_PROP(HostExecutor, ConvertsElementsWhereTheOracleMovesThem, ()) {
  const Dtype from = kFloats[randomly::number(0, 2)];
  const Dtype to = kFloats[(static_cast<int>(std::find(kFloats, kFloats + 3, from) - kFloats) + randomly::number(1, 2)) % 3];
  const ElementCast cast{from, to};
  const StridedCopy elements = randomly::nest({.run_max = randomly::number(0, 3) == 0 ? 300 : 24});
  const std::int64_t odd = randomly::number(0, 3) == 0 ? randomly::number(1, 3) : 0;  // a source that is not stepped in whole elements
  StridedCopy copy = elements;
  copy.src_offset = copy.src_offset * cast.from_bytes() + odd;
  copy.dst_offset *= cast.to_bytes();
  copy.run_bytes *= cast.to_bytes();
  for (std::size_t j = 0; j < copy.dim_count; ++j) {
    copy.dims[j].src_stride = copy.dims[j].src_stride * cast.from_bytes() + (copy.dims[j].src_stride == 0 ? 0 : odd);
    copy.dims[j].dst_stride *= cast.to_bytes();
  }
  StridedCopy probe = copy;  // the source elements that are read, each as a run of its own bytes
  probe.run_bytes = elements.run_bytes * cast.from_bytes();
  const naive::Bytes src = naive::random_bytes(naive::reach(probe).src, 3);
  const naive::Bytes before = naive::random_bytes(naive::reach(copy).dst + 5, 4);
  naive::Bytes expected = before;
  // Walk both sides together, element by element.
  std::vector<std::int64_t> sources;
  std::int64_t at = 0;
  naive::each_byte(probe, [&](std::int64_t s, std::int64_t) {
    if (at++ % cast.from_bytes() == 0) sources.push_back(s);
  });
  std::size_t next = 0;
  at = 0;
  naive::each_byte(copy, [&](std::int64_t, std::int64_t d) {
    if (at++ % cast.to_bytes() != 0) return;
    naive::convert_element(from, to, src.data() + sources[next++], expected.data() + d);
  });
  WorkerPool pool(2);
  HostExecutor executor(pool, randomly::number(0, 1) == 0 ? 1 : 1 << 20);
  naive::Bytes actual = before;
  const CopyJob job{copy, src.data(), actual.data(), 0, cast};
  RC_ASSERT(choose_path(job) == CopyPath::kCast);
  const CopyStats stats = executor.run({&job, 1});
  RC_ASSERT(stats.bytes == static_cast<std::uint64_t>(copy.dst_bytes()));
  RC_ASSERT(actual == expected);
}

TEST(HostExecutor, CutsLargeConversionsOverThreads) {
  constexpr std::int64_t kElements = (std::int64_t{3} << 20) + 5;
  const ElementCast cast{Dtype::kF32, Dtype::kBF16};
  const naive::Bytes src = naive::random_bytes(kElements * 4, 9);
  naive::Bytes actual(kElements * 2);
  naive::Bytes expected(kElements * 2);
  for (std::int64_t i = 0; i < kElements; ++i) naive::convert_element(cast.from, cast.to, src.data() + i * 4, expected.data() + i * 2);
  WorkerPool pool(3);
  const CopyJob job{StridedCopy::flat(0, 0, kElements * 2), src.data(), actual.data(), 0, cast};
  HostExecutor(pool).run({&job, 1});
  EXPECT_TRUE(actual == expected);
}

}  // namespace
}  // namespace headrace
