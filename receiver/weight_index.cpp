#include "receiver/weight_index.h"

#include <algorithm>
#include <array>

#include "core/base/check.h"

namespace headrace {
namespace {

constexpr std::array<std::int32_t, 1> kOnlySlot{0};
/// Digits of the largest expert id.
constexpr std::size_t kExpertDigitsMax = 10;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// The id as the engine writes it, without sign or leading zeros; nullopt for any other spelling or one out of [0, experts).
std::optional<std::int32_t> canonical_id(std::string_view digits, std::int32_t experts) {
  if (digits.empty() || digits.size() > kExpertDigitsMax || (digits.size() > 1 && digits.front() == '0')) return std::nullopt;
  std::int64_t id = 0;
  for (const char c : digits) {
    if (!is_digit(c)) return std::nullopt;
    id = id * 10 + (c - '0');
  }
  if (id >= experts) return std::nullopt;
  return static_cast<std::int32_t>(id);
}

std::size_t common_prefix(std::string_view a, std::string_view b) {
  const std::size_t limit = std::min(a.size(), b.size());
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(limit), b.begin()).first - a.begin());
}

/// How much of `known` the two names share at both ends, less what they differ in length by (up to 8).
std::int64_t likeness(std::string_view name, std::string_view known) {
  const std::size_t prefix = common_prefix(name, known);
  const std::size_t limit = std::min(name.size(), known.size()) - prefix;
  std::size_t suffix = 0;
  while (suffix < limit && name[name.size() - 1 - suffix] == known[known.size() - 1 - suffix]) ++suffix;
  const std::size_t longer = std::max(name.size(), known.size()) - std::min(name.size(), known.size());
  return 2 * static_cast<std::int64_t>(prefix + suffix) - static_cast<std::int64_t>(std::min<std::size_t>(longer, 8));
}

/// The last ".<digits>." of a name that is short enough to be known, for names of experts that a near miss may be another spelling of.
std::string_view last_number(std::string_view name) {
  std::size_t end = name.size();
  while (end > 0) {
    while (end > 0 && !is_digit(name[end - 1])) --end;
    std::size_t begin = end;
    while (begin > 0 && is_digit(name[begin - 1])) --begin;
    const bool component = begin > 0 && name[begin - 1] == '.' && end < name.size() && name[end] == '.';
    if (component) return name.substr(begin, end - begin);
    end = begin;
  }
  return {};
}

}  // namespace

WeightIndex::WeightIndex(ModelLayout layout) : layout_(std::move(layout)) {
  const std::size_t count = layout_.named.size() + layout_.expert_rules.size();
  for (const ExpertMap& map : layout_.experts) experts_max_ = std::max(experts_max_, map.experts());
  rules_.reserve(count);
  named_.reserve(layout_.named.size());
  const auto add = [this](const TensorRule& rule) {
    const auto index = static_cast<std::uint32_t>(rules_.size());
    rules_.push_back(&rule);
    by_param_[rule.param].push_back(index);
    return index;
  };
  for (const NamedRule& named : layout_.named) {
    named_.emplace(named.name, add(named.rule));
    name_bytes_max_ = std::max(name_bytes_max_, named.name.size());
  }
  for (const ExpertRule& expert : layout_.expert_rules) {
    experts_[expert.prefix].emplace_back(expert.suffix, add(expert.rule));
    name_bytes_max_ = std::max(name_bytes_max_, expert.prefix.size() + kExpertDigitsMax + 1 + expert.suffix.size());
  }
}

Resolution WeightIndex::placed(std::uint32_t rule, std::int32_t expert) const {
  const std::span<const std::int32_t> slots = expert < 0 ? std::span<const std::int32_t>(kOnlySlot) : map_of(rule).slots_of(expert);
  return {.kind = slots.empty() ? Resolution::Kind::kNotLocal : Resolution::Kind::kPlaced, .rule = rule, .expert = expert, .slots = slots};
}

