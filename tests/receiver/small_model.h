#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/strided_copy.h"
#include "receiver/models/family.h"

// A model small enough to check by eye: one plain tensor, one tensor sharded by rows, four experts of which two live here.
namespace headrace::small_model {

inline constexpr std::uint32_t kPad = 0xEEEEEEEE;

/// Rank 0 of 2: experts 0 and 1 in slots 0 and 1; rows [0, 3) of "rows.weight".
inline ModelLayout layout() {
  ModelLayout model;
  model.family = "small";
  model.variant = "plain";
  model.parallel = ParallelLayout{1, 2};
  model.experts = {ExpertMap::initial(4, 0, 0, 2).value()};
  model.storages.push_back({.name = "plain", .dtype = Dtype::kBF16, .shape = {6, 8}, .strides = {}, .bytes = 96});
  model.storages.push_back({.name = "rows", .dtype = Dtype::kU8, .shape = {3, 4}, .strides = {}, .bytes = 12});
  model.storages.push_back({.name = "experts", .dtype = Dtype::kU8, .shape = {2, 4, 8}, .strides = {}, .bytes = 64});

  const auto rule = [](std::string param, Dtype dtype, Shape shape, Placement placement) {
    TensorRule row;
    row.param = std::move(param);
    row.dtypes = {dtype};
    row.shape = std::move(shape);
    row.placements.push_back(std::move(placement));
    return row;
  };
  model.named.push_back({"a.weight", rule("plain", Dtype::kBF16, {6, 8}, {0, Box{{0, 0}, {6, 8}}, StridedCopy::flat(0, 0, 96), 0})});
  model.named.push_back({"rows.weight", rule("rows", Dtype::kU8, {6, 4}, {1, Box{{0, 0}, {3, 4}}, StridedCopy::flat(0, 0, 12), 0})});
  // Row i of an expert's [4, 4] bytes stands at 8i of its slot of 32; the other four bytes of each row are padding.
  const CopyDim rows{4, 4, 8};
  model.expert_rules.push_back({"layers.0.ffn.experts.", "w1.weight",
                                rule("experts", Dtype::kI8, {4, 4}, {2, Box{{0, 0}, {4, 4}}, StridedCopy::make(0, 0, 4, {&rows, 1}), 32})});
  const CopyDim pads{8, 0, 8};
  model.constants.push_back({2, StridedCopy::make(0, 4, 4, {&pads, 1}), kPad});
  return model;
}

/// Any bytes, different for each seed.
inline std::vector<std::byte> bytes(std::size_t count, std::uint32_t seed) {
  std::vector<std::byte> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::byte>((i * 37 + seed * 101 + 11) % 251);
  return data;
}

}  // namespace headrace::small_model
