#include "receiver/models/deepseek_v4_names.h"

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace headrace {
namespace {

struct Rewrite {
  std::string_view from;
  std::string_view to;
};

constexpr std::array<std::string_view, 4> kDroppedParts{"mtp.", "vision.", "aligner.", "image_"};
constexpr std::array<std::string_view, 1> kDroppedDrafts{"mtp."};
constexpr std::array<Rewrite, 3> kPrefixes{{{"layers.", "model.layers."}, {"embed.", "model.embed."}, {"norm.", "model.norm."}}};
constexpr std::array<Rewrite, 4> kImagePrefixes{{{"layers.", "language_model.model.layers."},
                                                 {"embed.", "language_model.model.embed."},
                                                 {"norm.", "language_model.model.norm."},
                                                 {"head.", "language_model.head."}}};
constexpr std::string_view kLanguageModel = "language_model.";
/// Parts of the draft that belong to no stage.
constexpr std::array<std::string_view, 5> kDraftParts{"main_proj.", "main_norm.", "norm.", "markov_head.", "confidence_head."};
constexpr std::array<Rewrite, 2> kMarkovHead{
    {{"markov_head.embed.", "markov_head.markov_w1."}, {"markov_head.head.", "markov_head.markov_w2."}}};
constexpr std::array<Rewrite, 9> kSglangParts{{{".attn.", ".self_attn."},
                                               {".ffn.", ".mlp."},
                                               {".attn_norm.", ".input_layernorm."},
                                               {".ffn_norm.", ".post_attention_layernorm."},
                                               {".gate.tid2eid", ".topk.tid2eid"},
                                               {".gate.bias", ".gate.e_score_correction_bias"},
                                               {".w1.", ".gate_proj."},
                                               {".w2.", ".down_proj."},
                                               {".w3.", ".up_proj."}}};
constexpr std::array<Rewrite, 2> kSglangSuffixes{{{"head.weight", "lm_head.weight"}, {"model.embed.weight", "model.embed_tokens.weight"}}};
constexpr std::array<Rewrite, 3> kSuffixes{
    {{"head.weight", "lm_head.weight"}, {"embed.weight", "embed_tokens.weight"}, {".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"}}};

struct Stacked {
  std::string_view param;
  std::string_view part;
  std::string_view shard;
};
constexpr std::array<Stacked, 6> kSglangStacked{{{"gate_up_proj", "gate_proj", "0"},
                                                 {"gate_up_proj", "up_proj", "1"},
                                                 {"attn.fused_wqa_wkv", "attn.wq_a", "0"},
                                                 {"attn.fused_wqa_wkv", "attn.wkv", "1"},
                                                 {"compressor.fused_wkv_wgate", "compressor.wkv", "0"},
                                                 {"compressor.fused_wkv_wgate", "compressor.wgate", "1"}}};
constexpr std::array<Stacked, 6> kStacked{{{"gate_up_proj", "w1", "0"},
                                           {"gate_up_proj", "w3", "1"},
                                           {"attn.fused_wqa_wkv", "attn.wq_a", "0"},
                                           {"attn.fused_wqa_wkv", "attn.wkv", "1"},
                                           {"compressor.fused_wkv_wgate", "compressor.wkv", "0"},
                                           {"compressor.fused_wkv_wgate", "compressor.wgate", "1"}}};

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t at = 0;;) {
    const std::size_t found = text.find(from, at);
    result += text.substr(at, found - at);
    if (found == std::string_view::npos) return result;
    result += to;
    at = found + from.size();
  }
}

/// Whether `text` ends with ".experts.<digits>.w1", w2 or w3.
bool ends_with_expert_projection(std::string_view text) {
  if (text.size() < 3 || text[text.size() - 3] != '.' || text[text.size() - 2] != 'w') return false;
  if (text.back() < '1' || text.back() > '3') return false;
  text.remove_suffix(3);
  const std::size_t digits_end = text.size();
  while (!text.empty() && text.back() >= '0' && text.back() <= '9') text.remove_suffix(1);
  return text.size() != digits_end && text.ends_with(".experts.");
}

