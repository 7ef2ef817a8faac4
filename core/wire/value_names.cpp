#include "core/wire/value_names.h"

#include <charconv>

namespace headrace::wire {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

}  // namespace

ValueNames::ValueNames(std::span<const ValueRule> rules) {
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    const ValueRule& rule = rules[i];
    const auto [known, added] = by_suffix_[rule.suffix].try_emplace(rule.prefix, Known{i, rule.experts});
    if (!added && known->second.experts < rule.experts) known->second = {i, rule.experts};
  }
}

std::optional<ValueNames::Match> ValueNames::find(std::string_view name) const {
  if (empty()) return std::nullopt;
  for (std::size_t at = 0; at < name.size(); ++at) {
    if (!is_digit(name[at])) continue;
    std::size_t end = at;
    while (end < name.size() && is_digit(name[end])) ++end;
    const std::string_view digits = name.substr(at, end - at);
    const std::string_view prefix = name.substr(0, at);
    at = end;
    if (end == name.size() || name[end] != '.' || (digits.size() > 1 && digits.front() == '0')) continue;
    const auto suffix = by_suffix_.find(name.substr(end + 1));
    if (suffix == by_suffix_.end()) continue;
    const auto known = suffix->second.find(prefix);
    if (known == suffix->second.end()) continue;
    std::uint32_t expert = 0;
    const auto [last, error] = std::from_chars(digits.data(), digits.data() + digits.size(), expert);
    if (error == std::errc() && expert < known->second.experts) return Match{known->second.rule, expert};
  }
  return std::nullopt;
}

}  // namespace headrace::wire
