#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/fingerprint_sum.h"
#include "core/base/worker_pool.h"
#include "core/device/device.h"
#include "core/wire/messages.h"
#include "kernels/executor.h"
#include "receiver/expert_runs.h"
#include "receiver/staged_groups.h"
#include "receiver/sync_plan.h"

namespace headrace {

/// A part of a tensor that is converted on its way into storage: what is read is summed as it is and as what it becomes.
struct CastRead {
  std::uint32_t tensor = 0;  // index into SyncPlan::tensors()
  StridedCopy memory_to_tensor;
  const std::byte* memory = nullptr;
};

/// A staged group that is whole: its hook runs when the jobs before `jobs_end` are done, and before all others.
struct GroupRun {
  std::uint32_t group = 0;             // index into ModelLayout::groups
  std::vector<std::uint32_t> tensors;  // of the plan
  std::span<std::byte> scratch;
  std::size_t jobs_end = 0;
};

/// A copy that brings every byte of one given tensor to its only place, from where it lies packed.
struct SummedCopy {
  std::size_t given = 0;  // which tensor
  TensorKey key;
  CopyJob job;
};
/// Whether a job is such a copy of the packed tensor `source`.
bool brings_all_once(const CopyJob& job, std::span<const std::byte> source);

/// The work of one bucket, or of one call.
struct ApplyWork {
  std::vector<SyncPlan::KeyedJob> jobs;
  std::vector<CastRead> casts;
  std::vector<GroupRun> groups;
  /// Of a call: how many tensors its caller gave, the copies of those that are summed in the same pass, and the sums of all others, asked
  /// for in any order and on any thread.
  std::size_t given = 0;
  std::vector<SummedCopy> summed;
  std::function<CastSums(std::size_t)> sum_given;
};
/// Appends what brings `box` of a tensor from `source` to all its places; see SyncPlan::append_jobs().
Status append_work(const SyncPlan& plan, std::uint32_t tensor, const Box& box, const std::byte* source,
                   std::span<const std::int64_t> strides, ApplyWork& work, std::byte* scratch = nullptr);

/// What a bucket's execution did.
struct ApplyStats {
  CopyStats copies;
  std::vector<std::pair<std::uint32_t, CastSums>> cast_sums;         // per CastRead
  std::vector<CastSums> given_sums;                                  // per given tensor
  std::vector<std::pair<std::uint32_t, FingerprintSum>> input_sums;  // per tensor of a staged group, read from scratch before its hook
  Status status;                                                     // of the hooks; what came after the first failure was not done
  std::uint64_t runs = 0;
  std::uint64_t run_experts = 0;
};

/// The batch of one bucket: copies of experts joined into runs, the others as they are. Appends to `batch` and fills in the runs.
ApplyStats make_batch(std::span<const SyncPlan::KeyedJob> jobs, ExpertRuns& runs, std::vector<CopyJob>& batch);

/// What the senders say a tensor's bytes sum to, in the order of SyncPlan::tensors().
using ExpectedSums = std::vector<FingerprintSum>;

struct ProofOutcome {
  std::uint64_t compared = 0;  // values, each repeat and replica by itself
  std::vector<wire::Failure> differences;
  std::uint64_t differences_total = 0;
};

/// Does the work on live storage, in order, on one stream. Calls return at once; `done` runs on the stream's thread after the work, with
/// everything the work wrote visible. Called by the progress thread only.
class Applier {
 public:
  /// `device` and `hooks` outlive the applier. `threads` copy and sum.
  static Result<std::unique_ptr<Applier>> create(Device& device, std::uint32_t threads, const StagedHooks& hooks);
  /// Waits for what is enqueued: work on live storage cannot be abandoned half way.
  ~Applier();
  Applier(const Applier&) = delete;
  Applier& operator=(const Applier&) = delete;

  /// Sums what is to be converted, joins the jobs into runs and executes them in one batch; then makes the summed copies.
  Status apply_async(std::shared_ptr<const SyncPlan> plan, ApplyWork work, std::function<void(const ApplyStats&)> done);
  /// Reads every tensor of the plan back through its placements and compares it with `expected`. One that was converted has two proofs:
  /// what was read from buckets sums to `expected`, and storage to what the conversion gave (`converted`, per tensor, empty when none was).
  /// Of a staged group's entries what the hook was given (`inputs`, per tensor, empty when there is none) is compared instead of storage.
  Status prove_async(std::shared_ptr<const SyncPlan> plan, ExpectedSums expected, std::vector<CastSums> converted,
                     std::vector<FingerprintSum> inputs, std::function<void(ProofOutcome)> done);
  /// Any other work that must be ordered with the above: hooks, inspection.
  Status run_async(std::function<void()> work);

  std::size_t threads() const noexcept { return pool_.threads(); }
  DeviceKind device_kind() const noexcept { return device_kind_; }
  /// Rises while work goes on, so that waiting peers see progress. Any thread.
  std::uint64_t progress() const noexcept { return progress_.load(std::memory_order_relaxed); }

 private:
  Applier(DeviceKind device_kind, std::uint32_t threads, const StagedHooks& hooks)
      : device_kind_(device_kind), hooks_(&hooks), pool_(threads), executor_(pool_) {}
  void sum_casts(const SyncPlan& plan, const ApplyWork& work, ApplyStats& stats);
  void sum_given(const ApplyWork& work, ApplyStats& stats);
  void copy(const ApplyWork& work, std::size_t begin, std::size_t end, ApplyStats& stats);
  Status run_group(const SyncPlan& plan, const GroupRun& run, ApplyStats& stats);
  struct Sums {
    ExpectedSums expected;
    std::vector<CastSums> converted;
    std::vector<FingerprintSum> inputs;
  };
  ProofOutcome prove(const SyncPlan& plan, const Sums& sums);

  const DeviceKind device_kind_;
  const StagedHooks* hooks_;
  std::atomic<std::uint64_t> progress_{0};
  WorkerPool pool_;             // used on the stream's thread
  HostExecutor executor_;       // used on the stream's thread
  ExpertRuns runs_;             // used on the stream's thread
  std::vector<CopyJob> batch_;  // used on the stream's thread; kept for its room
  std::unique_ptr<Stream> stream_;
};

/// One tensor as it lies in live storage: the sum of its first copy over all its boxes, and whether all other copies (repeats, replicas)
/// are equal to it.
struct LiveFingerprint {
  FingerprintSum sum;
  std::uint64_t copies = 0;
  bool equal = true;
};
LiveFingerprint live_fingerprint(const TensorRule& rule, const PlanGeometry& geometry, std::span<const std::int32_t> slots, TensorKey key,
                                 const Box& box, const std::byte* scratch = nullptr);

}  // namespace headrace
