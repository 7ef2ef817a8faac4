#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "benchmarks/measure.h"
#include "benchmarks/planned_update.h"
#include "benchmarks/reference_copy.h"
#include "benchmarks/rows.h"
#include "benchmarks/statistics.h"
#include "benchmarks/v41_model.h"

// From staging in shared memory to live storage: index, plan and buckets are ready, and everything from there on is in the time: the nests
// of a bucket, their joining into runs, and the batch.

namespace headrace::bench {
namespace {

constexpr std::int64_t kBucketBytes = std::int64_t{512} << 20;
constexpr std::size_t kStagingBuffers = 2;
constexpr std::size_t kRounds = 5;

/// A rank's storage, an update of it, and the staging buffers that its buckets go through in turn, all of it touched.
class ApplyBench {
 public:
  ApplyBench(ModelLayout layout, std::vector<wire::ManifestEntry> entries, std::int64_t bucket_bytes)
      : device_(make_host_device()),
        storage_(StorageBlock::allocate(layout, *device_)),
        update_(std::move(layout), storage_, std::move(entries), bucket_bytes) {
    for (std::size_t i = 0; i < std::min(kStagingBuffers, update_.buckets().size()); ++i) {
      staging_.push_back(
          device_->allocate({.bytes = static_cast<std::size_t>(bucket_bytes), .exportable = true, .touch = true, .label = "bench-staging"})
              .value_or_throw());
      std::memset(staging_.back()->data(), static_cast<int>(0x41 + i), staging_.back()->size());
    }
    std::memset(storage_.bytes().data(), 1, storage_.bytes().size());
  }

  const PlannedUpdate& update() const noexcept { return update_; }

  /// Seconds for the whole update. Throws when the executor says that it moved anything but all of it.
  double apply(BucketApplier& applier) {
    std::uint64_t bytes = 0;
    const double seconds = seconds_of([&] {
      for (std::size_t b = 0; b < update_.buckets().size(); ++b) {
        jobs_.clear();
        update_.append_jobs(update_.buckets()[b], staging(b).data(), jobs_);
        bytes += applier.apply(jobs_).bytes;
      }
    });
    if (bytes != static_cast<std::uint64_t>(update_.wanted_bytes())) {
      throw Error(Status(Code::kInternal, fmt::format("{} bytes applied, {} wanted", bytes, update_.wanted_bytes())));
    }
    return seconds;
  }

  /// As many bytes of the same mappings, end to end.
  double copy(CopyKind kind, WorkerPool& pool) {
    std::span<std::byte> rest = storage_.bytes();
    return seconds_of([&] {
      for (std::size_t b = 0; b < update_.buckets().size(); ++b) {
        const auto bytes = static_cast<std::size_t>(update_.buckets()[b].bytes);
        const std::size_t part = std::min(bytes, rest.size());
        plain_copy(kind, pool, staging(b).first(part), rest.first(part));
        rest = rest.subspan(part);
      }
    });
  }

  /// As many tensors of as many bytes one by one, each where it belongs: what no planning could beat.
  double copy_each(CopyKind kind) {
    return seconds_of([&] {
      std::size_t storage = 0;
      for (std::size_t b = 0; b < update_.buckets().size(); ++b) {
        for (const StagedCell& cell : update_.buckets()[b].cells) {
          const auto bytes = static_cast<std::size_t>(cell.bytes);
          plain_copy(kind, staging(b).subspan(static_cast<std::size_t>(cell.offset), bytes), storage_.bytes().subspan(storage, bytes));
          storage += bytes;
        }
      }
    });
  }

 private:
  std::span<std::byte> staging(std::size_t bucket) { return staging_[bucket % staging_.size()]->bytes(); }

