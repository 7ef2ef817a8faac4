#include <gtest/gtest.h>

#include "core/base/worker_pool.h"
#include "kernels/executor.h"
#include "kernels/fingerprint.h"
#include "kernels/strided_copy.h"
#include "tests/kernels/megamoe_nests.h"
#include "tests/kernels/naive_copy.h"

namespace headrace {
namespace {

using megamoe::kParts;
using megamoe::Part;
using naive::Bytes;

constexpr std::int64_t kSlots = 3;

TEST(MegaMoeLayout, NestsPutEveryByteWhereTheFormulasSay) {
  WorkerPool pool(2);
  HostExecutor executor(pool);
  for (const megamoe::Shape& shape : megamoe::small_shapes()) {
    for (const Part part : kParts) {
      const megamoe::Matrix source = megamoe::source_of(shape, part);
      for (std::int64_t slot = 0; slot < kSlots; ++slot) {
        SCOPED_TRACE(shape.name + " part " + std::to_string(static_cast<int>(part)) + " slot " + std::to_string(slot));
        const Bytes src = naive::random_bytes(source.bytes(), static_cast<std::uint64_t>(slot) + 7);
        Bytes expected(static_cast<std::size_t>(kSlots * megamoe::slot_bytes(shape, part)));
        Bytes actual = expected;
        for (std::int64_t row = 0; row < source.rows; ++row) {
          for (std::int64_t column = 0; column < source.row_bytes; ++column) {
            expected.at(static_cast<std::size_t>(megamoe::byte_address(shape, part, slot, row, column))) =
                src[static_cast<std::size_t>(row * source.row_bytes + column)];
          }
        }
        const StridedCopy copy = megamoe::nest(shape, part, slot);
        ASSERT_TRUE(validate(copy, source.bytes(), static_cast<std::int64_t>(actual.size())).ok());
        executor.run({{CopyJob{copy, src.data(), actual.data()}}});
        EXPECT_EQ(actual, expected);
        const TensorKey key =
            tensor_key("layers.0.ffn.experts.0.w1.weight", Dtype::kI8, std::vector<std::int64_t>{source.rows, source.row_bytes});
        EXPECT_EQ(fingerprint_nest(key, copy, expected.data()), fingerprint(key, 0, src));
      }
    }
  }
}

TEST(MegaMoeLayout, ARunOfExpertsIsOneNestThroughTheSlotTable) {
  const megamoe::Shape shape = megamoe::small_shapes()[2];
  WorkerPool pool(2);
  HostExecutor executor(pool, 1 << 10);
  for (const Part part : kParts) {
    const megamoe::Matrix source = megamoe::source_of(shape, part);
    const std::vector<std::int32_t> slots{4, 0, 3};
    StridedCopy copy = megamoe::nest(shape, part, 0);
    for (std::size_t j = copy.dim_count; j > 0; --j) copy.dims[j] = copy.dims[j - 1];
    copy.dims[0] = {3, source.bytes(), megamoe::slot_bytes(shape, part)};
    ++copy.dim_count;
    copy.indexed_dim = 0;
    copy.slots = std::make_shared<const std::vector<std::int32_t>>(slots);
    const Bytes src = naive::random_bytes(3 * source.bytes(), 3);
    Bytes expected(static_cast<std::size_t>(5 * megamoe::slot_bytes(shape, part)));
    Bytes actual = expected;
    for (std::size_t e = 0; e < 3; ++e) {
      StridedCopy one = megamoe::nest(shape, part, slots[e]);
      one.src_offset = static_cast<std::int64_t>(e) * source.bytes();
      naive::move(one, src, expected);
    }
    executor.run({{CopyJob{copy, src.data(), actual.data()}}});
    EXPECT_EQ(actual, expected);
    const TensorKey key{99};
    EXPECT_EQ(fingerprint_nest(key, copy, actual.data()), fingerprint(key, 0, src));
  }
}

std::vector<LayoutPart> slot_parts(const megamoe::Shape& shape, std::vector<Part> sources) {
  std::vector<LayoutPart> parts;
  for (const Part part : sources) parts.push_back({megamoe::nest(shape, part, 0), false});
  for (const StridedCopy& pad : megamoe::padding(shape, sources[0])) parts.push_back({pad, true});
  return parts;
}

const std::vector<std::vector<Part>> kTensors{{Part::kW1, Part::kW3}, {Part::kW1Scale, Part::kW3Scale}, {Part::kW2}, {Part::kW2Scale}};

TEST(MegaMoeLayout, FillsEverySlotExactlyOnce) {
  for (const megamoe::Shape& shape : megamoe::model_shapes()) {
    for (const std::vector<Part>& tensor : kTensors) {
      const std::int64_t bytes = megamoe::slot_bytes(shape, tensor[0]);
      const Status proof = prove_layout(slot_parts(shape, tensor), bytes, 96, bytes, 96 * bytes);
      EXPECT_TRUE(proof.ok()) << shape.name << ": " << proof.to_string();
    }
  }
}

TEST(MegaMoeLayout, ProofFindsOneByteMissing) {
  for (const megamoe::Shape& shape : megamoe::model_shapes()) {
    for (const std::vector<Part>& tensor : kTensors) {
      const std::int64_t bytes = megamoe::slot_bytes(shape, tensor[0]);
      std::vector<LayoutPart> parts = slot_parts(shape, tensor);
      StridedCopy& last = parts.back().copy;
      last.run_bytes -= 1;
      const Status proof = prove_layout(parts, bytes, 96, bytes, 96 * bytes);
      EXPECT_EQ(proof.code(), Code::kInvalidArgument);
      EXPECT_NE(proof.message().find("is never written"), std::string::npos) << proof.message();
    }
  }
}

TEST(MegaMoeLayout, ProofFindsOneByteWrittenTwice) {
  for (const megamoe::Shape& shape : megamoe::model_shapes()) {
    for (const std::vector<Part>& tensor : kTensors) {
      const std::int64_t bytes = megamoe::slot_bytes(shape, tensor[0]);
      std::vector<LayoutPart> parts = slot_parts(shape, tensor);
      parts.push_back({StridedCopy::flat(0, bytes / 2 + 1, 1), false});
      const Status proof = prove_layout(parts, bytes, 96, bytes, 96 * bytes);
      EXPECT_EQ(proof.code(), Code::kInvalidArgument);
      EXPECT_NE(proof.message().find("byte " + std::to_string(bytes / 2 + 1) + " of the slot is written twice"), std::string::npos)
          << proof.message();
    }
  }
}

TEST(MegaMoeLayout, ProofRefusesSlotsThatDoNotFillTheStorage) {
  const megamoe::Shape shape = megamoe::model_shapes()[4];
  const std::int64_t bytes = megamoe::slot_bytes(shape, Part::kW2);
  const std::vector<LayoutPart> parts = slot_parts(shape, {Part::kW2});
  EXPECT_EQ(prove_layout(parts, bytes, 4, bytes, 4 * bytes + 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(prove_layout(parts, bytes, 4, bytes + 64, 4 * bytes + 192).code(), Code::kInvalidArgument);
  EXPECT_EQ(prove_layout(parts, bytes - 1, 1, bytes - 1, bytes - 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(prove_layout(parts, 0, 1, 0, 0).code(), Code::kInvalidArgument);
  // An intermediate size that is no multiple of 128 leaves words of the scale unwritten.
  const megamoe::Shape odd{"I 320", 256, 320, 512};
  const std::int64_t scale_bytes = megamoe::slot_bytes(odd, Part::kW2Scale);
  EXPECT_FALSE(prove_layout(slot_parts(odd, {Part::kW2Scale}), scale_bytes, 1, scale_bytes, scale_bytes).ok());
}

}  // namespace
}  // namespace headrace
