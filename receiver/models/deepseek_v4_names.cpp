#include "receiver/models/deepseek_v4_names.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace headrace {
namespace {

struct Rewrite {
  std::string_view from;
  std::string_view to;
};

constexpr std::array<std::string_view, 4> kDroppedParts{"mtp.", "vision.", "aligner.", "image_"};
constexpr std::array<Rewrite, 3> kPrefixes{{{"layers.", "model.layers."}, {"embed.", "model.embed."}, {"norm.", "model.norm."}}};
constexpr std::array<Rewrite, 3> kSuffixes{
    {{"head.weight", "lm_head.weight"}, {"embed.weight", "embed_tokens.weight"}, {".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"}}};

struct Stacked {
  std::string_view param;
  std::string_view part;
  std::string_view shard;
};
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

class Loader {
 public:
  Loader(DeepseekV4Naming naming, std::unordered_set<std::string> params, std::unordered_set<std::string> tables)
      : naming_(std::move(naming)), params_(std::move(params)), tables_(std::move(tables)) {
    fragments_.reserve(3 * static_cast<std::size_t>(naming_.experts));
    for (std::int32_t e = 0; e < naming_.experts; ++e) {
      for (const std::string_view shard : {"w1", "w2", "w3"}) {
        fragments_.push_back(
            {"experts." + std::to_string(e) + "." + std::string(shard) + ".", shard == "w2" ? "experts.w2_" : "experts.w13_", shard, e});
      }
    }
  }

  ScanAnswer scan(std::string_view checkpoint_name) const {
    const MappedName mapped = map_deepseek_v4_name(naming_, checkpoint_name);
    if (mapped.dropped) return dropped();
    if (contains(mapped.name, ".experts.")) return scan_experts(mapped.name);
    for (const Stacked& stacked : kStacked) {
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

  ScanAnswer find_param(std::string name, std::string_view shard) const {
    if (!params_.contains(name)) name = wrapped_name(name);
    if (!params_.contains(name)) return {};
    // Engram tables are known names of the scope "tables". They live in host memory with an owner of their own, so this family drops them.
    if (tables_.contains(name)) return dropped();
    return {.kind = ScanAnswer::Kind::kParam, .param = std::move(name), .shard = std::string(shard)};
  }

  ScanAnswer scan_experts(std::string_view name) const {
    for (const ExpertFragment& entry : fragments_) {
      if (!contains(name, entry.fragment)) continue;
      std::string param = replace_all(name, entry.fragment, entry.param);
      if (!params_.contains(param)) return {};
      return {.kind = ScanAnswer::Kind::kParam, .param = std::move(param), .shard = std::string(entry.shard), .expert = entry.expert};
    }
    return {};
  }

  DeepseekV4Naming naming_;
  std::unordered_set<std::string> params_;
  std::unordered_set<std::string> tables_;
  std::vector<ExpertFragment> fragments_;
};

}  // namespace

MappedName map_deepseek_v4_name(const DeepseekV4Naming& naming, std::string_view checkpoint_name) {
  MappedName mapped{.name = std::string(checkpoint_name)};
  std::string& name = mapped.name;
  rewrite_scale(naming, name);
  name = replace_all(name, ".shared_experts.w2", ".shared_experts.down_proj");
  for (const std::string_view part : kDroppedParts) {
    if (contains(name, part)) return {.dropped = true, .name = {}};
  }
  for (const Rewrite& rule : kPrefixes) {
    if (name.starts_with(rule.from)) name.replace(0, rule.from.size(), rule.to);
  }
  if (naming.hc_head && name.starts_with("hc_head")) name.insert(0, "model.");
  for (const Rewrite& rule : kSuffixes) {
    if (name.ends_with(rule.from)) name.replace(name.size() - rule.from.size(), rule.from.size(), rule.to);
  }
  return mapped;
}

NameScan deepseek_v4_scan(DeepseekV4Naming naming, std::unordered_set<std::string> params, std::unordered_set<std::string> tables) {
  // std::function wants a copyable target; every copy of a layout reads the same immutable loader.
  auto loader = std::make_shared<const Loader>(std::move(naming), std::move(params), std::move(tables));
  return [loader](std::string_view name) { return loader->scan(name); };
}

}  // namespace headrace