std::optional<Resolution> WeightIndex::resolve_expert(std::string_view name) const {
  // The id is a number between two dots, and most often the last one of the name.
  for (std::size_t dot = name.rfind('.'); dot != std::string_view::npos && dot != 0;) {
    const std::size_t before = name.rfind('.', dot - 1);
    if (before == std::string_view::npos) break;
    if (is_digit(name[dot - 1])) {
      const auto expert = canonical_id(name.substr(before + 1, dot - before - 1), experts_max_);
      const auto found = expert ? experts_.find(name.substr(0, before + 1)) : experts_.end();
      if (found != experts_.end()) {
        const std::string_view suffix = name.substr(dot + 1);
        for (const auto& [known, rule] : found->second) {
          if (known == suffix && *expert < map_of(rule).experts()) return placed(rule, *expert);
        }
      }
    }
    dot = before;
  }
  return std::nullopt;
}

Resolution WeightIndex::resolve_scan(std::string_view name) const {
  if (!layout_.scan) return {};
  const ScanAnswer answer = layout_.scan(name);
  if (answer.kind == ScanAnswer::Kind::kDropped) return {.kind = Resolution::Kind::kDropped, .slots = {}};
  if (answer.kind == ScanAnswer::Kind::kUnknown) return {};
  const auto found = by_param_.find(answer.param);
  if (found == by_param_.end()) return {};
  for (const std::uint32_t rule : found->second) {
    if (rules_[rule]->shard != answer.shard || is_expert(rule) != (answer.expert >= 0)) continue;
    if (answer.expert < 0 || answer.expert < map_of(rule).experts()) return placed(rule, answer.expert);
  }
  return {};
}

Resolution WeightIndex::resolve(std::string_view name) const {
  if (name.size() <= name_bytes_max_) {
    if (const auto expert = resolve_expert(name)) return *expert;
    if (const auto found = named_.find(name); found != named_.end()) return placed(found->second, -1);
  }
  return resolve_scan(name);
}

std::vector<WeightIndex::Needed> WeightIndex::needed(std::span<const std::string> scopes) const {
  const auto wanted = [&](const TensorRule& rule) {
    return !rule.optional && std::find(scopes.begin(), scopes.end(), rule.scope) != scopes.end();
  };
  std::vector<Needed> names;
  std::uint32_t index = 0;
  for (const NamedRule& named : layout_.named) {
    if (wanted(named.rule)) names.push_back({.name = named.name, .rule = index, .expert = -1});
    ++index;
  }
  for (const ExpertRule& rule : layout_.expert_rules) {
    const ExpertMap& map = layout_.experts[rule.map];
    for (std::int32_t e = 0; wanted(rule.rule) && e < map.experts(); ++e) {
      if (map.slots_of(e).empty()) continue;
      names.push_back({.name = rule.prefix + std::to_string(e) + "." + rule.suffix, .rule = index, .expert = e});
    }
    ++index;
  }
  return names;
}

std::vector<std::string> WeightIndex::scopes() const {
  std::vector<std::string> scopes;
  for (const TensorRule* rule : rules_) {
    if (std::find(scopes.begin(), scopes.end(), rule->scope) == scopes.end()) scopes.push_back(rule->scope);
  }
  return scopes;
}

std::vector<std::string> WeightIndex::nearest(std::string_view name, std::size_t count) const {
  const auto id = name.size() <= 2 * name_bytes_max_ ? canonical_id(last_number(name), experts_max_) : std::nullopt;
  const std::string digits = std::to_string(id.value_or(0));
  std::vector<std::pair<std::int64_t, std::uint32_t>> scored;
  scored.reserve(rules_.size());
  const auto known = [&](std::uint32_t rule) {
    if (rule < layout_.named.size()) return layout_.named[rule].name;
    const ExpertRule& expert = layout_.expert_rules[rule - layout_.named.size()];
    return expert.prefix + digits + "." + expert.suffix;
  };
  for (std::uint32_t rule = 0; rule < rules_.size(); ++rule) scored.emplace_back(-likeness(name, known(rule)), rule);
  count = std::min(count, scored.size());
  std::partial_sort(scored.begin(), scored.begin() + static_cast<std::ptrdiff_t>(count), scored.end());
  std::vector<std::string> names;
  names.reserve(count);
  for (std::size_t i = 0; i < count; ++i) names.push_back(known(scored[i].second));
  return names;
}

}  // namespace headrace
