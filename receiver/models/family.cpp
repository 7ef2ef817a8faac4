#include "receiver/models/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "core/wire/limits.h"
#include "receiver/models/deepseek_v4_config.h"

namespace headrace {
namespace {

constexpr auto kRanksMax = static_cast<std::int32_t>(limits::kRanksMax);

/// "ep4" -> 4 for the prefix "ep"; nullopt for anything but the prefix and a canonical number.
std::optional<std::int32_t> degree(std::string_view part, std::string_view prefix) {
  if (!part.starts_with(prefix)) return std::nullopt;
  part.remove_prefix(prefix.size());
  std::int32_t value = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
  if (error != std::errc() || end != part.data() + part.size() || part.front() == '0' || value < 1 || value > kRanksMax)
    return std::nullopt;
  return value;
}

/// What "auto" means: by model_type where there is a config.json, the tensors as they are without one.
std::string_view family_of(const JsonValue* config) {
  constexpr std::array<std::string_view, 6> kFusedMoe{"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"};
  if (config == nullptr) return "dense";
  const std::string type = model_type_of(*config);
  if (is_deepseek_v4(type)) return "deepseek_v4";
  return std::find(kFusedMoe.begin(), kFusedMoe.end(), type) == kFusedMoe.end() ? "dense" : "fused_moe";
}

/// The text model comes first; only one family has models beside it.
Status check_scopes(std::string_view family, std::span<const std::string> scopes) {
  std::vector<std::string_view> known{"target"};
  if (family == "deepseek_v4") known.insert(known.end(), {"draft", "vision"});
  bool target = false;
  for (const std::string& scope : scopes) {
    if (std::find(known.begin(), known.end(), scope) == known.end()) {
      return Status(Code::kUnsupported, fmt::format("scope {} of {}: the family has {}", scope, family, fmt::join(known, ", ")));
    }
    target = target || scope == "target";
  }
  if (!target) return Status(Code::kInvalidArgument, fmt::format("scopes of {}: target is not among them", family));
  return ok_status();
}

}  // namespace

std::string ParallelLayout::to_string() const {
  if (ep == 1) return fmt::format("tp{}", tp);
  return tp == 1 ? fmt::format("ep{}", ep) : fmt::format("tp{},ep{}", tp, ep);
}

Result<ParallelLayout> parse_layout(std::string_view text) {
  const std::size_t comma = text.find(',');
  const std::string_view first = text.substr(0, comma);
  const auto tp = degree(first, "tp");
  if (comma == std::string_view::npos) {
    if (tp) return ParallelLayout{.tp = *tp, .ep = 1};
    if (const auto ep = degree(first, "ep")) return ParallelLayout{.tp = 1, .ep = *ep};
  } else if (const auto ep = degree(text.substr(comma + 1), "ep"); tp && ep) {
    return ParallelLayout{.tp = *tp, .ep = *ep};
  }
  return Status(Code::kInvalidArgument,
                fmt::format("layout \"{}\" not understood: expected tpN, epN or tpN,epN with N from 1 to {}", text, kRanksMax));
}

Result<std::vector<std::string>> variant_words(std::string_view family, std::string_view variant, std::span<const std::string_view> known) {
  std::vector<std::string> words;
  while (true) {
    const std::size_t plus = variant.find('+');
    const std::string_view word = variant.substr(0, plus);
    if (std::find(known.begin(), known.end(), word) == known.end()) {
      return Status(Code::kUnsupported, fmt::format("variant {} of {}: the family has {}", word, family, fmt::join(known, ", ")));
    }
    if (std::find(words.begin(), words.end(), word) != words.end()) {
      return Status(Code::kInvalidArgument, fmt::format("variant of {}: {} is there twice", family, word));
    }
    words.emplace_back(word);
    if (plus == std::string_view::npos) return words;
    variant.remove_prefix(plus + 1);
  }
}

Result<ModelLayout> build_model(const ModelRequest& request, const JsonValue* config, std::span<const CheckpointTensor> tensors) {
  std::string family = request.family;
  if (family == "auto") family = family_of(config);
  if (family != "deepseek_v4" && family != "fused_moe" && family != "dense") {
    return Status(Code::kUnsupported, fmt::format("family {} not built: expected auto, deepseek_v4, fused_moe or dense", request.family));
  }
  HEADRACE_RETURN_IF_ERROR(check_scopes(family, request.scopes));
  if (family == "dense") return build_dense(request, config, tensors);
  if (config == nullptr) return Status(Code::kInvalidArgument, fmt::format("family {} not built: there is no config.json", family));
  return family == "fused_moe" ? build_fused_moe(request, *config, tensors) : build_deepseek_v4(request, *config);
}

}  // namespace headrace
