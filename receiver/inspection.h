#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/wire/messages.h"
#include "receiver/applier.h"
#include "receiver/sync_plan.h"

namespace headrace {

/// Reads live storage for tools: fingerprints per checkpoint tensor, bytes of one. Built by the progress thread, used on the apply thread,
/// so that what it sees is ordered with the writes.
class Inspection {
 public:
  /// All outlive the inspection.
  Inspection(const WeightIndex& index, const PlanGeometry& geometry, const StorageTable& table);
  /// Where experts live from now on.
  void set_experts(std::shared_ptr<const ExpertMaps> experts);

  /// Tensors [from, from + count) of what this rank holds, by their checkpoint names; at most limits::kManifestEntriesMax values.
  wire::FingerprintReply fingerprints(std::uint64_t from, std::uint64_t count) const;
  /// Bytes of a box of a tensor. kInvalidArgument: an unknown name, one that is not here, a box that is too large, lies in no local region
  /// or is not cut at the granule.
  Result<wire::ReadReply> read(const wire::ReadRequest& request) const;
  wire::StorageReply storages() const;

 private:
  const WeightIndex* index_;
  const PlanGeometry* geometry_;
  const StorageTable* table_;
  std::shared_ptr<const ExpertMaps> experts_;
  std::vector<WeightIndex::Needed> held_;
};

}  // namespace headrace
