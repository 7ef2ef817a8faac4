#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/wire/messages.h"
#include "receiver/models/family.h"

namespace headrace::bench {

/// DeepSeek-V4.1 at its true widths (H = 5120, I = 2304), with as many layers, experts and token rows as a row has room for.
struct V41Sizes {
  std::int64_t layers = 40;
  std::int64_t experts = 384;
  std::int64_t vocab = 129'280;
};

/// The layout of one rank of `ranks` that share the experts.
ModelLayout v41_layout(const V41Sizes& sizes, std::int32_t ranks, std::int32_t rank);
/// The same without everything that is no expert.
ModelLayout experts_only(ModelLayout layout);
/// `count` tensors of 4 KiB, each with a storage of its own.
ModelLayout tiny_layout(std::int64_t count);
/// The tensors of `count` experts of true size, each with a storage of its own and no other form: what a loader without fused layouts has.
ModelLayout flat_experts_layout(std::int64_t count);

/// A layout's tensors as a trainer whose experts are spread over `trainer_ranks` emits them: what belongs to no layer first, then layer by
/// layer, inside of a layer what is no expert, then expert slot by slot: w1 of the slot on every trainer rank, w3, then w2, each a weight
/// and its scale. `vision`: with the names of the vision tower, which the engine's text model drops.
std::vector<wire::ManifestEntry> sender_order(const ModelLayout& layout, std::int64_t trainer_ranks, bool vision);

std::int64_t entry_bytes(const wire::ManifestEntry& entry);
std::int64_t total_bytes(std::span<const wire::ManifestEntry> entries);

}  // namespace headrace::bench
