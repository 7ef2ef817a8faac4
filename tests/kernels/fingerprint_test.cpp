#include "kernels/fingerprint.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "kernels/host_kernels.h"
#include "tests/kernels/naive_copy.h"
#include "tests/kernels/random_nest.h"

namespace headrace {
namespace {

using naive::Bytes;

// The rules of docs/protocol.md once more, one byte at a time, with no table and no header of the code under test.
std::uint64_t next(std::uint64_t state) {
  std::uint64_t z = state + 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

std::vector<std::uint64_t> words_of_the_rule() {
  std::vector<std::uint64_t> words;
  for (std::uint64_t state = 0x4865616472616365U; words.size() < 1040; state += 0x9E3779B97F4A7C15U) {
    if (const std::uint64_t word = next(state) >> 32; word != 0) words.push_back(word);
  }
  return words;
}

FingerprintSum by_byte(TensorKey key, std::uint64_t offset, std::byte value) {
  static const std::vector<std::uint64_t> words = words_of_the_rule();
  FingerprintSum sum;
  for (std::uint64_t lane = 0; lane < 2; ++lane) {
    const std::uint64_t kappa = next(next(next(key.value) ^ (offset / 4096)) ^ lane) | 1;
    std::uint64_t term = static_cast<std::uint64_t>(value) * words[offset / 4 % 1024 + 16 * lane] * kappa;
    for (std::uint64_t i = 0; i < offset % 4; ++i) term *= 256;
    sum.lanes[lane] = term;
  }
  return sum;
}

FingerprintSum by_bytes(TensorKey key, std::uint64_t offset, std::span<const std::byte> bytes) {
  FingerprintSum sum;
  for (std::size_t i = 0; i < bytes.size(); ++i) sum += by_byte(key, offset + i, bytes[i]);
  return sum;
}

/// The content of the published vectors: byte i is (31 i^2 + 7 i + 5) mod 251.
Bytes vector_bytes(std::size_t count) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((31 * i * i + 7 * i + 5) % 251);
  return bytes;
}

FingerprintSum lanes(std::uint64_t a, std::uint64_t b) {
  FingerprintSum sum;
  sum.lanes = {a, b};
  return sum;
}

const TensorKey kWeightKey = tensor_key("layers.3.ffn.experts.11.w1.weight", Dtype::kI8, std::vector<std::int64_t>{2304, 2560});

TEST(Fingerprint, TableAndKeysFollowThePublishedRules) {
  const auto& table = kFingerprintTable;
  EXPECT_EQ(table[0], 0x3e5c98f5U);
  EXPECT_EQ(table[1], 0x863cfeccU);
  EXPECT_EQ(table[2], 0x89d4ac7aU);
  EXPECT_EQ(table[1023], 0x35759fc5U);
  EXPECT_EQ(table[1039], 0x1db76925U);
  EXPECT_EQ(kWeightKey.value, 0x08f19c6cff4f61e8U);
  EXPECT_EQ(tensor_key("norm.weight", Dtype::kBF16, std::vector<std::int64_t>{5120}).value, 0x9a2804fbec0e452fU);
  EXPECT_EQ(tensor_key("", Dtype::kU8, {}).value, 0xd5f095a997147825U);
}

// Worked out once with arbitrary-precision integers; docs/protocol.md lists the same.
TEST(Fingerprint, GivesThePublishedVectors) {
  const TensorKey norm = tensor_key("norm.weight", Dtype::kBF16, std::vector<std::int64_t>{5120});
  const TensorKey nameless = tensor_key("", Dtype::kU8, {});
  EXPECT_EQ(fingerprint(kWeightKey, 0, vector_bytes(1)), lanes(0x0c1749e03fb43399, 0x1d5f21978f5e7c49));
  EXPECT_EQ(fingerprint(kWeightKey, 3, vector_bytes(1)), lanes(0xe03fb43399000000, 0x978f5e7c49000000));
  EXPECT_EQ(fingerprint(kWeightKey, 0, vector_bytes(4096)), lanes(0xa505ea98aa570e40, 0x42b7d3d586e771b7));
  EXPECT_EQ(fingerprint(kWeightKey, 0, vector_bytes(10000)), lanes(0x125dbedc71d4aace, 0x82ec2e2d35d54972));
  EXPECT_EQ(fingerprint(kWeightKey, 4095, vector_bytes(3)), lanes(0xa488cd8994117b7f, 0x546ce11ed2ab78e7));
  EXPECT_EQ(fingerprint(norm, 123456789, vector_bytes(777)), lanes(0x4afdd29f7b4ee9c7, 0xa2959ccfeec901bf));
  EXPECT_EQ(fingerprint(nameless, (std::uint64_t{1} << 40) + 2, vector_bytes(5000)), lanes(0xfc745c116dbafc00, 0xc371b6c5cfeabecd));
}

TEST(Fingerprint, KeysDifferInNameDtypeAndShape) {
  const std::vector<std::int64_t> shape{4, 6};
  const TensorKey key = tensor_key("a.weight", Dtype::kI8, shape);
  EXPECT_EQ(key, tensor_key("a.weight", Dtype::kI8, shape));
  EXPECT_NE(key.value, tensor_key("b.weight", Dtype::kI8, shape).value);
  EXPECT_NE(key.value, tensor_key("a.weight", Dtype::kU8, shape).value);
  EXPECT_NE(key.value, tensor_key("a.weight", Dtype::kI8, std::vector<std::int64_t>{6, 4}).value);
  EXPECT_NE(key.value, tensor_key("a.weight", Dtype::kI8, std::vector<std::int64_t>{24}).value);
  EXPECT_NE(tensor_key("a", Dtype::kI8, shape).value, tensor_key(std::string_view("a\0", 2), Dtype::kI8, shape).value);
}

RC_GTEST_PROP(Fingerprint, EqualsTheSumByteByByteOnEveryTarget, ()) {
  const Bytes bytes = naive::random_bytes(randomly::number(0, 9000), 1);
  const auto skew = static_cast<std::size_t>(randomly::number(0, static_cast<std::int64_t>(std::min<std::size_t>(bytes.size(), 70))));
  const std::span<const std::byte> part = std::span(bytes).subspan(skew);
  const auto offset = static_cast<std::uint64_t>(randomly::number(0, 20000));
  const FingerprintSum expected = by_bytes(kWeightKey, offset, part);
  for (const std::string& target : simd_targets()) {
    force_simd_target(target);
    const FingerprintSum actual = fingerprint(kWeightKey, offset, part);
    Bytes copied(part.size() + 1, std::byte{0x5A});
    const StridedCopy flat = StridedCopy::flat(0, 0, static_cast<std::int64_t>(part.size()));
    const StridedCopy at_offset = StridedCopy::flat(0, static_cast<std::int64_t>(offset), flat.run_bytes);
    const FingerprintSum fused = copy_and_fingerprint(kWeightKey, flat, at_offset, part.data(), copied.data());
    RC_LOG() << target << "\n";
    RC_ASSERT(actual == expected);
    RC_ASSERT(fused == expected);
    RC_ASSERT(std::equal(part.begin(), part.end(), copied.begin()));
    RC_ASSERT(copied.back() == std::byte{0x5A});
  }
  force_simd_target("");
}

TEST(Fingerprint, HasMoreThanOneTargetToCompareHere) {
#if defined(__x86_64__)
  EXPECT_GE(simd_targets().size(), 2U);
#endif
  EXPECT_GE(simd_targets().size(), 1U);
}

TEST(Fingerprint, AddsUpOverACutAtAnyByte) {
  const Bytes bytes = naive::random_bytes(9000, 4);
  const FingerprintSum whole = fingerprint(kWeightKey, 0, bytes);
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    const std::span<const std::byte> all(bytes);
    ASSERT_EQ(fingerprint(kWeightKey, cut, all.subspan(cut)) + fingerprint(kWeightKey, 0, all.first(cut)), whole) << cut;
  }
}

RC_GTEST_PROP(Fingerprint, AddsUpOverPiecesInAnyOrder, ()) {
  const Bytes bytes = naive::random_bytes(20000, 4);
  std::vector<std::size_t> cuts{0, bytes.size()};
  for (std::int64_t i = randomly::number(0, 12); i > 0; --i) cuts.push_back(static_cast<std::size_t>(randomly::number(0, 20000)));
  std::sort(cuts.begin(), cuts.end());
  FingerprintSum sum;
  for (const std::size_t piece : randomly::order(cuts.size() - 1)) {
    sum += fingerprint(kWeightKey, cuts[piece], std::span(bytes).subspan(cuts[piece], cuts[piece + 1] - cuts[piece]));
  }
  RC_ASSERT(sum == fingerprint(kWeightKey, 0, bytes));
}

TEST(Fingerprint, NoticesEachOfAThousandBitFlips) {
  Bytes bytes = naive::random_bytes(64 << 10, 8);
  const FingerprintSum whole = fingerprint(kWeightKey, 0, bytes);
  std::mt19937_64 engine(9);
  for (int i = 0; i < 1000; ++i) {
    std::byte& victim = bytes[engine() % bytes.size()];
    const std::byte flip{static_cast<std::uint8_t>(1U << (engine() % 8))};
    victim ^= flip;
    const FingerprintSum changed = fingerprint(kWeightKey, 0, bytes);
    ASSERT_NE(changed.lanes[0], whole.lanes[0]);
    ASSERT_NE(changed.lanes[1], whole.lanes[1]);
    victim ^= flip;
  }
  EXPECT_EQ(fingerprint(kWeightKey, 0, bytes), whole);
}

TEST(Fingerprint, NoticesEachOfAThousandSwappedWords) {
  Bytes bytes = naive::random_bytes(64 << 10, 8);
  const FingerprintSum whole = fingerprint(kWeightKey, 0, bytes);
  std::mt19937_64 engine(9);
  for (int i = 0; i < 1000; ++i) {
    // Same place in another block as well: only kappa tells those apart.
    const std::size_t a = engine() % (bytes.size() / 4);
    const std::size_t b = i % 2 == 0 ? (a + 1024) % (bytes.size() / 4) : engine() % (bytes.size() / 4);
    if (std::equal(&bytes[4 * a], &bytes[4 * a] + 4, &bytes[4 * b])) continue;
    const auto swap_them = [&] { std::swap_ranges(&bytes[4 * a], &bytes[4 * a] + 4, &bytes[4 * b]); };
    swap_them();
    ASSERT_NE(fingerprint(kWeightKey, 0, bytes), whole);
    swap_them();
  }
}

TEST(Fingerprint, NoticesSwappedExperts) {
  const std::vector<std::int64_t> shape{64, 64};
  const auto key = [&](int expert) {
    return tensor_key("layers.0.ffn.experts." + std::to_string(expert) + ".w1.weight", Dtype::kI8, shape);
  };
  std::vector<Bytes> experts;
  for (std::uint64_t e = 0; e < 46; ++e) experts.push_back(naive::random_bytes(4096, e));
  for (int a = 0; a < 46; ++a) {
    for (int b = 0; b < a; ++b) {
      const auto& of_a = experts[static_cast<std::size_t>(a)];
      const auto& of_b = experts[static_cast<std::size_t>(b)];
      ASSERT_NE(fingerprint(key(a), 0, of_b), fingerprint(key(a), 0, of_a));
      ASSERT_NE(fingerprint(key(a), 0, of_b) + fingerprint(key(b), 0, of_a), fingerprint(key(a), 0, of_a) + fingerprint(key(b), 0, of_b));
    }
  }
}

TEST(Fingerprint, OfNothingAndOfZerosIsZero) {
  EXPECT_EQ(fingerprint(kWeightKey, 17, {}), FingerprintSum{});
  EXPECT_EQ(fingerprint(kWeightKey, 17, Bytes(9000)), FingerprintSum{});
  const std::byte byte{1};
  EXPECT_EQ(fingerprint_nest(kWeightKey, StridedCopy::flat(0, 0, 0), &byte), FingerprintSum{});
}

FingerprintSum nest_by_bytes(TensorKey key, const StridedCopy& tensor_to_memory, const Bytes& memory) {
  FingerprintSum sum;
  naive::each_byte(tensor_to_memory, [&](std::int64_t offset, std::int64_t at) {
    sum += by_byte(key, static_cast<std::uint64_t>(offset), memory[static_cast<std::size_t>(at)]);
  });
  return sum;
}

RC_GTEST_PROP(Fingerprint, OfANestIsTheSumOfItsBytes, ()) {
  const StridedCopy copy = randomly::nest({.dims_max = 5, .run_max = randomly::number(0, 3) == 0 ? 600 : 24, .repeats = false});
  const Bytes memory = naive::random_bytes(naive::reach(copy).dst, 3);
  RC_ASSERT(fingerprint_nest(kWeightKey, copy, memory.data()) == nest_by_bytes(kWeightKey, copy, memory));
}

/// More bytes than the gather buffer holds, with counts that do not divide it.
TEST(Fingerprint, OfLargeNestsOfShortRunsIsTheSumOfTheirBytes) {
  const std::vector<StridedCopy> nests{
      StridedCopy::make(0, 0, 4, std::vector<CopyDim>{{9973, 4, 8}}),
      StridedCopy::make(5, 3, 2, std::vector<CopyDim>{{130, 2, 600}, {299, 260, 2}}),
      StridedCopy::make(0, 0, 1, std::vector<CopyDim>{{40000, 1, 3}}),
      StridedCopy::make(0, 0, 4, std::vector<CopyDim>{{6, 64 * 80, 512}, {4, 16 * 80, 4}, {2, 8 * 80, 256}, {8, 80, 16}, {17, 4, 4096}}),
      StridedCopy::make(7, 0, 12, std::vector<CopyDim>{{1709, 30, 12}}),
  };
  for (const StridedCopy& copy : nests) {
    const Bytes memory = naive::random_bytes(naive::reach(copy).dst, 3);
    EXPECT_EQ(fingerprint_nest(kWeightKey, copy, memory.data()), nest_by_bytes(kWeightKey, copy, memory)) << copy.to_string();
  }
}

RC_GTEST_PROP(Fingerprint, PackingSumsWhatItMoves, ()) {
  // Memory -> buffer, with the tensor offsets of the same bytes beside it.
  const StridedCopy copy = randomly::nest({.run_max = randomly::number(0, 1) == 0 ? 200 : 24, .repeats = false});
  StridedCopy offsets = copy;
  offsets.dst_offset = randomly::number(0, 9000);
  for (std::size_t j = 0; j < offsets.dim_count; ++j) offsets.dims[j].dst_stride = copy.dims[j].dst_stride * 3 + 1;
  const naive::Reach reach = naive::reach(copy);
  const Bytes src = naive::random_bytes(reach.src, 3);
  Bytes expected(static_cast<std::size_t>(reach.dst));
  Bytes actual = expected;
  naive::move(copy, src, expected);
  FingerprintSum sum;
  naive::each_byte(offsets, [&](std::int64_t at, std::int64_t offset) {
    sum += by_byte(kWeightKey, static_cast<std::uint64_t>(offset), src[static_cast<std::size_t>(at)]);
  });
  RC_ASSERT(copy_and_fingerprint(kWeightKey, copy, offsets, src.data(), actual.data()) == sum);
  RC_ASSERT(actual == expected);
}

/// Packs that are large enough to go around the caches, from and to memory that begins anywhere.
TEST(Fingerprint, PackingMuchAtOnceSumsWhatItMovesOnEveryTarget) {
  const std::vector<CopyDim> rows{{17, 5000, 4333}};
  const std::vector<CopyDim> words{{130, 4, 800}, {200, 520, 4}};
  const std::vector<StridedCopy> copies{StridedCopy::flat(0, 0, 70'001), StridedCopy::make(3, 0, 4321, rows),
                                        StridedCopy::make(0, 0, 4, words)};
  for (const StridedCopy& copy : copies) {
    const naive::Reach reach = naive::reach(copy);
    const Bytes src = naive::random_bytes(reach.src, 3);
    for (const std::int64_t skew : {0, 1, 4, 20, 63}) {
      StridedCopy offsets = copy;
      offsets.dst_offset = 3 * skew;
      FingerprintSum sum;
      naive::each_byte(offsets, [&](std::int64_t at, std::int64_t offset) {
        sum += by_byte(kWeightKey, static_cast<std::uint64_t>(offset), src[static_cast<std::size_t>(at)]);
      });
      StridedCopy skewed = copy;
      skewed.dst_offset = skew;
      Bytes expected(static_cast<std::size_t>(reach.dst + skew + 1), std::byte{0x5A});
      const Bytes before = expected;
      naive::move(skewed, src, expected);
      for (const std::string& target : simd_targets()) {
        force_simd_target(target);
        Bytes actual = before;
        EXPECT_EQ(copy_and_fingerprint(kWeightKey, skewed, offsets, src.data(), actual.data()), sum) << target << " " << skew;
        EXPECT_EQ(actual, expected) << target << " " << skew << " " << skewed.to_string();
      }
      force_simd_target("");
    }
  }
}

}  // namespace
}  // namespace headrace
