#include "benchmarks/v41_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <string_view>
#include <utility>

#include "core/checkpoint/json.h"

namespace headrace::bench {
namespace {

std::string below(std::initializer_list<std::int64_t> layers, std::int64_t end) {
  std::vector<std::int64_t> kept;
  std::copy_if(layers.begin(), layers.end(), std::back_inserter(kept), [&](std::int64_t layer) { return layer < end; });
  return fmt::format("{}", fmt::join(kept, ","));
}

std::string config_json(const V41Sizes& sizes) {
  std::vector<int> ratios;
  for (std::int64_t l = 0; l < sizes.layers; ++l) ratios.push_back(l < 2 ? 0 : l < 20 ? 2 : 1);
  return fmt::format(
      R"({{"model_type":"deepseek_v41","text_config":{{"hidden_size":5120,"num_hidden_layers":{layers},"moe_intermediate_size":2304,
      "n_routed_experts":{experts},"num_experts_per_tok":6,"n_shared_experts":1,"num_attention_heads":64,"head_dim":512,
      "q_lora_rank":1280,"o_lora_rank":1024,"o_groups":8,"index_n_heads":32,"index_head_dim":128,"hc_mult":4,"vocab_size":{vocab},
      "compress_ratios":[{ratios}],"kv_source_layer_ids":[{kv}],"index_source_layer_ids":[{index}],"engram_layer_ids":[{engram}],
      "engram_max_ngram_size":4,"engram_n_heads":8,"engram_head_dim":256}},
      "quantization_config":{{"weight_block_size":[32,32],"expert_dtype":"fp4"}}}})",
      fmt::arg("layers", sizes.layers), fmt::arg("experts", sizes.experts), fmt::arg("vocab", sizes.vocab),
      fmt::arg("ratios", fmt::join(ratios, ",")), fmt::arg("kv", below({2, 8, 14, 20}, sizes.layers)),
      fmt::arg("index", below({2, 8, 14, 20, 24, 28, 32, 36}, sizes.layers)), fmt::arg("engram", below({1, 14}, sizes.layers)));
}

wire::ManifestEntry whole(std::string name, Dtype dtype, const Shape& shape) {
  return {std::move(name), dtype, shape, Box::whole(shape)};
}

void add_vision(std::vector<wire::ManifestEntry>& out) {
  const auto add = [&](std::string name, const Shape& shape) { out.push_back(whole(std::move(name), Dtype::kBF16, shape)); };
  for (int b = 0; b < 32; ++b) {
    const std::string block = fmt::format("vision.blocks.{}.", b);
    add(block + "attn.wqkv.weight", {3072, 1024});
    add(block + "attn.wqkv.bias", {3072});
    add(block + "attn.wo.weight", {1024, 1024});
    add(block + "attn.wo.bias", {1024});
    add(block + "mlp.w1.weight", {5632, 1024});
    add(block + "mlp.w2.weight", {1024, 2816});
    add(block + "norm1.weight", {1024});
    add(block + "norm2.weight", {1024});
  }
  add("vision.norm.weight", {1024});
  add("vision.patch_embed.proj.weight", {1024, 588});
  add("vision.patch_embed.proj.bias", {1024});
  add("aligner.w1.weight", {5120, 9216});
  add("aligner.w1.bias", {5120});
  add("aligner.w2.weight", {5120, 5120});
  add("aligner.w2.bias", {5120});
  for (const std::string_view name : {"image_start", "image_end", "image_newline"}) add(std::string(name), {5120});
}

/// "layers.3." of "layers.3.attn.wq_a.weight"; empty for what belongs to no layer.
std::string_view layer_of(std::string_view name) {
  if (!name.starts_with("layers.")) return {};
  return name.substr(0, name.find('.', 7) + 1);
}

void add_experts(std::vector<wire::ManifestEntry>& out, std::span<const ExpertRule* const> rules, std::int64_t experts,
                 std::int64_t trainer_ranks) {
  constexpr std::array<std::string_view, 3> kEmitted{"w1", "w3", "w2"};
  const std::int64_t slots = experts / trainer_ranks;
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    for (const std::string_view shard : kEmitted) {
      for (std::int64_t r = 0; r < trainer_ranks; ++r) {
        for (const ExpertRule* rule : rules) {
          if (rule->rule.shard != shard) continue;
          out.push_back(
              whole(fmt::format("{}{}.{}", rule->prefix, r * slots + slot, rule->suffix), rule->rule.dtypes.front(), rule->rule.shape));
        }
      }
    }
  }
}

}  // namespace