  std::unique_ptr<Device> device_;
  StorageBlock storage_;
  PlannedUpdate update_;
  std::vector<std::unique_ptr<DeviceMemory>> staging_;
  std::vector<SyncPlan::KeyedJob> jobs_;
};

struct AgainstCopy {
  double seconds = 0;
  double copy_seconds = 0;
  std::string copy_name;
  double spread = 0;
};

/// Each copy in turn with the measured thing; the copy with the best median is the reference.
AgainstCopy against_best_copy(const std::string& name, const TimedWork& measured, const std::function<double(CopyKind)>& copy) {
  const std::vector<CopyKind> kinds = copy_kinds();
  std::vector<TimedWork> works{measured};
  for (const CopyKind kind : kinds) works.emplace_back([&copy, kind] { return copy(kind); });
  const std::vector<std::vector<double>> seconds = interleave(name, kRounds, works);
  AgainstCopy result;
  result.seconds = median(seconds.front());
  result.spread = spread(seconds.front());
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    const double copied = median(seconds[k + 1]);
    if (result.copy_name.empty() || copied < result.copy_seconds) {
      result.copy_seconds = copied;
      result.copy_name = copy_kind_name(kinds[k]);
    }
  }
  return result;
}

Row bandwidth_row(const std::string& name, ApplyBench& bench, std::size_t threads, double target) {
  BucketApplier applier(threads);
  const AgainstCopy result =
      against_best_copy(name, [&] { return bench.apply(applier); }, [&](CopyKind kind) { return bench.copy(kind, applier.pool()); });
  const auto bytes = static_cast<double>(bench.update().wanted_bytes());
  const std::string note =
      fmt::format("{:.0f} MB in {} buckets, {} tensors, {} runs an update; spread {:.0f} %", bytes / 1e6, bench.update().buckets().size(),
                  bench.update().plan().tensors().size(), applier.runs().runs() / (kRounds + 1), result.spread * 100);
  return Row{.name = name, .value = gigabytes_per_second(bytes, result.seconds), .unit = "GB/s"}
      .against(result.copy_name, gigabytes_per_second(bytes, result.copy_seconds))
      .ratio_at_least(target)
      .remark(note);
}

/// The experts of two layers that rank 0 of four has.
std::vector<wire::ManifestEntry> local_experts(const ModelLayout& layout) {
  const WeightIndex index(layout);
  std::vector<wire::ManifestEntry> entries = sender_order(layout, 1, false);
  std::erase_if(entries, [&](const wire::ManifestEntry& entry) { return index.resolve(entry.name).kind != Resolution::Kind::kPlaced; });
  return entries;
}

ModelLayout without_weights(ModelLayout layout) {
  std::erase_if(layout.expert_rules, [](const ExpertRule& rule) { return !rule.suffix.ends_with(".scale"); });
  return experts_only(std::move(layout));
}

Row tiny_row() {
  constexpr std::int64_t kTensors = 20'000;
  ModelLayout layout = tiny_layout(kTensors);
  std::vector<wire::ManifestEntry> entries;
  for (const NamedRule& rule : layout.named) {
    entries.push_back({rule.name, rule.rule.dtypes.front(), rule.rule.shape, Box::whole(rule.rule.shape)});
  }
  ApplyBench bench(std::move(layout), std::move(entries), kBucketBytes);
  BucketApplier applier(1);
  const AgainstCopy result =
      against_best_copy("apply/tiny", [&] { return bench.apply(applier); }, [&](CopyKind kind) { return bench.copy_each(kind); });
  const auto nanoseconds = [](double seconds) { return seconds * 1e9 / static_cast<double>(kTensors); };
  return Row{.name = "apply/tiny", .value = nanoseconds(result.seconds), .unit = "ns"}
      .against(result.copy_name, nanoseconds(result.copy_seconds))
      .excess_at_most(200)
      .remark(fmt::format("a tensor of 4 KiB, {} of them, planned; spread {:.0f} %", kTensors, result.spread * 100));
}

}  // namespace

void apply_rows(const Selection& selection, std::vector<Row>& rows) {
  const V41Sizes two_layers{.layers = 2};
  const bool one = selection.wants("apply/v41_ep4/t1");
  const bool two = selection.wants("apply/v41_ep4/t2");
  if (one || two) {
    ModelLayout layout = experts_only(v41_layout(two_layers, 4, 0));
    std::vector<wire::ManifestEntry> entries = local_experts(layout);
    ApplyBench bench(std::move(layout), std::move(entries), kBucketBytes);
    if (one) rows.push_back(bandwidth_row("apply/v41_ep4/t1", bench, 1, 0.90));
    if (two) rows.push_back(bandwidth_row("apply/v41_ep4/t2", bench, 2, 0.90));
  }
  if (selection.wants("apply/scales")) {
    ModelLayout layout = without_weights(v41_layout(two_layers, 4, 0));
    std::vector<wire::ManifestEntry> entries = local_experts(layout);
    ApplyBench bench(std::move(layout), std::move(entries), kBucketBytes);
    rows.push_back(bandwidth_row("apply/scales", bench, 1, 0.60));
  }
  if (selection.wants("apply/tiny")) rows.push_back(tiny_row());
}

}  // namespace headrace::bench
