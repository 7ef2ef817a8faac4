#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_set>
#include <utility>

#include "receiver/models/deepseek_v4_attention.h"
#include "receiver/models/deepseek_v4_config.h"
#include "receiver/models/deepseek_v4_draft.h"
#include "receiver/models/deepseek_v4_experts.h"
#include "receiver/models/deepseek_v4_names.h"
#include "receiver/models/deepseek_v4_parts.h"
#include "receiver/models/deepseek_v4_vision.h"
#include "receiver/models/family.h"

namespace headrace {
namespace {

constexpr std::string_view kFamily = "deepseek_v4";
constexpr std::string_view kDraftScope = "draft";
constexpr std::string_view kVisionScope = "vision";
/// Words that speak of one scale for 32 rows and columns.
constexpr std::array<std::string_view, 4> kSmallBlocks{"row_scales", "swizzled_scales", "mega_attention", "grouped_wo_a"};
constexpr std::array<std::string_view, 9> kWords{"plain",           "padded",         "sglang",       "fused_shared", "row_scales",
                                                 "swizzled_scales", "mega_attention", "grouped_wo_a", "mhc_broadcast"};

bool holds(const std::vector<std::int64_t>& list, std::int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}
bool holds(const std::vector<std::string>& list, std::string_view value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

DeepseekV4Naming naming_of(const DeepseekV4Config& config, const ModelRequest& request, const std::vector<std::string>& words) {
  DeepseekV4Loader loader = DeepseekV4Loader::kText;
  if (holds(request.scopes, kVisionScope)) loader = DeepseekV4Loader::kImages;
  if (holds(words, "sglang")) loader = DeepseekV4Loader::kSglang;
  return {
      .loader = loader, .experts = static_cast<std::int32_t>(config.experts), .linear_scale = config.linear_scale, .hc_head = !config.v41};
}

/// The dense tensors are divided among tp neighbours, whatever number of ranks share the experts.
DeepseekV4Sharding sharding_of(const ModelRequest& request, const std::vector<std::string>& words) {
  ScaleForm scales = ScaleForm::kBlocks;
  if (holds(words, "row_scales")) scales = ScaleForm::kRows;
  if (holds(words, "swizzled_scales")) scales = ScaleForm::kSwizzled;
  return {.tp = request.parallel.tp, .rank = request.rank % request.parallel.tp, .scales = scales};
}

/// Lists the tensors of the model, block by block. A block is named by the prefix of its checkpoint names, e.g. "layers.3.".
class LayoutBuilder {
 public:
  LayoutBuilder(const DeepseekV4Config& config, const ModelRequest& request, std::vector<std::string> words)
      : c_(config),
        request_(request),
        words_(std::move(words)),
        naming_(naming_of(config, request, words_)),
        writer_(std::string(kFamily), request),
        parts_(
            writer_, config, [this](std::string_view name) { return map_deepseek_v4_name(naming_, name).name; }, "target",
            sharding_of(request, words_)),
        attention_{.mega = holds(words_, "mega_attention"), .grouped_wo_a = holds(words_, "grouped_wo_a")},
        form_{.padded = holds(words_, "padded") ? (config.intermediate + 511) / 512 * 512 : config.intermediate,
              .two_scales = holds(words_, "sglang")} {}

  Result<ModelLayout> build(const std::optional<DeepseekV4Draft>& draft, const std::optional<DeepseekV4Vision>& vision) {
    writer_.divide(c_.heads * c_.head_dim, c_.o_groups, "num_attention_heads * head_dim");
    if (!writer_.status().ok()) return writer_.status();
    top();
    for (std::int64_t l = 0; l < c_.layers && writer_.status().ok(); ++l) {
      const std::string layer = fmt::format("layers.{}.", l);
      if (c_.v41) {
        sparse_attention_v41(l, layer);
        engram(l, layer);
      } else {
        sparse_attention_v4(l, layer);
      }
      block(parts_, layer, c_.experts, request_.redundant_experts, l < c_.hash_layers);
    }
    if (vision) {
      const Parts images(
          writer_, c_, [this](std::string_view name) { return map_deepseek_v4_name(naming_, name).name; }, std::string(kVisionScope),
          parts_.sharding());
      write_deepseek_v4_vision(images, *vision);
    }
    NameScan draft_scan;
    if (draft) draft_scan = add_draft(*draft);
    NameScan scan = deepseek_v4_scan(naming_, params_of([](std::string_view scope) { return scope != kDraftScope; }), ignored_);
    writer_.layout().scan = draft ? either(std::move(scan), std::move(draft_scan)) : std::move(scan);
    return std::move(writer_).finish();
  }

 private:
  using Parts = DeepseekV4Parts;

  /// What every block has, of the backbone or of the draft.
  void block(const Parts& parts, const std::string& name, std::int64_t experts, std::int32_t redundant, bool hashed) {
    write_deepseek_v4_attention(parts, name, attention_);
    router(parts, name, experts, hashed);
    if (holds(words_, "fused_shared")) {
      write_deepseek_v4_fused_shared(parts, name, form_.padded);
    } else {
      shared_experts(parts, name);
    }
    hyper_connections(parts, name);
    routed_experts(parts, name, experts, redundant);
  }

  /// A second model beside the target with experts of its own. Answers with its loader.
  NameScan add_draft(const DeepseekV4Draft& draft) {
    DeepseekV4Naming naming = naming_;
    naming.loader = DeepseekV4Loader::kDraft;
    naming.experts = static_cast<std::int32_t>(draft.experts);
    const Parts parts(
        writer_, c_, [&naming](std::string_view name) { return map_deepseek_v4_name(naming, name).name; }, std::string(kDraftScope),
        parts_.sharding());
    for (std::int64_t s = 0; s < draft.stages && writer_.status().ok(); ++s) {
      block(parts, fmt::format("mtp.{}.", s), draft.experts, 0, false);
    }
    write_deepseek_v4_draft(parts, draft, parts_);
    return deepseek_v4_scan(naming, params_of([](std::string_view scope) { return scope == kDraftScope; }), ignored_);
  }

  /// Two models see every name: what the one drops may be the other's.
  static NameScan either(NameScan target, NameScan draft) {
    return [target = std::move(target), draft = std::move(draft)](std::string_view name) {
      ScanAnswer answer = target(name);
      return answer.kind == ScanAnswer::Kind::kDropped ? draft(name) : answer;
    };
  }

  /// The parameters that a loader knows: of all rules in these scopes, and those that this family ignores.
  template <class Scopes>
  std::unordered_set<std::string> params_of(const Scopes& scopes) {
    std::unordered_set<std::string> params(ignored_.begin(), ignored_.end());
    const auto add = [&](const TensorRule& rule) {
      if (scopes(rule.scope)) params.insert(rule.param);
    };
    for (const NamedRule& named : writer_.layout().named) add(named.rule);
    for (const ExpertRule& expert : writer_.layout().expert_rules) add(expert.rule);
    return params;
  }

  void top() {
    parts_.vocabulary("embed.weight", Dtype::kBF16, c_.vocab, c_.hidden);
    parts_.vocabulary("head.weight", Dtype::kBF16, c_.vocab, c_.hidden);
    parts_.tensor("norm.weight", Dtype::kBF16, {c_.hidden});
    if (c_.v41) return;
    parts_.tensor("hc_head_fn", Dtype::kF32, {c_.hc_mult, c_.hc_mult * c_.hidden});
    parts_.tensor("hc_head_base", Dtype::kF32, {c_.hc_mult});
    parts_.tensor("hc_head_scale", Dtype::kF32, {1});
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
    // The tables themselves live in host memory with an owner of their own; their names are known, so that the scan drops them.
    ignored_.insert(parts_.param_of(engram + "embed.weight"));
    ignored_.insert(parts_.param_of(engram + "embed.scale"));
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

  /// Zeros make the features of both matrices divide into blocks on every rank.
  void shared_experts(const Parts& parts, const std::string& block) {
    const std::string shared = block + "ffn.shared_experts.";
    const std::int64_t width = c_.shared_experts * c_.intermediate;
    const std::int64_t unit = parts.sharding().tp * c_.block;
    const std::int64_t padded = (width + unit - 1) / unit * unit;
    const std::array<Parts::Stacked, 2> gate_up{{{shared + "w1", width}, {shared + "w3", width}}};
    parts.stacked_linear(shared + "gate_up_proj", gate_up, c_.hidden, {.cut = LinearForm::Cut::kRows, .padded = padded});
    parts.linear(shared + "w2", c_.hidden, width, {.cut = LinearForm::Cut::kColumns, .padded = padded});
  }

  void hyper_connections(const Parts& parts, const std::string& block) {
    const std::int64_t mixes = (2 + c_.hc_mult) * c_.hc_mult;
    for (const std::string_view part : {"attn", "ffn"}) {
      const std::string hc = fmt::format("{}hc_{}_", block, part);
      parts.tensor(hc + "fn", Dtype::kF32, {mixes, c_.hc_mult * c_.hidden});
      parts.tensor(hc + "base", Dtype::kF32, {mixes});
      parts.tensor(hc + "scale", Dtype::kF32, {3});
    }
    if (block == "layers.0." && holds(words_, "mhc_broadcast")) {
      // The first layer's streams are equal, so the engine keeps the sum over them. No tensor brings it: its derive hook does.
      const std::uint32_t sum = parts.storage(block + "hc_attn_fn_broadcast", Dtype::kF32, {mixes, c_.hidden});
      writer_.layout().storages[sum].optional = true;
    }
  }

  void routed_experts(const Parts& parts, const std::string& block, std::int64_t experts, std::int32_t redundant) {
    const Result<ExpertMap> map =
        ExpertMap::initial(static_cast<std::int32_t>(experts), redundant, request_.rank % request_.parallel.ep, request_.parallel.ep);
    if (!map.ok()) return writer_.fail(map.status());
    const DeepseekV4ExpertFormat format = c_.expert_format_of(block);
    write_deepseek_v4_experts(parts, block, writer_.expert_map(map.value()), format, form_);
    // Of the activations before the first matrix the engine computes a scale itself; checkpoints bring one all the same.
    if (format == DeepseekV4ExpertFormat::kNvfp4) ignored_.insert(parts.param_of(block + "ffn.experts.w13_input_scale"));
  }

  const DeepseekV4Config& c_;
  const ModelRequest& request_;
  std::vector<std::string> words_;
  DeepseekV4Naming naming_;
  LayoutWriter writer_;
  Parts parts_;
  DeepseekV4AttentionForm attention_;
  DeepseekV4ExpertForm form_;
  std::unordered_set<std::string> ignored_;  // parameters that loaders know and this layout has no storage for
};

/// Words of a variant that its others leave no room for.
Status check_words(const ModelRequest& request, const std::vector<std::string>& words) {
  const auto refused = [&](std::string_view reason) {
    return Status(Code::kUnsupported, fmt::format("variant {} of {}: {}", request.variant, kFamily, reason));
  };
  constexpr std::array<std::string_view, 3> kForms{"plain", "padded", "sglang"};
  if (std::count_if(kForms.begin(), kForms.end(), [&](std::string_view form) { return holds(words, form); }) != 1) {
    return refused("expected one of plain, padded and sglang");
  }
  if (holds(words, "row_scales") && holds(words, "swizzled_scales")) return refused("row_scales and swizzled_scales exclude each other");
  if (!holds(words, "sglang")) return ok_status();
  for (const std::string_view word : kSmallBlocks) {
    if (holds(words, word)) return refused(fmt::format("{} is a form of vLLM only", word));
  }
  if (holds(words, "fused_shared")) return refused("shared experts are fused by vLLM only");
  for (const std::string_view scope : {kDraftScope, kVisionScope}) {
    if (holds(request.scopes, scope)) return refused(fmt::format("scope {} is laid out for vLLM only", scope));
  }
  return ok_status();
}

Status check_blocks(const ModelRequest& request, const std::vector<std::string>& words, std::int64_t block) {
  for (const std::string_view word : kSmallBlocks) {
    if (!holds(words, word) || block == 32) continue;
    return Status(Code::kUnsupported, fmt::format("variant {} of {}: {} needs scales of 32 rows and columns, the model has them for {}",
                                                  request.variant, kFamily, word, block));
  }
  return ok_status();
}

}  // namespace

Result<ModelLayout> build_deepseek_v4(const ModelRequest& request, const JsonValue& json) {
  Result<std::vector<std::string>> words = variant_words(kFamily, request.variant, kWords);
  if (!words.ok()) return words.status();
  HEADRACE_RETURN_IF_ERROR(check_words(request, words.value()));
  const auto& [tp, ep] = request.parallel;
  if (ep != 1 && ep % tp != 0) {
    return Status(Code::kUnsupported,
                  fmt::format("layout {} of {}: {} expert ranks are no multiple of {} ranks that divide the dense tensors",
                              request.parallel.to_string(), kFamily, ep, tp));
  }
  if (request.dtype) {
    return Status(Code::kUnsupported,
                  fmt::format("layout of {}: floating-point tensors kept as {}: its kernels take each tensor in one dtype", kFamily,
                              dtype_name(*request.dtype)));
  }
  Result<DeepseekV4Config> config = read_deepseek_v4_config(json);
  if (!config.ok()) return config.status();
  HEADRACE_RETURN_IF_ERROR(check_blocks(request, words.value(), config.value().block));
  std::optional<DeepseekV4Draft> draft;
  if (holds(request.scopes, kDraftScope)) {
    Result<DeepseekV4Draft> read = read_deepseek_v4_draft(json);
    if (!read.ok()) return read.status();
    draft = read.value();
  }
  std::optional<DeepseekV4Vision> vision;
  if (holds(request.scopes, kVisionScope)) {
    Result<DeepseekV4Vision> read = read_deepseek_v4_vision(json);
    if (!read.ok()) return read.status();
    vision = read.value();
  }
  return LayoutBuilder(config.value(), request, std::move(words).value()).build(draft, vision);
}

}  // namespace headrace