/// The mapper's expressions, all anchored at the end of the name. Each rewrites a trailing ".scale", so no more than one applies. The
/// engine's digits may be of any script; no expert of such a spelling exists, so ASCII digits give the same answers.
void rewrite_scale(const DeepseekV4Naming& naming, std::string& name) {
  constexpr std::string_view kScale = ".scale";
  if (!name.ends_with(kScale)) return;
  std::string_view head(name);
  head.remove_suffix(kScale.size());
  std::string_view wrapped = head;
  if (wrapped.ends_with(".base_layer")) wrapped.remove_suffix(std::string_view(".base_layer").size());
  std::string_view leaf = naming.linear_scale;
  std::string_view joint = ".";
  if (ends_with_expert_projection(wrapped)) {
    leaf = "weight_scale";
  } else if (head.ends_with("engram.embed")) {
    leaf = "weight_scale_inv";
    joint = "_tokens.";
  }
  name = std::string(head).append(joint).append(leaf);
}

constexpr std::string_view kSharedDown = ".shared_experts.w2";
constexpr std::string_view kSharedDownParam = ".shared_experts.down_proj";

void rewrite_prefixes(std::string& name, std::span<const Rewrite> rules) {
  for (const Rewrite& rule : rules) {
    if (name.starts_with(rule.from)) name.replace(0, rule.from.size(), rule.to);
  }
}
void rewrite_suffixes(std::string& name, std::span<const Rewrite> rules) {
  for (const Rewrite& rule : rules) {
    if (name.ends_with(rule.from)) name.replace(name.size() - rule.from.size(), rule.from.size(), rule.to);
  }
}
bool contains_any(std::string_view name, std::span<const std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) { return contains(name, part); });
}

MappedName map_text(const DeepseekV4Naming& naming, std::string_view checkpoint_name, std::span<const std::string_view> dropped,
                    std::span<const Rewrite> prefixes) {
  std::string name(checkpoint_name);
  rewrite_scale(naming, name);
  name = replace_all(name, kSharedDown, kSharedDownParam);
  if (contains_any(name, dropped)) return {.dropped = true, .name = {}};
  rewrite_prefixes(name, prefixes);
  if (naming.hc_head && name.starts_with("hc_head")) name.insert(0, "model.");
  rewrite_suffixes(name, kSuffixes);
  return {.dropped = false, .name = std::move(name)};
}

/// "mtp.<stage>.<rest>": parts of the whole draft lose their stage, all others are those of layer <stage>.
MappedName map_draft(const DeepseekV4Naming& naming, std::string_view checkpoint_name) {
  constexpr std::string_view kStages = "mtp.";
  MappedName dropped{.dropped = true, .name = {}};
  if (!checkpoint_name.starts_with(kStages)) return dropped;
  checkpoint_name.remove_prefix(kStages.size());
  const std::size_t digits = std::min(checkpoint_name.find_first_not_of("0123456789"), checkpoint_name.size());
  if (digits == 0 || !checkpoint_name.substr(digits).starts_with('.')) return dropped;
  const std::string_view stage = checkpoint_name.substr(0, digits);
  std::string rest(checkpoint_name.substr(digits + 1));
  rewrite_scale(naming, rest);
  const bool whole =
      std::any_of(kDraftParts.begin(), kDraftParts.end(), [&](std::string_view part) { return std::string_view(rest).starts_with(part); });
  std::string name = std::string(kDraftPrefix) + "model.";
  if (whole) {
    rewrite_prefixes(rest, kMarkovHead);
  } else {
    name.append("layers.").append(stage).append(".");
    rest = replace_all(rest, kSharedDown, kSharedDownParam);
  }
  name += rest;
  if (!whole) rewrite_suffixes(name, std::span(kSuffixes).last(1));
  return {.dropped = false, .name = std::move(name)};
}

MappedName map_sglang(const DeepseekV4Naming& naming, std::string_view checkpoint_name) {
  constexpr std::string_view kScale = ".scale";
  std::string name(checkpoint_name);
  if (contains_any(name, kDroppedParts)) return {.dropped = true, .name = {}};
  if (name.ends_with(kScale) && !name.ends_with("engram.embed.scale")) {
    name.replace(name.size() - kScale.size(), kScale.size(), ".weight_scale_inv");
  }
  rewrite_prefixes(name, kPrefixes);
  if (naming.hc_head && name.starts_with("hc_head")) name.insert(0, "model.");
  for (const Rewrite& rule : kSglangParts) name = replace_all(name, rule.from, rule.to);
  rewrite_suffixes(name, kSglangSuffixes);
  return {.dropped = false, .name = std::move(name)};
}

/// "<head>.base_layer.<leaf>", what a LoRA wrapper makes of a parameter's name.
std::string wrapped_name(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {};
  return std::string(name.substr(0, dot)).append(".base_layer").append(name.substr(dot));
}

struct ExpertFragment {
  std::string fragment;  // "experts.11.w1."
  std::string_view param;
  std::string_view shard;
  std::int32_t expert;
};

