#include <gtest/gtest.h>

#include "receiver/models/family.h"
#include "receiver/weight_index.h"

namespace headrace {
namespace {

CheckpointTensor tensor(std::string name, Dtype dtype, Shape shape) {
  CheckpointTensor t;
  t.name = std::move(name);
  t.dtype = dtype;
  t.shape = std::move(shape);
  return t;
}

const std::vector<std::string> kTarget{"target"};

TEST(Dense, GivesEachTensorAStorageOfItsName) {
  const std::vector<CheckpointTensor> tensors{tensor("encoder.weight", Dtype::kF32, {3, 5}), tensor("step", Dtype::kI64, {})};
  const ModelLayout layout = build_dense({}, nullptr, tensors).value_or_throw();
  ASSERT_EQ(layout.storages.size(), 2U);
  EXPECT_EQ(layout.storages[0].name, "encoder.weight");
  EXPECT_EQ(layout.storages[0].dtype, Dtype::kF32);
  EXPECT_EQ(layout.storages[0].shape, (Shape{3, 5}));
  EXPECT_EQ(layout.storages[0].bytes, 60);
  EXPECT_EQ(layout.storages[1].bytes, 8);
  ASSERT_EQ(layout.named.size(), 2U);
  EXPECT_EQ(layout.named[0].rule.placements.at(0).copy, StridedCopy::flat(0, 0, 60));
  EXPECT_TRUE(layout.experts.empty());
}

TEST(Dense, ResolvesItsNamesAndNoOthers) {
  const std::vector<CheckpointTensor> tensors{tensor("layers.0.ffn.experts.1.w1.weight", Dtype::kF32, {4}), tensor("b", Dtype::kF32, {4})};
  const WeightIndex index(build_dense({}, nullptr, tensors).value_or_throw());
  const Resolution found = index.resolve("layers.0.ffn.experts.1.w1.weight");
  EXPECT_EQ(found.kind, Resolution::Kind::kPlaced);
  EXPECT_EQ(found.rule, 0U);
  EXPECT_EQ(found.expert, -1);
  ASSERT_EQ(found.slots.size(), 1U);
  EXPECT_EQ(found.slots[0], 0);
  EXPECT_EQ(index.resolve("layers.0.ffn.experts.2.w1.weight").kind, Resolution::Kind::kUnknown);
  EXPECT_EQ(index.resolve("").kind, Resolution::Kind::kUnknown);
}

TEST(Dense, KnowsATensorWithoutElementsButAsksForNone) {
  const std::vector<CheckpointTensor> tensors{tensor("a", Dtype::kF32, {4}), tensor("empty", Dtype::kF32, {0, 8})};
  ModelLayout layout = build_dense({}, nullptr, tensors).value_or_throw();
  EXPECT_EQ(layout.storages.size(), 1U);
  const WeightIndex index(std::move(layout));
  const Resolution found = index.resolve("empty");
  EXPECT_EQ(found.kind, Resolution::Kind::kPlaced);
  EXPECT_TRUE(index.rule(found.rule).placements.empty());
  EXPECT_EQ(index.rule(found.rule).shape, (Shape{0, 8}));
  const auto needed = index.needed(kTarget);
  ASSERT_EQ(needed.size(), 1U);
  EXPECT_EQ(needed[0].name, "a");
}

TEST(Dense, RefusesWhatItCannotHold) {
  const std::vector<CheckpointTensor> twice{tensor("a", Dtype::kF32, {4}), tensor("a", Dtype::kF32, {4})};
  EXPECT_NE(build_dense({}, nullptr, twice).status().message().find("a is there twice"), std::string::npos);
  const std::vector<CheckpointTensor> half{tensor("a", Dtype::kF4, {3})};
  EXPECT_EQ(build_dense({}, nullptr, half).status().code(), Code::kInvalidArgument);
  const std::vector<CheckpointTensor> halves{tensor("a", Dtype::kF4, {4})};
  EXPECT_EQ(build_dense({}, nullptr, halves).status().code(), Code::kUnsupported);
  const std::vector<CheckpointTensor> nothing{tensor("a", Dtype::kF32, {0})};
  EXPECT_FALSE(build_dense({}, nullptr, nothing).ok());
  EXPECT_FALSE(build_dense({}, nullptr, {}).ok());
}

TEST(Dense, HasOneRankAndOneVariant) {
  const std::vector<CheckpointTensor> tensors{tensor("a", Dtype::kF32, {4})};
  ModelRequest request;
  request.parallel.ep = 2;
  EXPECT_EQ(build_dense(request, nullptr, tensors).status().code(), Code::kUnsupported);
  request = {};
  request.variant = "padded";
  EXPECT_EQ(build_dense(request, nullptr, tensors).status().code(), Code::kUnsupported);
  request = {};
  request.rank = 1;
  EXPECT_EQ(build_dense(request, nullptr, tensors).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace headrace
