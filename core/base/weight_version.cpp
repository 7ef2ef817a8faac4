#include "core/base/weight_version.h"

#include <algorithm>
#include <charconv>

namespace headrace {

bool valid_run_id(std::string_view run) noexcept {
  return !run.empty() && run.size() <= 64 && std::all_of(run.begin(), run.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
  });
}

std::optional<WeightVersion> parse_weight_version(std::string_view text) {
  const std::size_t slash = text.find('/');
  if (slash == std::string_view::npos || !valid_run_id(text.substr(0, slash))) return std::nullopt;
  const std::string_view digits = text.substr(slash + 1);
  WeightVersion version{std::string(text.substr(0, slash)), 0};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), version.step);
  if (digits.empty() || error != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  return version;
}

std::uint64_t run_number(std::string_view run) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : run) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

}  // namespace headrace