/// Projection as the mapped name has it, and its shard.
constexpr std::array<Rewrite, 3> kProjections{{{"w1", "w1"}, {"w2", "w2"}, {"w3", "w3"}}};
constexpr std::array<Rewrite, 3> kSglangProjections{{{"gate_proj", "w1"}, {"down_proj", "w2"}, {"up_proj", "w3"}}};

class Loader {
 public:
  Loader(DeepseekV4Naming naming, std::unordered_set<std::string> params, std::unordered_set<std::string> ignored)
      : naming_(std::move(naming)), params_(std::move(params)), ignored_(std::move(ignored)) {
    fragments_.reserve(3 * static_cast<std::size_t>(naming_.experts));
    for (std::int32_t e = 0; e < naming_.experts; ++e) {
      for (const Rewrite& projection : sglang() ? kSglangProjections : kProjections) {
        fragments_.push_back({"experts." + std::to_string(e) + "." + std::string(projection.from) + ".",
                              projection.to == "w2" ? "experts.w2_" : "experts.w13_", projection.to, e});
      }
    }
  }

  ScanAnswer scan(std::string_view checkpoint_name) const {
    const MappedName mapped = map_deepseek_v4_name(naming_, checkpoint_name);
    if (mapped.dropped) return dropped();
    if (naming_.loader == DeepseekV4Loader::kImages && !mapped.name.starts_with(kLanguageModel)) return plain_param(mapped.name);
    if (contains(mapped.name, ".experts.")) return scan_experts(mapped.name);
    const bool stacks = naming_.loader != DeepseekV4Loader::kDraft || mapped.name.starts_with("draft.model.layers.");
    for (const Stacked& stacked : sglang() ? kSglangStacked : kStacked) {
      if (!stacks) break;
      if (!contains(mapped.name, stacked.part)) continue;
      return find_param(replace_all(mapped.name, stacked.part, stacked.param), stacked.shard);
    }
    return find_param(mapped.name, "");
  }

 private:
  static ScanAnswer dropped() {
    ScanAnswer answer;
    answer.kind = ScanAnswer::Kind::kDropped;
    return answer;
  }

  bool sglang() const noexcept { return naming_.loader == DeepseekV4Loader::kSglang; }

  ScanAnswer plain_param(const std::string& name) const {
    if (!params_.contains(name)) return {};
    return {.kind = ScanAnswer::Kind::kParam, .param = name, .shard = {}};
  }
  ScanAnswer find_param(std::string name, std::string_view shard) const {
    if (!params_.contains(name)) name = wrapped_name(name);
    if (!params_.contains(name)) return {};
    if (ignored_.contains(name)) return dropped();
    return {.kind = ScanAnswer::Kind::kParam, .param = std::move(name), .shard = std::string(shard)};
  }

  ScanAnswer scan_experts(std::string_view name) const {
    for (const ExpertFragment& entry : fragments_) {
      if (!contains(name, entry.fragment)) continue;
      std::string param = replace_all(name, entry.fragment, entry.param);
      if (!params_.contains(param)) return {};
      if (ignored_.contains(param)) return dropped();
      return {.kind = ScanAnswer::Kind::kParam, .param = std::move(param), .shard = std::string(entry.shard), .expert = entry.expert};
    }
    return {};
  }

  DeepseekV4Naming naming_;
  std::unordered_set<std::string> params_;
  std::unordered_set<std::string> ignored_;
  std::vector<ExpertFragment> fragments_;
};

}  // namespace

MappedName map_deepseek_v4_name(const DeepseekV4Naming& naming, std::string_view checkpoint_name) {
  switch (naming.loader) {
    case DeepseekV4Loader::kText: return map_text(naming, checkpoint_name, kDroppedParts, kPrefixes);
    case DeepseekV4Loader::kImages: return map_text(naming, checkpoint_name, kDroppedDrafts, kImagePrefixes);
    case DeepseekV4Loader::kDraft: return map_draft(naming, checkpoint_name);
    case DeepseekV4Loader::kSglang: return map_sglang(naming, checkpoint_name);
  }
  return {};
}

NameScan deepseek_v4_scan(DeepseekV4Naming naming, std::unordered_set<std::string> params, std::unordered_set<std::string> ignored) {
  // std::function wants a copyable target; every copy of a layout reads the same immutable loader.
  auto loader = std::make_shared<const Loader>(std::move(naming), std::move(params), std::move(ignored));
  return [loader](std::string_view name) { return loader->scan(name); };
}

}  // namespace headrace