ModelLayout v41_layout(const V41Sizes& sizes, std::int32_t ranks, std::int32_t rank) {
  const JsonValue config = parse_json(config_json(sizes)).value_or_throw();
  ModelRequest request;
  request.family = "deepseek_v4";
  request.parallel.ep = ranks;
  request.rank = rank;
  return build_model(request, &config, {}).value_or_throw();
}

ModelLayout experts_only(ModelLayout layout) {
  std::vector<StorageSpec> kept;
  std::map<std::uint32_t, std::uint32_t> moved;  // old index to new
  for (ExpertRule& expert : layout.expert_rules) {
    for (Placement& placement : expert.rule.placements) {
      const auto [entry, added] = moved.try_emplace(placement.storage, static_cast<std::uint32_t>(kept.size()));
      if (added) kept.push_back(layout.storages[placement.storage]);
      placement.storage = entry->second;
    }
  }
  layout.storages = std::move(kept);
  layout.named.clear();
  layout.constants.clear();
  return layout;
}

namespace {

/// A storage of its own for each tensor of bytes, as it is.
void add_flat(ModelLayout& layout, const std::string& name, const Shape& shape) {
  const std::int64_t bytes = byte_count(Dtype::kU8, shape).value_or(0);
  TensorRule rule;
  rule.param = name;
  rule.dtypes = {Dtype::kU8};
  rule.shape = shape;
  rule.placements.push_back(
      {.storage = static_cast<std::uint32_t>(layout.storages.size()), .box = Box::whole(shape), .copy = StridedCopy::flat(0, 0, bytes)});
  layout.storages.push_back({.name = name, .dtype = Dtype::kU8, .shape = shape, .strides = {}, .bytes = bytes});
  layout.named.push_back({name, std::move(rule)});
}

ModelLayout empty_layout() {
  ModelLayout layout;
  layout.family = "bench";
  layout.variant = "plain";
  return layout;
}

}  // namespace

ModelLayout tiny_layout(std::int64_t count) {
  constexpr std::int64_t kBytes = 4096;
  ModelLayout layout = empty_layout();
  for (std::int64_t i = 0; i < count; ++i) add_flat(layout, fmt::format("tensor.{}", i), {kBytes});
  return layout;
}

ModelLayout flat_experts_layout(std::int64_t count) {
  constexpr std::int64_t kHidden = 5120;
  constexpr std::int64_t kIntermediate = 2304;
  ModelLayout layout = empty_layout();
  for (std::int64_t e = 0; e < count; ++e) {
    for (const std::string_view shard : {"w1", "w3", "w2"}) {
      const auto [rows, columns] = shard == "w2" ? std::pair(kHidden, kIntermediate) : std::pair(kIntermediate, kHidden);
      add_flat(layout, fmt::format("expert.{}.{}.weight", e, shard), {rows, columns / 2});
      add_flat(layout, fmt::format("expert.{}.{}.scale", e, shard), {rows, columns / 32});
    }
  }
  return layout;
}

std::vector<wire::ManifestEntry> sender_order(const ModelLayout& layout, std::int64_t trainer_ranks, bool vision) {
  std::map<std::string_view, std::vector<const ExpertRule*>> experts;
  for (const ExpertRule& rule : layout.expert_rules) experts[layer_of(rule.prefix)].push_back(&rule);
  std::vector<std::string_view> layers;  // in order
  std::map<std::string_view, std::vector<const NamedRule*>> named;
  for (const NamedRule& rule : layout.named) named[layer_of(rule.name)].push_back(&rule);
  for (const ExpertRule& rule : layout.expert_rules)
    if (layers.empty() || layers.back() != layer_of(rule.prefix)) layers.push_back(layer_of(rule.prefix));
  std::vector<wire::ManifestEntry> out;
  const auto add_named = [&](std::string_view layer) {
    for (const NamedRule* rule : named[layer]) out.push_back(whole(rule->name, rule->rule.dtypes.front(), rule->rule.shape));
  };
  add_named({});
  if (vision) add_vision(out);
  for (const std::string_view layer : layers) {
    add_named(layer);
    const std::vector<const ExpertRule*>& rules = experts[layer];
    add_experts(out, rules, layout.experts[rules.front()->map].experts(), trainer_ranks);
  }
  return out;
}

std::int64_t entry_bytes(const wire::ManifestEntry& entry) {
  return byte_count(entry.dtype, entry.shape).value_or(0);
}

std::int64_t total_bytes(std::span<const wire::ManifestEntry> entries) {
  std::int64_t total = 0;
  for (const wire::ManifestEntry& entry : entries) total += entry_bytes(entry);
  return total;
}

}  // namespace headrace::bench
