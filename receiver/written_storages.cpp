#include "receiver/written_storages.h"

#include <fmt/format.h>

#include <string_view>
#include <unordered_map>

#include "receiver/staged_groups.h"

namespace headrace {

WrittenStorages::WrittenStorages(const WeightIndex& index, const PlanGeometry& geometry, std::span<const std::string> optional_names)
    : index_(&index) {
  const std::vector<StorageSpec>& storages = index.layout().storages;
  needed_by_.resize(storages.size());
  written_.resize(storages.size());
  std::unordered_map<std::string_view, std::uint32_t> by_name;  // of those before; the first of a name
  for (std::uint32_t s = 0; s < storages.size(); ++s) {
    const auto shared = by_name.find(storages[s].alias_of);
    memory_.push_back(shared == by_name.end() ? s : memory_[shared->second]);
    by_name.try_emplace(storages[s].name, s);
  }
  for (const WeightIndex::Needed& needed : index.needed(index.scopes())) {
    if (geometry.of(needed.rule).wanted_bytes == 0 || matches_any(optional_names, needed.name)) continue;
    const TensorRule& rule = index.rule(needed.rule);
    each_written(index.layout(), rule, [&](std::uint32_t s) {
      if (!storages[s].optional) needed_by_[memory_[s]] = rule.scope;
    });
  }
}

void WrittenStorages::mark(const SyncPlan& plan, bool there, std::vector<bool>& storages) const {
  for (const WrittenStorage& written : plan.written()) storages[memory_[written.storage]] = there;
}

void WrittenStorages::forget() {
  written_.assign(written_.size(), false);
}

void WrittenStorages::begin(const SyncPlan& plan) {
  mark(plan, false, written_);
}

void WrittenStorages::commit(const SyncPlan& plan) {
  mark(plan, true, written_);
}

std::vector<wire::Failure> WrittenStorages::missing(const SyncPlan& plan) const {
  std::vector<bool> there = written_;
  mark(plan, true, there);
  std::vector<wire::Failure> defects;
  for (std::size_t s = 0; s < there.size(); ++s) {
    if (there[s] || needed_by_[s].empty()) continue;
    const std::string& name = index_->layout().storages[s].name;
    wire::Failure failure = wire::make_failure(
        Status(
            Code::kFailedPrecondition,
            fmt::format(
                "storage {} holds nothing that was committed since its content was last lost, and this update does not bring it: scope {}",
                name, needed_by_[s])),
        "manifest");
    failure.expected = needed_by_[s];
    defects.push_back(std::move(failure));
  }
  return defects;
}

}  // namespace headrace
