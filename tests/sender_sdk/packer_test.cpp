#include "sender_sdk/packer.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace headrace {
namespace {

/// Memory of random bytes with a box of a tensor somewhere in it, and what packing must give.
struct Sample {
  Shape shape;
  Box box;
  std::int64_t elem_bytes;
  std::vector<std::int64_t> strides;

  std::vector<std::byte> memory() const {
    std::int64_t reach = elem_bytes;
    for (std::size_t d = 0; d < shape.size(); ++d) reach += (box.hi[d] - box.lo[d] - 1) * strides[d];
    std::mt19937_64 random(7);
    std::vector<std::byte> bytes(static_cast<std::size_t>(reach));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
  }

  /// Calls visit(offset in memory, offset in the packed cell, offset in the tensor) for every element.
  template <class Visit>
  void each_element(const Visit& visit) const {
    const std::int64_t count = box.elements();
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t rest = i;
      std::int64_t from = 0;
      std::int64_t in_tensor = 0;
      std::int64_t scale = 1;
      for (std::size_t d = shape.size(); d-- > 0;) {
        const std::int64_t extent = box.hi[d] - box.lo[d];
        const std::int64_t at = rest % extent;
        rest /= extent;
        from += at * strides[d];
        in_tensor += (at + box.lo[d]) * scale;
        scale *= shape[d];
      }
      visit(from, i * elem_bytes, in_tensor * elem_bytes);
    }
  }
};

std::vector<Sample> samples() {
  return {
      {{6, 8}, Box{{0, 0}, {6, 8}}, 2, {16, 2}},                // packed
      {{6, 8}, Box{{1, 2}, {5, 7}}, 2, {64, 2}},                // pitched rows of a box
      {{6, 8}, Box{{0, 0}, {6, 8}}, 4, {4, 24}},                // transposed
      {{4, 5, 6}, Box{{1, 0, 3}, {4, 5, 6}}, 1, {1, 7, 40}},    // permuted
      {{3, 5}, Box{{0, 0}, {3, 5}}, 8, {0, 8}},                 // expanded rows
      {{7}, Box{{2}, {6}}, 2, {6}},                             // every third element
      {{}, Box{{}, {}}, 4, {}},                                 // a scalar
      {{5, 1}, Box{{0, 0}, {5, 1}}, 4, {12, 4}},                // a column of a wider matrix
      {{600, 700}, Box{{0, 0}, {600, 700}}, 4, {2'800, 4}},     // enough for several threads, one run
      {{600, 700}, Box{{10, 100}, {600, 700}}, 4, {3'000, 4}},  // the same by rows
      {{600, 700}, Box{{0, 0}, {600, 700}}, 4, {4, 2'400}},     // and transposed
  };
}

TEST(Packer, PacksEveryViewAsANaiveLoopDoes) {
  for (const std::uint32_t threads : {1U, 3U}) {
    for (const bool fingerprints : {true, false}) {
      Packer packer(threads, fingerprints);
      for (const Sample& sample : samples()) {
        const auto memory = sample.memory();
        const auto bytes = static_cast<std::size_t>(sample.box.elements() * sample.elem_bytes);
        std::vector<std::byte> expected(bytes);
        FingerprintSum sum;
        const TensorKey key = tensor_key("tensor", Dtype::kU8, sample.shape);
        sample.each_element([&](std::int64_t from, std::int64_t to, std::int64_t in_tensor) {
          const auto element = std::span(memory).subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(sample.elem_bytes));
          std::copy(element.begin(), element.end(), expected.begin() + to);
          sum += fingerprint(key, static_cast<std::uint64_t>(in_tensor), element);
        });
        std::vector<std::byte> packed(bytes, std::byte{0xee});
        const CellSource source{key, sample.elem_bytes, sample.shape, &sample.box, memory.data(), sample.strides};
        const FingerprintSum packed_sum = packer.pack(source, packed.data());
        EXPECT_EQ(packed, expected) << to_string(sample.box) << " strides " << to_string(sample.strides);
        EXPECT_EQ(packed_sum, fingerprints ? sum : FingerprintSum{}) << to_string(sample.box);
        if (readable_in_place(source)) {
          EXPECT_EQ(packer.sum(source), packed_sum) << to_string(sample.box);
        }
      }
    }
  }
}

TEST(Packer, ReadsInPlaceOnlyWhatHasNeighboursAndNoRepeats) {
  const auto readable = [](Shape shape, std::vector<std::int64_t> strides) {
    const Box box = Box::whole(shape);
    return readable_in_place({{}, 4, shape, &box, nullptr, strides});
  };
  EXPECT_TRUE(readable({6, 8}, {32, 4}));
  EXPECT_TRUE(readable({6, 8}, {64, 4}));
  EXPECT_TRUE(readable({6, 1}, {4, 999}));
  EXPECT_TRUE(readable({}, {}));
  EXPECT_FALSE(readable({6, 8}, {4, 24}));
  EXPECT_FALSE(readable({6, 8}, {0, 4}));
  EXPECT_FALSE(readable({6, 1}, {64, 4}));
}

}  // namespace
}  // namespace headrace
