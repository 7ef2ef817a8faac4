#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <utility>

#include "benchmarks/measure.h"
#include "benchmarks/planned_update.h"
#include "benchmarks/rows.h"
#include "benchmarks/statistics.h"
#include "benchmarks/v41_model.h"
#include "core/wire/codec.h"

namespace headrace::bench {
namespace {

constexpr std::size_t kRounds = 9;

/// A rank that has no bytes, and the manifest of one sender as it arrives.
struct PlanBench {
  explicit PlanBench(const V41Sizes& sizes) : PlanBench(v41_layout(sizes, 4, 0)) {}
  explicit PlanBench(const ModelLayout& layout)
      : storage(StorageBlock::reserve(layout)),
        index(layout),
        geometry(PlanGeometry::build(index, storage.table()).value_or_throw()),
        present(storage.locations()) {
    options.scopes = {"target"};
  }

  void set_manifest(std::span<const wire::ManifestEntry> entries) {
    manifest = wire::encode_entries(entries);
    names = entries.size();
  }

  /// From the bytes of a MANIFEST to a plan and the bytes of its ACCEPT.
  std::shared_ptr<const SyncPlan> compile() const {
    std::vector<SenderPart> parts;
    parts.push_back({"trainer-0", digest_of(manifest), wire::decode_entries(manifest).value_or_throw()});
    SyncPlan::Outcome outcome = SyncPlan::compile(index, geometry, storage.table().digest(), std::move(parts), options);
    if (outcome.plan == nullptr) throw Error(wire::to_status(outcome.defects.front()));
    return std::move(outcome.plan);
  }

  StorageBlock storage;
  WeightIndex index;
  PlanGeometry geometry;
  std::vector<StorageLocation> present;
  PlanOptions options;
  std::vector<std::byte> manifest;
  std::size_t names = 0;
};

Row known_row(const PlanBench& bench) {
  const std::shared_ptr<const SyncPlan> last = bench.compile();
  const wire::Message message{SessionId{1}, Incarnation{1}, wire::Manifest{last->parts().front().digest, true, {}}};
  const std::vector<std::byte> arrived = wire::encode(message);
  const std::array<TimedWork, 1> works{[&] {
    return seconds_of([&] {
      throw_if_error(bench.storage.table().check_identity(bench.present));
      const wire::Message decoded = wire::decode(arrived).value_or_throw();
      std::vector<SenderPart> parts;
      parts.push_back({"trainer-0", std::get<wire::Manifest>(decoded.body).digest, {}});
      const Digest key = SyncPlan::key_of(bench.index, bench.storage.table().digest(), parts, bench.options);
      if (key != last->key()) throw Error(Status(Code::kInternal, "the same manifest has another key"));
      wire::Accept accept;
      accept.digest = parts.front().digest;
      accept.plan_key = key;
      accept.known = true;
      if (wire::encode({SessionId{1}, Incarnation{1}, std::move(accept)}).empty()) throw Error(Status(Code::kInternal, "no answer"));
    });
  }};
  const std::vector<double> seconds = interleave("plan/v41/known", 99, works).front();
  return Row{.name = "plan/v41/known", .value = median(seconds) * 1e3, .unit = "ms"}.value_at_most(1).remark(
      fmt::format("addresses of {} storages compared, key found equal, answered", bench.present.size()));
}

Row v41_row(const PlanBench& bench) {
  std::size_t tensors = 0;
  const std::array<TimedWork, 1> works{[&] {
    std::shared_ptr<const SyncPlan> plan;
    const double seconds = seconds_of([&] { plan = bench.compile(); });
    tensors = plan->tensors().size();
    return seconds;
  }};
  const std::vector<double> seconds = interleave("plan/v41", kRounds, works).front();
  return Row{.name = "plan/v41", .value = median(seconds) * 1e3, .unit = "ms"}.value_at_most(60).remark(
      fmt::format("{} entries ({:.1f} MB), {} with a place on this rank; hash, decode, resolve, compile; spread {:.0f} %", bench.names,
                  static_cast<double>(bench.manifest.size()) / 1e6, tensors, spread(seconds) * 100));
}

/// Experts of as many layers as a number of names takes, and nothing else: every name costs the same work.
Row growth_row() {
  constexpr std::array<std::int64_t, 4> kNames{1'000, 10'000, 100'000, 1'000'000};
  constexpr std::int64_t kPerLayer = 384 * 6;
  std::vector<std::unique_ptr<PlanBench>> benches;
  std::vector<TimedWork> works;
  for (const std::int64_t names : kNames) {
    const V41Sizes sizes{.layers = (names + kPerLayer - 1) / kPerLayer};
    const ModelLayout layout = experts_only(v41_layout(sizes, 1, 0));
    auto bench = std::make_unique<PlanBench>(layout);
    std::vector<wire::ManifestEntry> entries = sender_order(layout, 1, false);
    entries.resize(static_cast<std::size_t>(names));
    bench->set_manifest(entries);
    bench->options.optional_names = {};
    bench->options.check_coverage = false;  // the last layer is cut off
    works.emplace_back([bench = bench.get()] {
      ::malloc_trim(0);  // or the smallest would tidy up after the largest
      return seconds_of([&] { bench->compile(); });
    });
    benches.push_back(std::move(bench));
  }
  const std::vector<std::vector<double>> seconds = interleave("plan/growth", kRounds, works);
  std::string curve;
  std::vector<double> each;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    each.push_back(median(seconds[i]) * 1e9 / static_cast<double>(kNames[i]));
    curve += fmt::format("{}{}: {:.0f}", i == 0 ? "" : ", ", kNames[i], each.back());
  }
  return Row{.name = "plan/growth", .value = each.back(), .unit = "ns"}
      .against(fmt::format("{} names", kNames.front()), each.front())
      .ratio_at_most(1.20)
      .remark("a name; " + curve);
}

}  // namespace

void plan_rows(const Selection& selection, std::vector<Row>& rows) {
  if (selection.wants("plan/v41") || selection.wants("plan/v41/known")) {
    const ModelLayout layout = v41_layout({}, 4, 0);
    PlanBench bench(layout);
    bench.set_manifest(sender_order(layout, 1, true));
    if (selection.wants("plan/v41")) rows.push_back(v41_row(bench));
    if (selection.wants("plan/v41/known")) rows.push_back(known_row(bench));
  }
  if (selection.wants("plan/growth")) rows.push_back(growth_row());
}

}  // namespace headrace::bench
