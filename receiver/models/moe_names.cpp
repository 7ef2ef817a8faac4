#include "receiver/models/moe_names.h"

#include <array>
#include <charconv>
#include <utility>

namespace headrace {
namespace {

using Projection = MoeName::Projection;

constexpr std::array<std::pair<std::string_view, Projection>, 6> kProjections{{
    {"gate_proj", Projection::kGate},
    {"up_proj", Projection::kUp},
    {"down_proj", Projection::kDown},
    {"w1", Projection::kGate},
    {"w3", Projection::kUp},
    {"w2", Projection::kDown},
}};

/// Without sign or leading zeros, as the index reads it.
std::optional<std::int64_t> id_of(std::string_view digits) {
  std::int64_t id = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), id);
  const bool odd = digits.empty() || digits.front() == '-' || (digits.size() > 1 && digits.front() == '0');
  if (odd || error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return id;
}

}  // namespace

std::optional<MoeName> moe_name(std::string_view name) {
  constexpr std::string_view kExperts = "experts.";
  std::size_t at = name.rfind(kExperts);
  // "shared_experts." is another word.
  if (at == std::string_view::npos || (at > 0 && name[at - 1] != '.')) return std::nullopt;
  at += kExperts.size();
  MoeName result;
  result.prefix = name.substr(0, at);
  std::string_view rest = name.substr(at);
  result.suffix = rest;
  if (rest == "gate_up_proj" || rest == "down_proj") {
    result.projection = rest == "down_proj" ? Projection::kDown : Projection::kGateUp;
    result.leaf = "weight";
    return result;
  }
  const std::size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const auto expert = id_of(rest.substr(0, dot));
  if (!expert) return std::nullopt;
  result.expert = *expert;
  rest = rest.substr(dot + 1);
  result.suffix = rest;
  for (const auto& [word, projection] : kProjections) {
    if (!rest.starts_with(word) || rest.size() < word.size() + 2 || rest[word.size()] != '.') continue;
    result.projection = projection;
    result.leaf = rest.substr(word.size() + 1);
    return result;
  }
  return std::nullopt;
}

}  // namespace headrace
