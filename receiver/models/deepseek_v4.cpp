#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "receiver/models/deepseek_v4_config.h"
#include "receiver/models/deepseek_v4_experts.h"
#include "receiver/models/deepseek_v4_names.h"
#include "receiver/models/deepseek_v4_parts.h"
#include "receiver/models/family.h"

namespace headrace {
namespace {

constexpr std::string_view kFamily = "deepseek_v4";
constexpr std::array<std::string_view, 2> kWords{"plain", "padded"};

bool holds(const std::vector<std::int64_t>& list, std::int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}
bool holds(const std::vector<std::string>& list, std::string_view value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// Lists the tensors of the model, block by block. A block is named by the prefix of its checkpoint names, e.g. "layers.3.".
class LayoutBuilder {
 public:
  LayoutBuilder(const DeepseekV4Config& config, const ModelRequest& request, std::vector<std::string> words)
      : c_(config),
        request_(request),
        words_(std::move(words)),
        naming_{.experts = static_cast<std::int32_t>(config.experts), .linear_scale = config.linear_scale, .hc_head = !config.v41},
        writer_(std::string(kFamily), request),
        parts_(
            writer_, config, [this](std::string_view name) { return map_deepseek_v4_name(naming_, name).name; }, "target"),
        padded_(holds(words_, "padded") ? (config.intermediate + 511) / 512 * 512 : config.intermediate) {}

  Result<ModelLayout> build() {
    writer_.divide(c_.heads * c_.head_dim, c_.o_groups, "num_attention_heads * head_dim");
    if (!writer_.status().ok()) return writer_.status();
    top();
    for (std::int64_t l = 0; l < c_.layers && writer_.status().ok(); ++l) {
      const std::string block = fmt::format("layers.{}.", l);
      attention(parts_, block);
      if (c_.v41) {
        sparse_attention_v41(l, block);
        engram(l, block);
      } else {
        sparse_attention_v4(l, block);
      }
      router(parts_, block, c_.experts, l < c_.hash_layers);
      shared_experts(parts_, block);
      hyper_connections(parts_, block);
      routed_experts(parts_, block, c_.experts);
    }
    std::unordered_set<std::string> params(tables_.begin(), tables_.end());
    for (const StorageSpec& storage : writer_.layout().storages) params.insert(storage.name);
    writer_.layout().scan = deepseek_v4_scan(naming_, std::move(params), std::move(tables_));
    return std::move(writer_).finish();
  }

 private:
  using Parts = DeepseekV4Parts;

  void top() {
    parts_.tensor("embed.weight", Dtype::kBF16, {c_.vocab, c_.hidden});
    parts_.tensor("head.weight", Dtype::kBF16, {c_.vocab, c_.hidden});
    parts_.tensor("norm.weight", Dtype::kBF16, {c_.hidden});
    if (c_.v41) return;
    parts_.tensor("hc_head_fn", Dtype::kF32, {c_.hc_mult, c_.hc_mult * c_.hidden});
    parts_.tensor("hc_head_base", Dtype::kF32, {c_.hc_mult});
    parts_.tensor("hc_head_scale", Dtype::kF32, {1});
  }

  void attention(const Parts& parts, const std::string& block) {
    const std::string attn = block + "attn.";
    parts.stacked_linear(attn + "fused_wqa_wkv", {{attn + "wq_a", c_.q_lora}, {attn + "wkv", c_.head_dim}}, c_.hidden);
    parts.linear(attn + "wq_b", c_.heads * c_.head_dim, c_.q_lora);
    parts.linear(attn + "wo_a", c_.o_groups * c_.o_lora, c_.heads * c_.head_dim / c_.o_groups);
    parts.linear(attn + "wo_b", c_.hidden, c_.o_groups * c_.o_lora);
    parts.tensor(attn + "q_norm.weight", Dtype::kBF16, {c_.q_lora});
    parts.tensor(attn + "kv_norm.weight", Dtype::kBF16, {c_.head_dim});
    parts.tensor(attn + "attn_sink", Dtype::kF32, {c_.heads});
    parts.tensor(block + "attn_norm.weight", Dtype::kBF16, {c_.hidden});
    parts.tensor(block + "ffn_norm.weight", Dtype::kBF16, {c_.hidden});
  }

  /// `gated` compressors have a second matrix of the same shape.
  void compressor(const std::string& name, std::int64_t rows, std::int64_t norm, bool gated) {
    std::vector<Parts::Stacked> stack{{name + ".wkv", rows}};
    if (gated) stack.push_back({name + ".wgate", rows});
    parts_.stacked(name + ".fused_wkv_wgate", ".weight", {Dtype::kBF16}, Dtype::kBF16, stack, c_.hidden);
    parts_.tensor(name + ".norm.weight", Dtype::kBF16, {norm});
  }
  void indexer_query(const std::string& name) {
    parts_.linear(name + ".wq_b", c_.index_heads * c_.index_dim, c_.q_lora);
    parts_.tensor(name + ".weights_proj.weight", Dtype::kBF16, {c_.index_heads, c_.hidden});
  }

  /// V4: every compressed layer has a compressor of its own; windows of 4 overlap (twice the rows) and are searched by an indexer.
  void sparse_attention_v4(std::int64_t l, const std::string& block) {
    const std::int64_t ratio = c_.compress_ratios[static_cast<std::size_t>(l)];
    if (ratio == 0) return;
    const std::string attn = block + "attn.";
    const std::int64_t overlap = ratio == 4 ? 2 : 1;
    compressor(attn + "compressor", overlap * c_.head_dim, c_.head_dim, true);
    parts_.tensor(attn + "compressor.ape", Dtype::kF32, {ratio, overlap * c_.head_dim});
    if (ratio != 4) return;
    indexer_query(attn + "indexer");
    compressor(attn + "indexer.compressor", overlap * c_.index_dim, c_.index_dim, true);
    parts_.tensor(attn + "indexer.compressor.ape", Dtype::kF32, {ratio, overlap * c_.index_dim});
  }

  /// V4.1: source layers compress (a ratio of 1 needs no gate) and search for the layers that follow them.
  void sparse_attention_v41(std::int64_t l, const std::string& block) {
    const std::string attn = block + "attn.";
    if (holds(c_.kv_sources, l)) {
      compressor(attn + "compressor", c_.head_dim, c_.head_dim, c_.compress_ratios[static_cast<std::size_t>(l)] > 1);
      parts_.tensor(attn + "indexer.wk.weight", Dtype::kBF16, {c_.index_dim, c_.head_dim});
      parts_.tensor(attn + "indexer.k_norm.weight", Dtype::kBF16, {c_.index_dim});
    }
    if (holds(c_.index_sources, l)) indexer_query(attn + "indexer");
  }

  void engram(std::int64_t l, const std::string& block) {
    if (!holds(c_.engram_layers, l)) return;
    const std::string engram = block + "engram.";
    // One key per residual stream and one value.
    parts_.linear(engram + "wkv", (c_.hc_mult + 1) * c_.hidden, c_.engram_width);
    parts_.tensor(engram + "q_weight", Dtype::kBF16, {c_.hc_mult, c_.hidden});
    parts_.tensor(engram + "k_weight", Dtype::kBF16, {c_.hc_mult, c_.hidden});
    // The tables themselves are host resident and no part of this layout; their names are known, so that the scan drops them.
    tables_.insert(parts_.param_of(engram + "embed.weight"));
    tables_.insert(parts_.param_of(engram + "embed.scale"));
  }

  /// `hashed`: the layer routes by a table of token ids.
  void router(const Parts& parts, const std::string& block, std::int64_t experts, bool hashed) {
    const std::string gate = block + "ffn.gate.";
    parts.tensor(gate + "weight", Dtype::kBF16, {experts, c_.hidden});
    if (hashed) {
      parts.tensor(gate + "tid2eid", Dtype::kI64, {c_.vocab, c_.experts_per_token});
      return;
    }
    parts.tensor(gate + "bias", Dtype::kF32, {experts});
    if (c_.v41) parts.tensor(gate + "bias_vl", Dtype::kF32, {experts});
  }

  void shared_experts(const Parts& parts, const std::string& block) {
    const std::string shared = block + "ffn.shared_experts.";
    const std::int64_t width = c_.shared_experts * c_.intermediate;
    parts.stacked_linear(shared + "gate_up_proj", {{shared + "w1", width}, {shared + "w3", width}}, c_.hidden);
    parts.linear(shared + "w2", c_.hidden, width);
  }

  void hyper_connections(const Parts& parts, const std::string& block) {
    const std::int64_t mixes = (2 + c_.hc_mult) * c_.hc_mult;
    for (const std::string_view part : {"attn", "ffn"}) {
      const std::string hc = fmt::format("{}hc_{}_", block, part);
      parts.tensor(hc + "fn", Dtype::kF32, {mixes, c_.hc_mult * c_.hidden});
      parts.tensor(hc + "base", Dtype::kF32, {mixes});
      parts.tensor(hc + "scale", Dtype::kF32, {3});
    }
  }

  void routed_experts(const Parts& parts, const std::string& block, std::int64_t experts) {
    const Result<ExpertMap> map = ExpertMap::initial(static_cast<std::int32_t>(experts), request_.redundant_experts,
                                                     request_.rank % request_.parallel.ep, request_.parallel.ep);
    if (!map.ok()) return writer_.fail(map.status());
    write_deepseek_v4_experts(parts, block, writer_.expert_map(map.value()), {.padded = padded_});
  }

  const DeepseekV4Config& c_;
  const ModelRequest& request_;
  std::vector<std::string> words_;
  DeepseekV4Naming naming_;
  LayoutWriter writer_;
  Parts parts_;
  std::int64_t padded_;  // P: rows of one half of L1 and columns of L2, as the kernel has them
  std::unordered_set<std::string> tables_;
};

}  // namespace

Result<ModelLayout> build_deepseek_v4(const ModelRequest& request, const JsonValue& json) {
  Result<std::vector<std::string>> words = variant_words(kFamily, request.variant, kWords);
  if (!words.ok()) return words.status();
  if (words.value().size() != 1) {
    return Status(Code::kUnsupported, fmt::format("variant {} of {}: plain and padded exclude each other", request.variant, kFamily));
  }
  if (request.parallel.tp != 1) {
    return Status(Code::kUnsupported, fmt::format("layout {} of {}: dense tensors of this family are replicated, tp {} would cut them",
                                                  request.parallel.to_string(), kFamily, request.parallel.tp));
  }
  Result<DeepseekV4Config> config = read_deepseek_v4_config(json);
  if (!config.ok()) return config.status();
  return LayoutBuilder(config.value(), request, std::move(words).value()).build();
}

}  // namespace headrace
