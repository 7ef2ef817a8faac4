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
    if (rule.experts == 0) {
      const auto [tie, is_new] = ties_.try_emplace(rule.suffix, Tie{i, rule.prefix});
      if (!is_new && tie->second.to != rule.prefix) conflict_ = rule.suffix;
      continue;
    }
    const auto [known, added] = by_suffix_[rule.suffix].try_emplace(rule.prefix, Known{i, rule.experts});
    if (!added && known->second.experts < rule.experts) known->second = {i, rule.experts};
  }
}

std::optional<ValueNames::Match> ValueNames::find(std::string_view name) const {
  if (const auto tie = ties_.find(name); tie != ties_.end()) return Match{tie->second.rule, 0};
  if (by_suffix_.empty()) return std::nullopt;
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

const std::string* ValueNames::tied_to(std::string_view name) const {
  const auto tie = ties_.find(name);
  return tie != ties_.end() ? &tie->second.to : nullptr;
}

std::vector<std::byte> value_of(const FingerprintSum& sum) {
  std::vector<std::byte> value;
  for (const std::uint64_t lane : sum.lanes) {
    for (int shift = 0; shift < 64; shift += 8) value.push_back(static_cast<std::byte>(lane >> shift));
  }
  return value;
}

std::optional<FingerprintSum> fingerprint_of(std::span<const std::byte> value) {
  FingerprintSum sum;
  if (value.size() != sum.lanes.size() * sizeof(std::uint64_t)) return std::nullopt;
  for (std::size_t i = 0; i < value.size(); ++i) sum.lanes[i / 8] |= std::to_integer<std::uint64_t>(value[i]) << (i % 8 * 8);
  return sum;
}

}  // namespace headrace::wire
