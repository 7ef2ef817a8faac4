#include "receiver/applier.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/wire/limits.h"

namespace headrace {
namespace {

constexpr std::int64_t kDrainMs = 600'000;  // copies of whole models end long before

std::string sum_text(const FingerprintSum& sum) {
  return fmt::format("{:016x}{:016x}", sum.lanes[0], sum.lanes[1]);
}

}  // namespace

LiveFingerprint live_fingerprint(const TensorRule& rule, const PlanGeometry& geometry, std::span<const std::int32_t> slots, TensorKey key,
                                 const Box& box) {
  LiveFingerprint result;
  for (const Placement& placement : rule.placements) {
    if (!(placement.box == box)) continue;
    const std::byte* storage = geometry.storage(placement.storage);
    const std::int64_t copies = repeats(placement.copy);
    for (const std::int32_t slot : slots) {
      for (std::int64_t r = 0; r < copies; ++r) {
        StridedCopy nest = repeat(placement.copy, r);
        nest.dst_offset += slot * placement.slot_stride;
        const FingerprintSum sum = fingerprint_nest(key, nest, storage);
        if (result.copies++ == 0) {
          result.sum = sum;
        } else if (!(sum == result.sum)) {
          result.equal = false;
        }
      }
    }
  }
  return result;
}

ApplyStats make_batch(std::span<const SyncPlan::KeyedJob> jobs, ExpertRuns& runs, std::vector<CopyJob>& batch) {
  const std::uint64_t runs_before = runs.runs();
  const std::uint64_t experts_before = runs.experts();
  for (const SyncPlan::KeyedJob& keyed : jobs) {
    if (keyed.expert) {
      runs.add(keyed.key, keyed.job);
    } else {
      batch.push_back(keyed.job);
    }
  }
  runs.flush(batch);
  ApplyStats stats;
  stats.runs = runs.runs() - runs_before;
  stats.run_experts = runs.experts() - experts_before;
  return stats;
}

Result<std::unique_ptr<Applier>> Applier::create(Device& device, std::uint32_t threads) {
  std::unique_ptr<Applier> applier(new Applier(device.identity().kind, std::max<std::uint32_t>(threads, 1)));
  Result<std::unique_ptr<Stream>> stream = device.create_stream("headrace-apply");
  if (!stream.ok()) return stream.status();
  applier->stream_ = std::move(stream).value();
  return applier;
}

Applier::~Applier() {
  if (stream_ != nullptr) (void)stream_->synchronize(kDrainMs);
}

Status Applier::apply_async(std::vector<SyncPlan::KeyedJob> jobs, std::function<void(const ApplyStats&)> done) {
  // std::function wants copyable captures; the jobs are many, so they are shared instead of copied.
  auto shared = std::make_shared<std::vector<SyncPlan::KeyedJob>>(std::move(jobs));
  return stream_->enqueue([this, shared, done = std::move(done)] {
    batch_.clear();
    ApplyStats stats = make_batch(*shared, runs_, batch_);
    stats.copies = executor_.run(batch_);
    progress_.fetch_add(1, std::memory_order_relaxed);
    done(stats);
  });
}

Status Applier::prove_async(std::shared_ptr<const SyncPlan> plan, ExpectedSums expected, std::function<void(ProofOutcome)> done) {
  auto sums = std::make_shared<ExpectedSums>(std::move(expected));
  return stream_->enqueue([this, plan = std::move(plan), sums, done = std::move(done)] { done(prove(*plan, *sums)); });
}

Status Applier::run_async(std::function<void()> work) {
  return stream_->enqueue([this, work = std::move(work)] {
    // Before the work, which tells the progress thread of its end: counted after that it could move a deadline at any later time.
    progress_.fetch_add(1, std::memory_order_relaxed);
    work();
  });
}

ProofOutcome Applier::prove(const SyncPlan& plan, const ExpectedSums& expected) {
  ProofOutcome outcome;
  std::mutex mutex;  // guards outcome
  const auto tensors = plan.tensors();
  constexpr std::size_t kGroup = 32;  // tensors a work item: small enough to balance, large enough not to notice
  pool_.run((tensors.size() + kGroup - 1) / kGroup, [&](std::size_t group) {
    std::uint64_t compared = 0;
    for (std::size_t t = group * kGroup; t < std::min(tensors.size(), (group + 1) * kGroup); ++t) {
      const PlanTensor& tensor = tensors[t];
      const TensorRule& rule = plan.index().rule(tensor.rule);
      FingerprintSum live;
      bool equal = true;
      for (const Box& box : plan.geometry().of(tensor.rule).boxes) {
        const LiveFingerprint part = live_fingerprint(rule, plan.geometry(), tensor.slots, tensor.key, box);
        live += part.sum;
        equal = equal && part.equal;
        compared += part.copies;
      }
      if (equal && live == expected[t]) continue;
      const std::lock_guard lock(mutex);
      ++outcome.differences_total;
      if (outcome.differences.size() >= limits::kDefectsMax) continue;
      const auto& [s, e] = tensor.entries.front();
      const std::string& name = plan.entry(s, e).name;
      wire::Failure failure = wire::make_failure(
          Status(Code::kCorruption,
                 fmt::format("{}: {}", name, equal ? "fingerprint of live storage differs" : "copies of it differ from each other")),
          "prepare");
      failure.name = name;
      failure.expected = sum_text(expected[t]);
      failure.actual = sum_text(live);
      outcome.differences.push_back(std::move(failure));
    }
    progress_.fetch_add(1, std::memory_order_relaxed);
    const std::lock_guard lock(mutex);
    outcome.compared += compared;
  });
  return outcome;
}

}  // namespace headrace
