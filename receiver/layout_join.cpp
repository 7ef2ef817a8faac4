#include "receiver/layout_join.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "receiver/staged_groups.h"
#include "receiver/sync_plan.h"
#include "receiver/weight_index.h"

namespace headrace {
namespace {

Status refuse(std::string_view name, std::string_view why) {
  return Status(Code::kUnsupported, fmt::format("layouts not joined: {}: {}", name, why));
}

std::vector<Dtype> common(const std::vector<Dtype>& a, const std::vector<Dtype>& b) {
  std::vector<Dtype> both;
  std::copy_if(a.begin(), a.end(), std::back_inserter(both), [&](Dtype dtype) { return std::find(b.begin(), b.end(), dtype) != b.end(); });
  return both;
}

/// Adds to `rule` what another model does with the same tensor.
Status merge(std::string_view name, TensorRule& rule, const TensorRule& other) {
  if (rule.shape != other.shape) return refuse(name, fmt::format("shapes {} and {}", to_string(rule.shape), to_string(other.shape)));
  if (rule.scope != other.scope) return refuse(name, fmt::format("scopes {} and {}", rule.scope, other.scope));
  if (rule.dtypes.front() != other.dtypes.front()) {
    return refuse(name, fmt::format("kept as {} and as {}", dtype_name(rule.dtypes.front()), dtype_name(other.dtypes.front())));
  }
  for (const Placement& a : rule.placements) {
    for (const Placement& b : other.placements) {
      if (a.box == b.box || intersect(a.box, b.box).empty()) continue;
      return refuse(name, fmt::format("boxes {} and {} overlap without being equal", to_string(a.box), to_string(b.box)));
    }
  }
  if (rule.placements.size() + other.placements.size() > kPlacementsMax) {
    return refuse(name, fmt::format("{} placements", rule.placements.size() + other.placements.size()));
  }
  rule.dtypes = common(rule.dtypes, other.dtypes);
  rule.casts = common(rule.casts, other.casts);
  rule.optional = rule.optional && other.optional;
  rule.placements.insert(rule.placements.end(), other.placements.begin(), other.placements.end());
  return ok_status();
}

/// With rules for the entries of groups, which only place_groups() gives them.
Result<WeightIndex> indexed(ModelLayout layout) {
  HEADRACE_RETURN_IF_ERROR(place_groups(layout));
  return WeightIndex(std::move(layout));
}

/// No tensor of `known` may be something else to `other`: under another of its names, in a group, or as an expert. One expert speaks for
/// all of its rule.
Status check_names(const WeightIndex& known, const WeightIndex& other) {
  for (std::uint32_t r = 0; r < known.rule_count(); ++r) {
    const bool expert = r >= known.layout().named.size();
    const std::string name = known.name_of(r, expert ? 0 : -1);
    const Resolution found = other.resolve(name);
    if (found.kind != Resolution::Kind::kPlaced && found.kind != Resolution::Kind::kNotLocal) continue;
    const std::string theirs = other.name_of(found.rule, found.expert);
    if (theirs != name) return refuse(name, fmt::format("one model knows it as {}", theirs));
    if (expert || found.expert >= 0) return refuse(name, "both models have experts of this name");
    if (known.rule(r).group >= 0 || other.rule(found.rule).group >= 0) return refuse(name, "both take it, and one in a staged group");
  }
  return ok_status();
}

/// Everything that `layout` calls by a name of its own, under another one, and by numbers that stand behind those of `before`.
void move_behind(ModelLayout& layout, const ModelLayout& before, std::string_view prefix) {
  const auto rename = [&](std::string& name) { name.insert(0, prefix); };
  const auto storages = static_cast<std::uint32_t>(before.storages.size());
  const auto maps = static_cast<std::uint32_t>(before.experts.size());
  const auto move_rule = [&](TensorRule& rule) {
    rename(rule.param);
    for (Placement& placement : rule.placements) placement.storage += storages;
  };
  for (StorageSpec& spec : layout.storages) {
    rename(spec.name);
    if (!spec.alias_of.empty()) rename(spec.alias_of);
  }
  for (NamedRule& named : layout.named) move_rule(named.rule);
  for (ExpertRule& expert : layout.expert_rules) {
    move_rule(expert.rule);
    expert.map += maps;
  }
  for (ConstantRule& constant : layout.constants) constant.storage += storages;
  for (PairedValues& pair : layout.paired_values) pair.map += maps;
  for (LaunchConstant& constant : layout.launch_constants) {
    rename(constant.name);
    constant.map += maps;
  }
  for (StagedGroup& group : layout.groups) {
    rename(group.name);
    for (std::uint32_t& output : group.outputs) output += storages;
  }
}

/// Each model's own scan, in turn. A name that both find a parameter for is that of one tensor with both places, or none that is known.
NameScan both_scans(std::shared_ptr<const WeightIndex> first, std::shared_ptr<const WeightIndex> second, std::string prefix) {
  return [first = std::move(first), second = std::move(second), prefix = std::move(prefix)](std::string_view name) {
    const auto ask = [&](const WeightIndex& index) { return index.layout().scan ? index.layout().scan(name) : ScanAnswer{}; };
    const auto tensor = [&](const WeightIndex& index) {
      const Resolution found = index.resolve(name);
      const bool known = found.kind == Resolution::Kind::kPlaced || found.kind == Resolution::Kind::kNotLocal;
      return known ? index.name_of(found.rule, found.expert) : std::string();
    };
    ScanAnswer a = ask(*first);
    ScanAnswer b = ask(*second);
    b.param.insert(0, prefix);
    if (a.kind != ScanAnswer::Kind::kParam) return b.kind == ScanAnswer::Kind::kUnknown ? a : b;
    if (b.kind != ScanAnswer::Kind::kParam || tensor(*first) == tensor(*second)) return a;
    return ScanAnswer{};
  };
}

}  // namespace

Result<ModelLayout> join_layouts(ModelLayout first, ModelLayout second, std::string_view prefix) {
  std::unordered_set<std::string> storages;
  for (const StorageSpec& spec : first.storages) storages.insert(spec.name);
  for (const StorageSpec& spec : second.storages) {
    const std::string name = fmt::format("{}{}", prefix, spec.name);
    if (storages.contains(name)) return Status(Code::kInvalidArgument, fmt::format("layouts not joined: both have a storage {}", name));
  }
  Result<WeightIndex> one = indexed(first);
  if (!one.ok()) return one.status();
  Result<WeightIndex> two = indexed(second);
  if (!two.ok()) return two.status();
  HEADRACE_RETURN_IF_ERROR(check_names(one.value(), two.value()));
  HEADRACE_RETURN_IF_ERROR(check_names(two.value(), one.value()));
  if (first.scan || second.scan) {
    first.scan = both_scans(std::make_shared<const WeightIndex>(std::move(one).value()),
                            std::make_shared<const WeightIndex>(std::move(two).value()), std::string(prefix));
  }

  move_behind(second, first, prefix);
  std::unordered_map<std::string_view, std::size_t> by_name;
  for (std::size_t i = 0; i < first.named.size(); ++i) by_name.emplace(first.named[i].name, i);
  std::vector<NamedRule> added;
  for (NamedRule& named : second.named) {
    if (const auto found = by_name.find(named.name); found != by_name.end()) {
      HEADRACE_RETURN_IF_ERROR(merge(named.name, first.named[found->second].rule, named.rule));
    } else {
      added.push_back(std::move(named));
    }
  }
  const auto append = [](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  append(first.named, added);
  append(first.storages, second.storages);
  append(first.experts, second.experts);
  append(first.expert_rules, second.expert_rules);
  append(first.constants, second.constants);
  append(first.paired_values, second.paired_values);
  append(first.launch_constants, second.launch_constants);
  append(first.tied, second.tied);
  append(first.groups, second.groups);
  if (first.family != second.family) first.family += "+" + second.family;
  return first;
}

}  // namespace headrace
