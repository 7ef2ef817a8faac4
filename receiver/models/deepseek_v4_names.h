#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>

#include "receiver/models/family.h"

namespace headrace {

/// The models of an engine that take names of a DeepSeek-V4 checkpoint, each in its own way.
enum class DeepseekV4Loader : std::uint8_t {
  kText,    // the text model alone: drops images and drafts
  kImages,  // the text model inside one that sees images: drops drafts
  kDraft,   // the draft: takes nothing but "mtp.<stage>."
  kSglang,  // SGLang's text model
};

/// What decides how the engine spells the parameters of one DeepSeek-V4 model.
struct DeepseekV4Naming {
  DeepseekV4Loader loader = DeepseekV4Loader::kText;
  std::int32_t experts = 0;
  std::string linear_scale;  // leaf of a block-scaled linear's scale: "weight_scale" (V4.1) or "weight_scale_inv" (V4)
  bool hc_head = false;      // V4 has hc_head_* at the top of the model, V4.1 has not
};

/// A checkpoint name after the engine's name mapper: rewritten, or dropped.
struct MappedName {
  bool dropped = false;
  std::string name;
};
MappedName map_deepseek_v4_name(const DeepseekV4Naming& naming, std::string_view checkpoint_name);

/// A draft is a model beside the target with parameters of the same names; its own begin with this.
inline constexpr std::string_view kDraftPrefix = "draft.";

/// The engine's loader, taken literally: name mapper, stacked projections with the fallback for LoRA-wrapped modules, and the list of
/// experts scanned entry by entry. `params` are the engine's parameters, `ignored` those of them that this family has no storage for.
/// Time grows with the length of the name times the number of experts.
NameScan deepseek_v4_scan(DeepseekV4Naming naming, std::unordered_set<std::string> params, std::unordered_set<std::string> ignored);

}  // namespace headrace
