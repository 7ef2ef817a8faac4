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

/// One tensor compared; `difference` is empty when it is as expected.
struct TensorProof {
  std::string difference;
  FingerprintSum expected;
  FingerprintSum actual;
  std::uint64_t compared = 0;
};

TensorProof prove_tensor(const SyncPlan& plan, const PlanTensor& tensor, const FingerprintSum& expected) {
  TensorProof proof{{}, expected, {}, 0};
  bool equal = true;
  for (const Box& box : plan.geometry().of(tensor.rule).boxes) {
    const LiveFingerprint part = live_fingerprint(plan.index().rule(tensor.rule), plan.geometry(), tensor.slots, tensor.live_key, box);
    proof.actual += part.sum;
    proof.compared += part.copies;
    equal = equal && part.equal;
  }
  if (!equal) {
    proof.difference = "copies of it differ from each other";
  } else if (!(proof.actual == expected)) {
    proof.difference =
        tensor.cast.none() ? "fingerprint of live storage differs" : "fingerprint of live storage differs from that of the conversion";
  }
  return proof;
}

wire::Failure failure_of(const SyncPlan& plan, const PlanTensor& tensor, const TensorProof& proof) {
  const auto& [s, e] = tensor.entries.front();
  const std::string& name = plan.entry(s, e).name;
  wire::Failure failure = wire::make_failure(Status(Code::kCorruption, fmt::format("{}: {}", name, proof.difference)), "prepare");
  failure.name = name;
  failure.expected = sum_text(proof.expected);
  failure.actual = sum_text(proof.actual);
  return failure;
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

Status append_work(const SyncPlan& plan, std::uint32_t tensor, const Box& box, const std::byte* source,
                   std::span<const std::int64_t> strides, ApplyWork& work) {
  const PlanTensor& row = plan.tensors()[tensor];
  HEADRACE_RETURN_IF_ERROR(plan.append_jobs(row, box, source, strides, work.jobs));
  if (row.cast.none()) return ok_status();
  Result<StridedCopy> nest = plan.tensor_nest(row, box, strides);
  if (!nest.ok()) return nest.status();
  work.casts.push_back({tensor, std::move(nest).value(), source});
  return ok_status();
}

Status Applier::apply_async(std::shared_ptr<const SyncPlan> plan, ApplyWork work, std::function<void(const ApplyStats&)> done) {
  // std::function wants copyable captures; the jobs are many, so they are shared instead of copied.
  auto shared = std::make_shared<ApplyWork>(std::move(work));
  return stream_->enqueue([this, plan = std::move(plan), shared, done = std::move(done)] {
    batch_.clear();
    ApplyStats stats = make_batch(shared->jobs, runs_, batch_);
    sum_casts(*plan, *shared, stats);
    stats.copies = executor_.run(batch_);
    progress_.fetch_add(1, std::memory_order_relaxed);
    done(stats);
  });
}

void Applier::sum_casts(const SyncPlan& plan, const ApplyWork& work, ApplyStats& stats) {
  stats.cast_sums.resize(work.casts.size());
  pool_.run(work.casts.size(), [&](std::size_t i) {
    const CastRead& read = work.casts[i];
    const PlanTensor& tensor = plan.tensors()[read.tensor];
    stats.cast_sums[i] = {read.tensor, fingerprint_cast(tensor.key, tensor.live_key, tensor.cast, read.memory_to_tensor, read.memory)};
    progress_.fetch_add(1, std::memory_order_relaxed);
  });
}

Status Applier::prove_async(std::shared_ptr<const SyncPlan> plan, ExpectedSums expected, std::vector<CastSums> converted,
                            std::function<void(ProofOutcome)> done) {
  auto sums = std::make_shared<std::pair<ExpectedSums, std::vector<CastSums>>>(std::move(expected), std::move(converted));
  return stream_->enqueue([this, plan = std::move(plan), sums, done = std::move(done)] { done(prove(*plan, sums->first, sums->second)); });
}

Status Applier::run_async(std::function<void()> work) {
  return stream_->enqueue([this, work = std::move(work)] {
    // Before the work, which tells the progress thread of its end: counted after that it could move a deadline at any later time.
    progress_.fetch_add(1, std::memory_order_relaxed);
    work();
  });
}

ProofOutcome Applier::prove(const SyncPlan& plan, const ExpectedSums& expected, const std::vector<CastSums>& converted) {
  ProofOutcome outcome;
  std::mutex mutex;  // guards outcome
  const auto tensors = plan.tensors();
  constexpr std::size_t kGroup = 32;  // tensors a work item: small enough to balance, large enough not to notice
  pool_.run((tensors.size() + kGroup - 1) / kGroup, [&](std::size_t group) {
    std::uint64_t compared = 0;
    for (std::size_t t = group * kGroup; t < std::min(tensors.size(), (group + 1) * kGroup); ++t) {
      const bool cast = !tensors[t].cast.none();
      TensorProof proof = prove_tensor(plan, tensors[t], cast ? converted[t].converted : expected[t]);
      compared += proof.compared;
      if (cast && !(converted[t].read == expected[t])) {
        proof = {"what was read for the conversion differs from what was sent", expected[t], converted[t].read, proof.compared};
      }
      if (proof.difference.empty()) continue;
      const std::lock_guard lock(mutex);
      ++outcome.differences_total;
      if (outcome.differences.size() < limits::kDefectsMax) outcome.differences.push_back(failure_of(plan, tensors[t], proof));
    }
    progress_.fetch_add(1, std::memory_order_relaxed);
    const std::lock_guard lock(mutex);
    outcome.compared += compared;
  });
  return outcome;
}

}  // namespace headrace
