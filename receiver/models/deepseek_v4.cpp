#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "receiver/models/deepseek_v4_config.h"
#include "receiver/models/deepseek_v4_names.h"
#include "receiver/models/family.h"

namespace headrace {
namespace {

constexpr std::string_view kScaleSuffix = ".scale";

bool holds(const std::vector<std::int64_t>& list, std::int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// One part of a stacked parameter.
struct StackedPart {
  std::string name;  // checkpoint name without its leaf
  std::int64_t rows = 0;
};

/// Writes down the storages, rules and constants of one rank. The first failure sticks.
class LayoutBuilder {
 public:
  LayoutBuilder(const DeepseekV4Config& config, const ModelRequest& request, const ExpertMap& experts)
      : c_(config),
        naming_{.experts = static_cast<std::int32_t>(config.experts), .linear_scale = config.linear_scale, .hc_head = !config.v41},
        padded_(request.variant == "padded" ? (config.intermediate + 511) / 512 * 512 : config.intermediate) {
    layout_.family = "deepseek_v4";
    layout_.variant = request.variant;
    layout_.parallel = request.parallel;
    layout_.rank = request.rank;
    layout_.experts.assign(static_cast<std::size_t>(c_.layers), experts);
  }

  Result<ModelLayout> build() {
    check_divisions();
    if (!status_.ok()) return status_;
    top();
    for (std::int64_t l = 0; l < c_.layers; ++l) {
      attention(l);
      if (c_.v41) {
        sparse_attention_v41(l);
        engram(l);
      } else {
        sparse_attention_v4(l);
      }
      router(l);
      shared_experts(l);
      hyper_connections(l);
      experts(l);
    }
    if (!status_.ok()) return status_;
    std::unordered_set<std::string> params(tables_.begin(), tables_.end());
    for (const StorageSpec& storage : layout_.storages) params.insert(storage.name);
    layout_.scan = deepseek_v4_scan(naming_, std::move(params), std::move(tables_));
    return std::move(layout_);
  }

 private:
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  /// size / by, refused when it leaves a rest: scales of a part that does not fill its group would stay unwritten without a word.
  std::int64_t divide(std::int64_t size, std::int64_t by, std::string_view what) {
    if (size % by != 0) {
      fail(Status(Code::kInvalidArgument,
                  fmt::format("layout of deepseek_v4: {} {} does not divide by {}: rest {}", what, size, by, size % by)));
    }
    return size / by;
  }
  void check_divisions() {
    divide(c_.intermediate, 128, "moe_intermediate_size");
    divide(c_.hidden, 128, "hidden_size");
    divide(padded_, 128, "padded moe_intermediate_size");
    divide(c_.heads * c_.head_dim, c_.o_groups, "num_attention_heads * head_dim");
  }

  std::uint32_t storage(std::string name, Dtype dtype, Shape shape, std::vector<std::int64_t> strides = {}) {
    const auto bytes = byte_count(dtype, shape);
    if (!bytes) fail(Status(Code::kInvalidArgument, fmt::format("layout of deepseek_v4: {} {} is too large", name, to_string(shape))));
    layout_.storages.push_back(
        {.name = std::move(name), .dtype = dtype, .shape = std::move(shape), .strides = std::move(strides), .bytes = bytes.value_or(0)});
    return static_cast<std::uint32_t>(layout_.storages.size() - 1);
  }
  std::string param_of(std::string_view checkpoint_name) const { return map_deepseek_v4_name(naming_, checkpoint_name).name; }

  /// A tensor that fills `dst` from byte `dst_offset` on, unchanged.
  void flat_rule(std::string name, std::string_view shard, std::vector<Dtype> dtypes, Shape shape, std::uint32_t dst,
                 std::int64_t dst_offset) {
    const std::int64_t bytes = byte_count(dtypes.front(), shape).value_or(0);
    NamedRule named{.name = std::move(name), .rule = {}};
    named.rule.param = layout_.storages[dst].name;
    named.rule.shard = shard;
    named.rule.dtypes = std::move(dtypes);
    named.rule.placements.push_back({.storage = dst, .box = Box::whole(shape), .copy = StridedCopy::flat(0, dst_offset, bytes)});
    named.rule.shape = std::move(shape);
    layout_.named.push_back(std::move(named));
  }
  void tensor(const std::string& name, Dtype dtype, Shape shape) {
    const std::uint32_t dst = storage(param_of(name), dtype, shape);
    flat_rule(name, "", {dtype}, std::move(shape), dst, 0);
  }
  /// E8M0 scales live as bytes: a numeric conversion would destroy them.
  void linear(const std::string& name, std::int64_t rows, std::int64_t columns) {
    tensor(name + ".weight", Dtype::kF8E4M3, {rows, columns});
    const Shape shape{divide(rows, c_.block, name + " rows"), divide(columns, c_.block, name + " columns")};
    const std::string scale = name + std::string(kScaleSuffix);
    const std::uint32_t dst = storage(param_of(scale), Dtype::kU8, shape);
    flat_rule(scale, "", {Dtype::kF8E8M0, Dtype::kU8}, shape, dst, 0);
  }
  /// Parts stacked by rows into one parameter, e.g. fused_wqa_wkv rows = [q_lora | head_dim].
  void stacked(std::string param, std::string_view leaf, const std::vector<Dtype>& dtypes, Dtype stored, std::span<const StackedPart> parts,
               std::int64_t columns) {
    std::int64_t rows = 0;
    for (const StackedPart& part : parts) rows += part.rows;
    const std::uint32_t dst = storage(std::move(param), stored, {rows, columns});
    const std::int64_t row_bytes = columns * dtype_bytes(stored);
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      flat_rule(parts[i].name + std::string(leaf), i == 0 ? "0" : "1", dtypes, {parts[i].rows, columns}, dst, offset);
      offset += parts[i].rows * row_bytes;
    }
  }
  void stacked_linear(const std::string& param, std::vector<StackedPart> parts, std::int64_t columns) {
    stacked(param + ".weight", ".weight", {Dtype::kF8E4M3}, Dtype::kF8E4M3, parts, columns);
    for (StackedPart& part : parts) part.rows = divide(part.rows, c_.block, part.name + " rows");
    stacked(param + "." + c_.linear_scale, kScaleSuffix, {Dtype::kF8E8M0, Dtype::kU8}, Dtype::kU8, parts,
            divide(columns, c_.block, param + " columns"));
  }

  void top() {
    tensor("embed.weight", Dtype::kBF16, {c_.vocab, c_.hidden});
    tensor("head.weight", Dtype::kBF16, {c_.vocab, c_.hidden});
    tensor("norm.weight", Dtype::kBF16, {c_.hidden});
    if (c_.v41) return;
    tensor("hc_head_fn", Dtype::kF32, {c_.hc_mult, c_.hc_mult * c_.hidden});
    tensor("hc_head_base", Dtype::kF32, {c_.hc_mult});
    tensor("hc_head_scale", Dtype::kF32, {1});
  }

  void attention(std::int64_t l) {
    const std::string layer = fmt::format("layers.{}.", l);
    const std::string attn = layer + "attn.";
    stacked_linear("model." + attn + "fused_wqa_wkv", {{attn + "wq_a", c_.q_lora}, {attn + "wkv", c_.head_dim}}, c_.hidden);
    linear(attn + "wq_b", c_.heads * c_.head_dim, c_.q_lora);
    linear(attn + "wo_a", c_.o_groups * c_.o_lora, c_.heads * c_.head_dim / c_.o_groups);
    linear(attn + "wo_b", c_.hidden, c_.o_groups * c_.o_lora);
    tensor(attn + "q_norm.weight", Dtype::kBF16, {c_.q_lora});
    tensor(attn + "kv_norm.weight", Dtype::kBF16, {c_.head_dim});
    tensor(attn + "attn_sink", Dtype::kF32, {c_.heads});
    tensor(layer + "attn_norm.weight", Dtype::kBF16, {c_.hidden});
    tensor(layer + "ffn_norm.weight", Dtype::kBF16, {c_.hidden});
  }

  /// `gated` compressors have a second matrix of the same shape.
  void compressor(const std::string& name, std::int64_t rows, std::int64_t norm, bool gated) {
    std::vector<StackedPart> parts{{name + ".wkv", rows}};
    if (gated) parts.push_back({name + ".wgate", rows});
    stacked("model." + name + ".fused_wkv_wgate.weight", ".weight", {Dtype::kBF16}, Dtype::kBF16, parts, c_.hidden);
    tensor(name + ".norm.weight", Dtype::kBF16, {norm});
  }
  void indexer_query(const std::string& name) {
    linear(name + ".wq_b", c_.index_heads * c_.index_dim, c_.q_lora);
    tensor(name + ".weights_proj.weight", Dtype::kBF16, {c_.index_heads, c_.hidden});
  }

  /// V4: every compressed layer has a compressor of its own; windows of 4 overlap (twice the rows) and are searched by an indexer.
  void sparse_attention_v4(std::int64_t l) {
    const std::int64_t ratio = c_.compress_ratios[static_cast<std::size_t>(l)];
    if (ratio == 0) return;
    const std::string attn = fmt::format("layers.{}.attn.", l);
    const std::int64_t overlap = ratio == 4 ? 2 : 1;
    compressor(attn + "compressor", overlap * c_.head_dim, c_.head_dim, true);
    tensor(attn + "compressor.ape", Dtype::kF32, {ratio, overlap * c_.head_dim});
    if (ratio != 4) return;
    indexer_query(attn + "indexer");
    compressor(attn + "indexer.compressor", overlap * c_.index_dim, c_.index_dim, true);
    tensor(attn + "indexer.compressor.ape", Dtype::kF32, {ratio, overlap * c_.index_dim});
  }

  /// V4.1: source layers compress (a ratio of 1 needs no gate) and search for the layers that follow them.
  void sparse_attention_v41(std::int64_t l) {
    const std::string attn = fmt::format("layers.{}.attn.", l);
    if (holds(c_.kv_sources, l)) {
      compressor(attn + "compressor", c_.head_dim, c_.head_dim, c_.compress_ratios[static_cast<std::size_t>(l)] > 1);
      tensor(attn + "indexer.wk.weight", Dtype::kBF16, {c_.index_dim, c_.head_dim});
      tensor(attn + "indexer.k_norm.weight", Dtype::kBF16, {c_.index_dim});
    }
    if (holds(c_.index_sources, l)) indexer_query(attn + "indexer");
  }

  void engram(std::int64_t l) {
    if (!holds(c_.engram_layers, l)) return;
    const std::string engram = fmt::format("layers.{}.engram.", l);
    // One key per residual stream and one value.
    linear(engram + "wkv", (c_.hc_mult + 1) * c_.hidden, c_.engram_width);
    tensor(engram + "q_weight", Dtype::kBF16, {c_.hc_mult, c_.hidden});
    tensor(engram + "k_weight", Dtype::kBF16, {c_.hc_mult, c_.hidden});
    // The tables themselves are host resident and no part of this layout; their names are known, so that the scan drops them.
    tables_.insert(param_of(engram + "embed.weight"));
    tables_.insert(param_of(engram + "embed.scale"));
  }

  void router(std::int64_t l) {
    const std::string gate = fmt::format("layers.{}.ffn.gate.", l);
    tensor(gate + "weight", Dtype::kBF16, {c_.experts, c_.hidden});
    if (l < c_.hash_layers) {
      tensor(gate + "tid2eid", Dtype::kI64, {c_.vocab, c_.experts_per_token});
      return;
    }
    tensor(gate + "bias", Dtype::kF32, {c_.experts});
    if (c_.v41) tensor(gate + "bias_vl", Dtype::kF32, {c_.experts});
  }

  void shared_experts(std::int64_t l) {
    const std::string shared = fmt::format("layers.{}.ffn.shared_experts.", l);
    const std::int64_t width = c_.shared_experts * c_.intermediate;
    stacked_linear("model." + shared + "gate_up_proj", {{shared + "w1", width}, {shared + "w3", width}}, c_.hidden);
    linear(shared + "w2", c_.hidden, width);
  }

  void hyper_connections(std::int64_t l) {
    const std::int64_t mixes = (2 + c_.hc_mult) * c_.hc_mult;
    for (const std::string_view part : {"attn", "ffn"}) {
      const std::string hc = fmt::format("layers.{}.hc_{}_", l, part);
      tensor(hc + "fn", Dtype::kF32, {mixes, c_.hc_mult * c_.hidden});
      tensor(hc + "base", Dtype::kF32, {mixes});
      tensor(hc + "scale", Dtype::kF32, {3});
    }
  }

  void experts(std::int64_t l) {
    const std::int64_t H = c_.hidden;
    const std::int64_t I = c_.intermediate;
    const std::int64_t P = padded_;
    const auto map = static_cast<std::uint32_t>(l);
    const std::int64_t slots = layout_.experts.front().local_slots();
    const std::string prefix = fmt::format("layers.{}.ffn.experts.", l);
    const std::string param = "model." + prefix;
    const std::uint32_t w13 = storage(param + "w13_weight", Dtype::kI8, {slots, 2 * P, H / 2});
    const std::uint32_t w13_scale =
        storage(param + "w13_weight_scale", Dtype::kI32, {slots, 2 * P, H / 128}, {2 * P * (H / 128), 1, 2 * P});
    const std::uint32_t w2 = storage(param + "w2_weight", Dtype::kI8, {slots, H, P / 2});
    const std::uint32_t w2_scale = storage(param + "w2_weight_scale", Dtype::kI32, {slots, H, P / 128}, {H * (P / 128), 1, H});

    for (const std::int64_t u : {0, 1}) {
      const std::string shard = u == 0 ? "w1" : "w3";
      expert_weight(map, prefix, shard, {I, H / 2}, w13, P * H, l1_weight(u));
      expert_scale(map, prefix, shard, {I, H / 32}, w13_scale, (H / 128) * 8 * P, l1_scale(u));
    }
    expert_weight(map, prefix, "w2", {H, I / 2}, w2, H * (P / 2), l2_weight());
    expert_scale(map, prefix, "w2", {H, I / 32}, w2_scale, (P / 128) * 4 * H, l2_scale());
    if (P != I) padding(w13, w13_scale, w2, w2_scale);
  }
  void expert_rule(std::uint32_t map, const std::string& prefix, const std::string& shard, std::string_view leaf, std::vector<Dtype> dtypes,
                   Shape shape, std::uint32_t dst, std::int64_t slot_stride, StridedCopy copy) {
    ExpertRule expert{.prefix = prefix, .suffix = shard + std::string(leaf), .rule = {}};
    expert.rule.param = layout_.storages[dst].name;
    expert.rule.shard = shard;
    expert.rule.dtypes = std::move(dtypes);
    expert.rule.placements.push_back({.storage = dst, .box = Box::whole(shape), .copy = std::move(copy), .slot_stride = slot_stride});
    expert.rule.shape = std::move(shape);
    expert.map = map;
    layout_.expert_rules.push_back(std::move(expert));
  }
  void expert_weight(std::uint32_t map, const std::string& prefix, const std::string& shard, Shape shape, std::uint32_t dst,
                     std::int64_t slot_stride, StridedCopy copy) {
    expert_rule(map, prefix, shard, ".weight", {Dtype::kI8, Dtype::kU8}, std::move(shape), dst, slot_stride, std::move(copy));
  }
  void expert_scale(std::uint32_t map, const std::string& prefix, const std::string& shard, Shape shape, std::uint32_t dst,
                    std::int64_t slot_stride, StridedCopy copy) {
    expert_rule(map, prefix, shard, kScaleSuffix, {Dtype::kF8E8M0, Dtype::kU8}, std::move(shape), dst, slot_stride, std::move(copy));
  }

  static StridedCopy nest(std::int64_t dst_offset, std::int64_t run_bytes, std::initializer_list<CopyDim> dims) {
    return StridedCopy::make(0, dst_offset, run_bytes, std::span(dims.begin(), dims.size()));
  }
  // The kernel's layout, u = 0 for w1 (gate) and 1 for w3 (up). Gate and up alternate by 8 rows; scales are 4 groups to a 32-bit word,
  // words column by column, rows permuted inside blocks of 128 (4 x 32 becomes 32 x 4).
  StridedCopy l1_weight(std::int64_t u) const {
    const std::int64_t row = c_.hidden / 2;
    return nest(8 * u * row, 8 * row, {{c_.intermediate / 8, 8 * row, 16 * row}});
  }
  StridedCopy l1_scale(std::int64_t u) const {
    const std::int64_t R = c_.hidden / 32;
    return nest(128 * u, 4,
                {{c_.intermediate / 64, 64 * R, 512}, {4, 16 * R, 4}, {2, 8 * R, 256}, {8, R, 16}, {c_.hidden / 128, 4, 8 * padded_}});
  }
  StridedCopy l2_weight() const { return nest(0, c_.intermediate / 2, {{c_.hidden, c_.intermediate / 2, padded_ / 2}}); }
  StridedCopy l2_scale() const {
    const std::int64_t R = c_.intermediate / 32;
    return nest(0, 4, {{c_.hidden / 128, 128 * R, 512}, {4, 32 * R, 4}, {32, R, 16}, {c_.intermediate / 128, 4, 4 * c_.hidden}});
  }

  /// Zeros behind the last row of both halves of L1 (8 divides I, so the pads of gate and up lie together) and the last column of L2.
  void padding(std::uint32_t w13, std::uint32_t w13_scale, std::uint32_t w2, std::uint32_t w2_scale) {
    const std::int64_t H = c_.hidden;
    const std::int64_t I = c_.intermediate;
    const std::int64_t P = padded_;
    const std::int64_t slots = layout_.experts.front().local_slots();
    const auto zeros = [&](std::uint32_t dst, StridedCopy copy) { layout_.constants.push_back({.storage = dst, .copy = std::move(copy)}); };
    zeros(w13, nest(I * H, (P - I) * H, {{slots, 0, P * H}}));
    zeros(w13_scale, nest(8 * I, 8 * (P - I), {{slots, 0, (H / 128) * 8 * P}, {H / 128, 0, 8 * P}}));
    zeros(w2, nest(I / 2, (P - I) / 2, {{slots, 0, H * (P / 2)}, {H, 0, P / 2}}));
    zeros(w2_scale, nest((I / 128) * 4 * H, (P - I) / 128 * 4 * H, {{slots, 0, (P / 128) * 4 * H}}));
  }

  const DeepseekV4Config& c_;
  DeepseekV4Naming naming_;
  std::int64_t padded_;  // P: rows of one half of L1 and columns of L2, as the kernel has them
  ModelLayout layout_;
  std::unordered_set<std::string> tables_;
  Status status_;
};

}  // namespace

Result<ModelLayout> build_deepseek_v4(const ModelRequest& request, const JsonValue& json) {
  const std::string what = fmt::format("layout {} of deepseek_v4", request.parallel.to_string());
  if (request.variant != "plain" && request.variant != "padded") {
    return Status(Code::kUnsupported, fmt::format("{}: variant {}, the family has plain and padded", what, request.variant));
  }
  if (request.parallel.tp != 1) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: dense tensors of this family are replicated, tp {} would cut them", what, request.parallel.tp));
  }
  if (request.rank < 0 || request.rank >= request.parallel.ranks()) {
    return Status(Code::kInvalidArgument, fmt::format("{}: rank {} of {}", what, request.rank, request.parallel.ranks()));
  }
  Result<DeepseekV4Config> config = read_deepseek_v4_config(json);
  if (!config.ok()) return config.status();
  Result<ExpertMap> experts = ExpertMap::initial(static_cast<std::int32_t>(config.value().experts), 0, request.rank, request.parallel.ep);
  if (!experts.ok()) return experts.status();
  return LayoutBuilder(config.value(), request, experts.value()).build();
}

}  // namespace headrace
