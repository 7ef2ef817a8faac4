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

WeightIndex::WeightIndex(ModelLayout layout)
    : layout_(std::move(layout)),
      experts_at_load_(std::make_shared<const ExpertMaps>(layout_.experts)),
      named_(layout_.named.size()),
      experts_(layout_.expert_rules.size()) {
  const std::size_t count = layout_.named.size() + layout_.expert_rules.size();
  for (const ExpertMap& map : layout_.experts) experts_max_ = std::max(experts_max_, map.experts());
  rules_.reserve(count);
  maps_.reserve(layout_.expert_rules.size());
  const auto add = [this](const TensorRule& rule) {
    const auto index = static_cast<std::uint32_t>(rules_.size());
    rules_.push_back(&rule);
    by_param_[rule.param].push_back(index);
    return index;
  };
  for (const NamedRule& named : layout_.named) {
    named_.add(named.name, {}, add(named.rule));
    name_bytes_max_ = std::max(name_bytes_max_, named.name.size());
  }
  for (const ExpertRule& expert : layout_.expert_rules) {
    experts_.add(expert.prefix, expert.suffix, add(expert.rule));
    maps_.push_back(expert.map);
    name_bytes_max_ = std::max(name_bytes_max_, expert.prefix.size() + kExpertDigitsMax + 1 + expert.suffix.size());
  }
}

Resolution WeightIndex::placed(std::uint32_t rule, std::int32_t expert, const ExpertMaps& experts) const {
  const std::span<const std::int32_t> slots =
      expert < 0 ? std::span<const std::int32_t>(kOnlySlot) : map_of(rule, experts).slots_of(expert);
  return {.kind = slots.empty() ? Resolution::Kind::kNotLocal : Resolution::Kind::kPlaced, .rule = rule, .expert = expert, .slots = slots};
}

std::optional<Resolution> WeightIndex::resolve_expert(std::string_view name, const ExpertMaps& experts) const {
  // The id is a number between two dots, and most often the last one of the name.
  std::size_t end = std::string_view::npos;  // the dot behind the part at hand
  for (std::size_t dot = name.size(); dot-- > 0;) {
    if (name[dot] != '.') continue;
    if (end != std::string_view::npos && is_digit(name[end - 1])) {
      const auto expert = canonical_id(name.substr(dot + 1, end - dot - 1), experts_max_);
      const auto rule = expert ? experts_.find(name.substr(0, dot + 1), name.substr(end + 1)) : std::nullopt;
      if (rule && *expert < map_of(*rule, experts).experts()) return placed(*rule, *expert, experts);
    }
    end = dot;
  }
  return std::nullopt;
}

Resolution WeightIndex::resolve_scan(std::string_view name, const ExpertMaps& experts) const {
  if (!layout_.scan) return {};
  const ScanAnswer answer = layout_.scan(name);
  if (answer.kind == ScanAnswer::Kind::kDropped) return {.kind = Resolution::Kind::kDropped, .slots = {}};
  if (answer.kind == ScanAnswer::Kind::kUnknown) return {};
  const auto found = by_param_.find(answer.param);
  if (found == by_param_.end()) return {};
  for (const std::uint32_t rule : found->second) {
    if (rules_[rule]->shard != answer.shard || is_expert(rule) != (answer.expert >= 0)) continue;
    if (answer.expert < 0 || answer.expert < map_of(rule, experts).experts()) return placed(rule, answer.expert, experts);
  }
  return {};
}

Resolution WeightIndex::resolve(std::string_view name, const ExpertMaps& experts) const {
  if (name.size() <= name_bytes_max_) {
    if (const auto expert = resolve_expert(name, experts)) return *expert;
    if (const auto rule = named_.find(name, {})) return placed(*rule, -1, experts);
  }
  return resolve_scan(name, experts);
}

std::string WeightIndex::name_of(std::uint32_t rule, std::int32_t expert) const {
  if (!is_expert(rule)) return layout_.named[rule].name;
  const ExpertRule& known = layout_.expert_rules[rule - layout_.named.size()];
  return known.prefix + std::to_string(expert) + "." + known.suffix;
}

void WeightIndex::visit_needed(std::span<const std::string> scopes, const ExpertMaps& experts,
                               const std::function<void(std::uint32_t rule, std::int32_t expert)>& visit) const {
  for (std::uint32_t r = 0; r < rules_.size(); ++r) {
    if (rules_[r]->optional || std::find(scopes.begin(), scopes.end(), rules_[r]->scope) == scopes.end()) continue;
    if (!is_expert(r)) {
      visit(r, -1);
      continue;
    }
    const ExpertMap& map = map_of(r, experts);
    for (std::int32_t e = 0; e < map.experts(); ++e) {
      if (!map.slots_of(e).empty()) visit(r, e);
    }
  }
}

std::vector<WeightIndex::Needed> WeightIndex::needed(std::span<const std::string> scopes, const ExpertMaps& experts) const {
  std::vector<Needed> names;
  visit_needed(scopes, experts, [&](std::uint32_t rule, std::int32_t expert) {
    names.push_back({.name = name_of(rule, expert), .rule = rule, .expert = expert});
  });
  return names;
}

Result<ExpertMaps> WeightIndex::rebalanced(std::span<const std::vector<std::int32_t>> physical) const {
  std::vector<std::string> names(layout_.experts.size());
  for (const ExpertRule& rule : layout_.expert_rules) names.at(rule.map) = rule.prefix;
  return experts_at_load_->rebalanced(physical, names);
}

std::vector<std::string> WeightIndex::scopes() const {
  std::vector<std::string> scopes;
  for (const TensorRule* rule : rules_) {
    if (std::find(scopes.begin(), scopes.end(), rule->scope) == scopes.end()) scopes.push_back(rule->scope);
  }
  return scopes;
}

std::vector<std::string> WeightIndex::nearest(std::string_view name, std::size_t count) const {
  std::int32_t expert = 0;
  if (name.size() <= 2 * name_bytes_max_) expert = canonical_id(last_number(name), experts_max_).value_or(0);
  std::vector<std::pair<std::int64_t, std::uint32_t>> scored;
  scored.reserve(rules_.size());
  const auto known = [&](std::uint32_t rule) { return name_of(rule, expert); };
  for (std::uint32_t rule = 0; rule < rules_.size(); ++rule) scored.emplace_back(-likeness(name, known(rule)), rule);
  count = std::min(count, scored.size());
  std::partial_sort(scored.begin(), scored.begin() + static_cast<std::ptrdiff_t>(count), scored.end());
  std::vector<std::string> names;
  names.reserve(count);
  for (std::size_t i = 0; i < count; ++i) names.push_back(known(scored[i].second));
  return names;
}

}  // namespace headrace
