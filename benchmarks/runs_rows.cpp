#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "benchmarks/planned_update.h"
#include "benchmarks/rows.h"
#include "benchmarks/v41_model.h"

// Nothing is timed here: how many nests remain of a bucket's experts is a matter of counting. No byte is read or written.

namespace headrace::bench {
namespace {

constexpr std::int64_t kBucketBytes = std::int64_t{512} << 20;
constexpr std::int32_t kRanks = 4;

struct Counts {
  std::uint64_t experts = 0;  // tensors of experts
  std::uint64_t runs = 0;
  std::uint64_t forced = 0;  // (bucket, layer, parameter, shard) that occur: the runs that ends of buckets and layers force
  std::size_t buckets = 0;
};

/// Rank 0's runs when these cells go into buckets.
Counts count_runs(const PlannedUpdate& update, const BucketPlan& cells) {
  // Addresses to count with; staging buffers are used in turn, but a run never reaches from one into the next.
  const std::byte* staging = update.plan().geometry().storage(0);
  ExpertRuns runs;
  Counts counts;
  std::vector<SyncPlan::KeyedJob> jobs;
  std::vector<CopyJob> batch;
  for (const StagedBucket& bucket : fill_buckets(cells, update.entries(), kBucketBytes)) {
    jobs.clear();
    for (const StagedCell& staged : bucket.cells) {
      const Cell& cell = cells.cells[staged.cell];
      const std::vector<std::uint32_t>& group = cells.groups[cell.group];
      if (std::find(group.begin(), group.end(), 0U) == group.end()) continue;
      const PlanTensor& tensor = update.plan().tensors()[static_cast<std::size_t>(update.plan().entries(0)[staged.entry].tensor)];
      throw_if_error(update.plan().append_jobs(tensor, cell.box, staging + staged.offset, {}, jobs));
    }
    std::set<std::uint32_t> keys;
    for (const SyncPlan::KeyedJob& job : jobs) {
      if (!job.expert) continue;
      keys.insert(job.key);
      runs.add(job.key, job.job);
    }
    batch.clear();
    runs.flush(batch);
    counts.forced += keys.size();
    ++counts.buckets;
  }
  counts.experts = runs.experts();
  counts.runs = runs.runs();
  return counts;
}

Row row_of(const std::string& name, const Counts& counts) {
  const auto experts = static_cast<double>(counts.experts);
  return Row{.name = name, .value = experts / static_cast<double>(counts.runs), .unit = "experts"}
      .against("what ends of buckets and layers leave", experts / static_cast<double>(counts.forced))
      .remark(fmt::format("a run; {} tensors of experts in {} runs, {} forced, {} buckets of 512 MiB", counts.experts, counts.runs,
                          counts.forced, counts.buckets));
}

/// Cells of buckets that all ranks read.
BucketPlan shared_cells(const PlannedUpdate& update) {
  std::vector<std::vector<wire::Wanted>> wanted;
  for (std::int32_t r = 0; r < kRanks; ++r) {
    const ModelLayout layout = v41_layout({}, kRanks, r);
    const StorageBlock storage = StorageBlock::reserve(layout);
    wanted.push_back(wanted_by(layout, storage, update.entries()));
  }
  const std::vector<std::span<const wire::Wanted>> answers(wanted.begin(), wanted.end());
  const std::vector<std::string> receivers{"0", "1", "2", "3"};
  return make_bucket_plan({.entries = update.entries(),
                           .wanted = answers,
                           .receivers = receivers,
                           .bucket_bytes_max = kBucketBytes,
                           .unwanted = Unwanted::kAllow})
      .value_or_throw();
}

}  // namespace

void runs_rows(const Selection& selection, std::vector<Row>& rows) {
  const ModelLayout layout = v41_layout({}, kRanks, 0);
  const StorageBlock storage = StorageBlock::reserve(layout);
  for (const std::int64_t trainer_ranks : {1, 2, 4}) {
    const std::string name = fmt::format("runs/v41/r{}", trainer_ranks);
    const bool alone = selection.wants(name);
    const bool shared = selection.wants(name + "/shared");
    if (!alone && !shared) continue;
    const PlannedUpdate update(layout, storage, sender_order(layout, trainer_ranks, true), kBucketBytes);
    if (alone) rows.push_back(row_of(name, count_runs(update, update.bucket_plan())).ratio_at_least(0.95));
    if (shared) rows.push_back(row_of(name + "/shared", count_runs(update, shared_cells(update))));
  }
}

}  // namespace headrace::bench
