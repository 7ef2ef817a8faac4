#include "receiver/applier.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include "core/wire/limits.h"

namespace headrace {
namespace {

constexpr std::size_t kPiecesPerThread = 16;  // of equally many tensors, whose sizes may differ
constexpr std::int64_t kDrainMs = 600'000;    // copies of whole models end long before

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

FingerprintSum input_sum(const SyncPlan& plan, const PlanTensor& tensor, const std::byte* scratch) {
  FingerprintSum sum;
  for (const Box& box : plan.geometry().of(tensor.rule).boxes) {
    sum += live_fingerprint(plan.index().rule(tensor.rule), plan.geometry(), tensor.slots, tensor.live_key, box, scratch).sum;
  }
  return sum;
}

TensorProof prove_input(const FingerprintSum& given, const FingerprintSum& expected) {
  TensorProof proof{{}, expected, given, 1};
  if (!(given == expected)) proof.difference = "what the staged group's hook was given differs from what was sent";
  return proof;
}

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

/// The nest from where `copy` reads to the offset of the same bytes in a packed source.
StridedCopy read_offsets(const StridedCopy& copy) {
  StridedCopy offsets = copy;
  offsets.dst_offset = copy.src_offset;
  for (std::size_t d = 0; d < copy.dim_count; ++d) offsets.dims[d].dst_stride = copy.dims[d].src_stride;
  return offsets;
}

}  // namespace

bool brings_all_once(const CopyJob& job, std::span<const std::byte> source) {
  const auto bytes = static_cast<std::int64_t>(source.size());
  // As many as there are, none twice: all of them.
  return job.src == source.data() && job.cast.none() && job.copy.indexed_dim < 0 && repeats(job.copy) == 1 &&
         job.copy.dst_bytes() == bytes && validate(inverse(job.copy), std::numeric_limits<std::int64_t>::max(), bytes).ok();
}

LiveFingerprint live_fingerprint(const TensorRule& rule, const PlanGeometry& geometry, std::span<const std::int32_t> slots, TensorKey key,
                                 const Box& box, const std::byte* scratch) {
  LiveFingerprint result;
  for (const Placement& placement : rule.placements) {
    if (!(placement.box == box)) continue;
    const std::byte* storage = rule.group < 0 ? geometry.storage(placement.storage) : scratch;
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

Result<std::unique_ptr<Applier>> Applier::create(Device& device, std::uint32_t threads, const StagedHooks& hooks) {
  std::unique_ptr<Applier> applier(new Applier(device.identity().kind, threads, hooks));
  Result<std::unique_ptr<Stream>> stream = device.create_stream("headrace-apply");
  if (!stream.ok()) return stream.status();
  applier->stream_ = std::move(stream).value();
  return applier;
}

Applier::~Applier() {
  if (stream_ != nullptr) (void)stream_->synchronize(kDrainMs);
}

Status append_work(const SyncPlan& plan, std::uint32_t tensor, const Box& box, const std::byte* source,
                   std::span<const std::int64_t> strides, ApplyWork& work, std::byte* scratch) {
  const PlanTensor& row = plan.tensors()[tensor];
  HEADRACE_RETURN_IF_ERROR(plan.append_jobs(row, box, source, strides, work.jobs, scratch));
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
    ApplyStats stats;
    sum_casts(*plan, *shared, stats);
    std::size_t begin = 0;
    for (const GroupRun& run : shared->groups) {
      copy(*shared, begin, run.jobs_end, stats);
      begin = run.jobs_end;
      stats.status = run_group(*plan, run, stats);
      if (!stats.status.ok()) break;
    }
    if (stats.status.ok()) copy(*shared, begin, shared->jobs.size(), stats);
    if (stats.status.ok()) sum_given(*shared, stats);
    progress_.fetch_add(1, std::memory_order_relaxed);
    done(stats);
  });
}

void Applier::copy(const ApplyWork& work, std::size_t begin, std::size_t end, ApplyStats& stats) {
  if (begin == end) return;
  batch_.clear();
  const ApplyStats part = make_batch(std::span(work.jobs).subspan(begin, end - begin), runs_, batch_);
  stats.runs += part.runs;
  stats.run_experts += part.run_experts;
  stats.copies += executor_.run(batch_);
}

Status Applier::run_group(const SyncPlan& plan, const GroupRun& run, ApplyStats& stats) {
  const ModelLayout& layout = plan.index().layout();
  const StagedGroup& group = layout.groups[run.group];
  // In the order of the declaration, whatever the order in which the entries stand in the manifest.
  std::vector<std::span<const std::byte>> inputs;
  std::int64_t inputs_end = 0;
  for (const NamedRule& entry : group.entries) {
    const Placement& placement = plan.index().rule(plan.index().resolve(entry.name).rule).placements.front();
    const std::int64_t bytes = placement.copy.dst_bytes();
    inputs.push_back(run.scratch.subspan(static_cast<std::size_t>(placement.copy.dst_offset), static_cast<std::size_t>(bytes)));
    inputs_end = std::max(inputs_end, placement.copy.dst_offset + bytes);
  }
  for (const std::uint32_t t : run.tensors) stats.input_sums.emplace_back(t, input_sum(plan, plan.tensors()[t], run.scratch.data()));
  std::vector<std::span<std::byte>> outputs;
  for (const std::uint32_t output : group.outputs) {
    outputs.emplace_back(plan.geometry().storage(output), static_cast<std::size_t>(layout.storages[output].bytes));
  }
  const auto work_at = static_cast<std::size_t>(scratch_bytes(layout, group) - group.work_bytes);
  const StagedCall call{group.name, inputs, run.scratch.subspan(work_at, static_cast<std::size_t>(group.work_bytes)), outputs};
  const auto named = [&](Code code, const std::string& why) {
    return Status(code, fmt::format("the engine's hook {} of staged group {}{}", group.hook, group.name, why));
  };
  try {
    const Status status = hooks_->find(group.hook)->second(call);
    progress_.fetch_add(1, std::memory_order_relaxed);
    return status.ok() ? status : named(status.code(), ": " + status.message());
  } catch (const std::exception& error) {
    return named(Code::kFailedPrecondition, fmt::format(" threw: {}", error.what()));
  }
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

void Applier::sum_given(const ApplyWork& work, ApplyStats& stats) {
  stats.given_sums.resize(work.given);
  std::vector<bool> summed(work.given);
  for (const SummedCopy& copy : work.summed) {
    summed[copy.given] = true;
    ++stats.copies.copies;
    stats.copies.bytes += static_cast<std::uint64_t>(copy.job.copy.dst_bytes());
  }
  if (stats.copies.batches == 0 && !work.summed.empty()) stats.copies.batches = 1;
  pool_.run(work.summed.size(), [&](std::size_t i) {
    const SummedCopy& copy = work.summed[i];
    stats.given_sums[copy.given].read =
        copy_and_fingerprint(copy.key, copy.job.copy, read_offsets(copy.job.copy), copy.job.src, copy.job.dst);
    progress_.fetch_add(1, std::memory_order_relaxed);
  });
  // Tensors in a row, so that what is small does not go through the pool one by one.
  const std::size_t pieces = std::min(work.given, pool_.threads() * kPiecesPerThread);
  pool_.run(pieces, [&](std::size_t piece) {
    for (std::size_t i = work.given * piece / pieces; i < work.given * (piece + 1) / pieces; ++i)
      if (!summed[i]) stats.given_sums[i] = work.sum_given(i);
    progress_.fetch_add(1, std::memory_order_relaxed);
  });
}

Status Applier::prove_async(std::shared_ptr<const SyncPlan> plan, ExpectedSums expected, std::vector<CastSums> converted,
                            std::vector<FingerprintSum> inputs, std::function<void(ProofOutcome)> done) {
  auto sums = std::make_shared<Sums>(Sums{std::move(expected), std::move(converted), std::move(inputs)});
  return stream_->enqueue([this, plan = std::move(plan), sums, done = std::move(done)] { done(prove(*plan, *sums)); });
}

Status Applier::run_async(std::function<void()> work) {
  return stream_->enqueue([this, work = std::move(work)] {
    // Before the work, which tells the progress thread of its end: counted after that it could move a deadline at any later time.
    progress_.fetch_add(1, std::memory_order_relaxed);
    work();
  });
}

ProofOutcome Applier::prove(const SyncPlan& plan, const Sums& sums) {
  ProofOutcome outcome;
  std::mutex mutex;  // guards outcome
  const auto tensors = plan.tensors();
  constexpr std::size_t kGroup = 32;  // tensors a work item: small enough to balance, large enough not to notice
  pool_.run((tensors.size() + kGroup - 1) / kGroup, [&](std::size_t group) {
    std::uint64_t compared = 0;
    for (std::size_t t = group * kGroup; t < std::min(tensors.size(), (group + 1) * kGroup); ++t) {
      const bool cast = !tensors[t].cast.none();
      const FingerprintSum& kept = cast ? sums.converted[t].converted : sums.expected[t];
      const bool input = plan.index().rule(tensors[t].rule).group >= 0;
      TensorProof proof = input ? prove_input(sums.inputs[t], kept) : prove_tensor(plan, tensors[t], kept);
      compared += proof.compared;
      if (cast && !(sums.converted[t].read == sums.expected[t])) {
        proof = {"what was read for the conversion differs from what was sent", sums.expected[t], sums.converted[t].read, proof.compared};
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
