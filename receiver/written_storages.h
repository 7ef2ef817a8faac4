#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/wire/messages.h"
#include "receiver/sync_plan.h"

namespace headrace {

/// Which storages hold what an update brought and committed, since the content of live storage was last lost: an update of one scope may
/// only be published where everything outside of it is there. Pure; one thread.
class WrittenStorages {
 public:
  /// Asks for every storage that a tensor is written to, unless the storage, its rules or `optional_names` (fnmatch patterns) say that it
  /// may stay unwritten. Both outlive the object.
  WrittenStorages(const WeightIndex& index, const PlanGeometry& geometry, std::span<const std::string> optional_names);

  /// All content is lost, or about to be written by somebody who has not said what of it.
  void forget();
  /// The plan's storages are about to be written: until commit() they hold neither old nor new.
  void begin(const SyncPlan& plan);
  void commit(const SyncPlan& plan);
  /// One defect for each storage that holds nothing and that the plan does not bring, in the order of the table.
  std::vector<wire::Failure> missing(const SyncPlan& plan) const;

 private:
  /// Sets what `storages` says of each storage that the plan writes.
  void mark(const SyncPlan& plan, bool there, std::vector<bool>& storages) const;

  const WeightIndex* index_;
  std::vector<std::uint32_t> memory_;   // per storage: the one whose memory it shares, itself for most
  std::vector<std::string> needed_by_;  // per storage: the scope that brings it, empty where nobody asks for it
  std::vector<bool> written_;
};

}  // namespace headrace
