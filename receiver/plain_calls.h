#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/base/digest.h"
#include "receiver/receiver.h"
#include "receiver/sync_plan.h"

namespace headrace {

/// What the calls of load() meant in the update before: an engine that hands over the same tensors in the same order at every step is
/// resolved once. Keeps a plan per call, and that of the whole. Progress thread only.
class PlainCalls {
 public:
  /// A new update begins, with experts where `experts` says.
  void begin(const Digest& experts);
  /// The plan of the call that comes now, where it brings what the same call of the update before brought: names, dtypes, shapes.
  std::shared_ptr<const SyncPlan> known(std::span<const NamedView> tensors) const;
  /// The call that comes now was taken, and resolved to `plan`.
  void take(std::shared_ptr<const SyncPlan> plan);
  /// All calls taken, as one sender's part. The plan of the whole where nothing differs from the update that it was made for.
  std::shared_ptr<const SyncPlan> whole() const;
  std::vector<wire::ManifestEntry> entries() const;
  void keep_whole(std::shared_ptr<const SyncPlan> plan);
  /// The engine is updated by senders.
  void forget() { *this = PlainCalls(); }

 private:
  std::vector<std::shared_ptr<const SyncPlan>> calls_;
  std::size_t taken_ = 0;  // of calls_, by the update that is open
  Digest experts_{};
  std::shared_ptr<const SyncPlan> whole_;  // of all calls_; none once one of them has changed
};

}  // namespace headrace
