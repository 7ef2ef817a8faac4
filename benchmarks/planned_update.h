#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/mapped_region.h"
#include "core/base/worker_pool.h"
#include "core/device/device.h"
#include "kernels/executor.h"
#include "receiver/expert_runs.h"
#include "receiver/storage_table.h"
#include "receiver/sync_plan.h"
#include "receiver/weight_index.h"
#include "sender_sdk/bucket_plan.h"

namespace headrace::bench {

/// Live storage of a layout as one block, one storage behind the other. Owns it; its table points into it.
class StorageBlock {
 public:
  /// Memory that is backed and touched.
  static StorageBlock allocate(const ModelLayout& layout, Device& device);
  /// Addresses only, for rows that never write: nothing may read or write them.
  static StorageBlock reserve(const ModelLayout& layout);

  const StorageTable& table() const noexcept { return *table_; }
  std::span<std::byte> bytes() const noexcept { return bytes_; }
  /// Where every storage lies, as an engine would report it.
  std::vector<StorageLocation> locations() const;

 private:
  StorageBlock(const ModelLayout& layout, std::span<std::byte> bytes);

  std::unique_ptr<DeviceMemory> memory_;  // one of these two owns
  MappedRegion region_;
  std::span<std::byte> bytes_;
  std::unique_ptr<StorageTable> table_;
};

/// A cell of an update as it lies in its bucket.
struct StagedCell {
  std::uint32_t entry = 0;
  std::uint32_t cell = 0;   // index into BucketPlan::cells
  std::int64_t offset = 0;  // in the staging buffer
  std::int64_t bytes = 0;
};
struct StagedBucket {
  std::vector<StagedCell> cells;
  std::int64_t bytes = 0;  // of the staging buffer
};

/// The cells in the order of the entries, back to back at cache lines, a new bucket whenever the next cell does not fit: what a sender
/// does with them. A cell is never larger than a bucket.
std::vector<StagedBucket> fill_buckets(const BucketPlan& plan, std::span<const wire::ManifestEntry> entries, std::int64_t bucket_bytes);

/// One rank's update with everything that is known before its first byte.
class PlannedUpdate {
 public:
  /// `storage` outlives the update. Only the rank of `layout` receives; what it does not want is in no bucket.
  PlannedUpdate(ModelLayout layout, const StorageBlock& storage, std::vector<wire::ManifestEntry> entries, std::int64_t bucket_bytes);

  const SyncPlan& plan() const noexcept { return *plan_; }
  std::span<const wire::ManifestEntry> entries() const noexcept { return plan_->parts().front().entries; }
  const BucketPlan& bucket_plan() const noexcept { return bucket_plan_; }
  const std::vector<StagedBucket>& buckets() const noexcept { return buckets_; }
  /// What the rank wants, in bytes.
  std::int64_t wanted_bytes() const noexcept { return wanted_bytes_; }

  /// The nests that bring one bucket from `staging`.
  void append_jobs(const StagedBucket& bucket, const std::byte* staging, std::vector<SyncPlan::KeyedJob>& jobs) const;

 private:
  std::unique_ptr<WeightIndex> index_;  // the plan points to both
  std::unique_ptr<PlanGeometry> geometry_;
  std::shared_ptr<const SyncPlan> plan_;
  BucketPlan bucket_plan_;
  std::vector<StagedBucket> buckets_;
  std::int64_t wanted_bytes_ = 0;
};

/// What every rank of an engine wants of `entries`, as its ACCEPT says it.
std::vector<wire::Wanted> wanted_by(const ModelLayout& layout, const StorageBlock& storage, std::span<const wire::ManifestEntry> entries);

/// Joins a bucket's nests into runs and executes them in one batch. One thread.
class BucketApplier {
 public:
  explicit BucketApplier(std::size_t threads) : pool_(threads), executor_(pool_) {}
  CopyStats apply(std::span<const SyncPlan::KeyedJob> jobs);
  WorkerPool& pool() noexcept { return pool_; }
  const ExpertRuns& runs() const noexcept { return runs_; }

 private:
  WorkerPool pool_;
  HostExecutor executor_;
  ExpertRuns runs_;
  std::vector<CopyJob> batch_;  // kept for its room
};

}  // namespace headrace::bench
