#include "tests/receiver/layout_judge.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "core/base/worker_pool.h"
#include "core/device/device.h"
#include "kernels/executor.h"
#include "receiver/host_storage.h"
#include "receiver/sync_plan.h"
#include "receiver/weight_index.h"

namespace headrace::testing {
namespace {

constexpr std::byte kFirstFill{0xA5};
constexpr std::byte kSecondFill{0x5A};

/// Every tensor of the layout that has a place on this rank, whole.
std::vector<wire::ManifestEntry> entries_of(const ModelLayout& layout) {
  std::vector<wire::ManifestEntry> entries;
  const auto add = [&](std::string name, const TensorRule& rule) {
    entries.push_back({std::move(name), rule.dtypes.front(), rule.shape, Box::whole(rule.shape)});
  };
  for (const NamedRule& named : layout.named) add(named.name, named.rule);
  for (const ExpertRule& expert : layout.expert_rules) {
    const ExpertMap& map = layout.experts.at(expert.map);
    for (std::int32_t e = 0; e < map.experts(); ++e) {
      if (!map.slots_of(e).empty()) add(expert.prefix + std::to_string(e) + "." + expert.suffix, expert.rule);
    }
  }
  return entries;
}

std::vector<std::string> scopes_of(const ModelLayout& layout) {
  return WeightIndex(layout).scopes();
}

/// Cuts a box at random, at absolute multiples of the granule.
void cut(const Box& box, const std::vector<std::int64_t>& granule, int depth, std::mt19937& random, std::vector<Box>& parts) {
  std::vector<std::pair<std::size_t, std::int64_t>> places;  // one candidate per dimension that can be cut
  for (std::size_t d = 0; depth > 0 && d < box.rank(); ++d) {
    const std::int64_t first = box.lo[d] / granule[d] + 1;
    const std::int64_t last = (box.hi[d] - 1) / granule[d];
    if (first <= last) places.emplace_back(d, granule[d] * std::uniform_int_distribution<std::int64_t>(first, last)(random));
  }
  if (places.empty()) {
    parts.push_back(box);
    return;
  }
  const auto& [d, at] = places[random() % places.size()];
  Box low = box;
  Box high = box;
  low.hi[d] = at;
  high.lo[d] = at;
  cut(low, granule, depth - 1, random, parts);
  cut(high, granule, depth - 1, random, parts);
}

/// Row-major bytes of a box of a row-major tensor.
std::vector<std::byte> pack(const std::byte* tensor, const Box& box, const std::vector<std::int64_t>& strides, std::int64_t elem_bytes) {
  std::vector<std::byte> packed;
  packed.reserve(static_cast<std::size_t>(box.elements() * elem_bytes));
  std::vector<std::int64_t> at = box.lo;
  while (true) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < at.size(); ++d) offset += at[d] * strides[d];
    const std::int64_t run = at.empty() ? elem_bytes : (box.hi.back() - box.lo.back()) * elem_bytes;
    packed.insert(packed.end(), tensor + offset, tensor + offset + run);
    std::size_t d = at.empty() ? 0 : at.size() - 1;  // the last dimension went as a run
    while (d > 0 && ++at[d - 1] == box.hi[d - 1]) {
      at[d - 1] = box.lo[d - 1];
      --d;
    }
    if (d == 0) return packed;
  }
}

/// Storages of one rank, filled with one byte, and the sum of all that is written into each.
class Bench {
 public:
  Bench(const ModelLayout& layout, const std::vector<wire::ManifestEntry>& entries, std::byte fill, JudgedRank& judged)
      : index_(layout),
        storage_(HostStorage::allocate(layout, *device_).value_or_throw()),
        geometry_(PlanGeometry::build(index_, storage_.table()).value_or_throw()),
        written_(layout.storages.size(), 0),
        judged_(judged) {
    for (std::uint32_t s = 0; s < layout.storages.size(); ++s)
      std::memset(geometry_.storage(s), static_cast<int>(fill), static_cast<std::size_t>(layout.storages[s].bytes));
    auto outcome = SyncPlan::compile(index_, geometry_, storage_.table().digest(), {{"judge", {}, entries}}, {scopes_of(layout)});
    plan_ = std::move(outcome.plan);
    for (const wire::Failure& defect : outcome.defects) judged_.defects.push_back(defect.message);
  }

  bool ready() const { return plan_ != nullptr; }
  const SyncPlan& plan() const { return *plan_; }
  std::int64_t written(std::uint32_t storage) const { return written_[storage]; }
  std::span<const std::byte> bytes(std::uint32_t storage) const {
    return {geometry_.storage(storage), static_cast<std::size_t>(index_.layout().storages[storage].bytes)};
  }

  void write_constants() {
    std::vector<CopyJob> jobs;
    for (const ConstantRule& rule : index_.layout().constants) {
      const StorageSpec& spec = index_.layout().storages.at(rule.storage);
      throw_if_error(validate(rule.copy, rule.copy.run_bytes, spec.bytes));
      jobs.push_back({rule.copy, nullptr, geometry_.storage(rule.storage), rule.constant});
      written_[rule.storage] += rule.copy.dst_bytes();
    }
    executor_.run(jobs);
  }

  /// `strides` as for append_jobs().
  void apply(const PlanTensor& tensor, const Box& box, const std::byte* source, std::span<const std::int64_t> strides) {
    keyed_.clear();
    throw_if_error(plan_->append_jobs(tensor, box, source, strides, keyed_));
    std::vector<CopyJob> jobs;
    for (const SyncPlan::KeyedJob& keyed : keyed_) {
      jobs.push_back(keyed.job);
      written_[storage_of(keyed.job.dst)] += keyed.job.copy.dst_bytes();
    }
    executor_.run(jobs);
  }

 private:
  std::uint32_t storage_of(const std::byte* base) const {
    std::uint32_t s = 0;
    while (geometry_.storage(s) != base) ++s;
    return s;
  }

  std::unique_ptr<Device> device_ = make_host_device();
  WeightIndex index_;
  HostStorage storage_;
  PlanGeometry geometry_;
  std::shared_ptr<const SyncPlan> plan_;
  std::vector<std::int64_t> written_;  // an alias counts for the first storage of its memory
  WorkerPool pool_{1};
  HostExecutor executor_{pool_};
  std::vector<SyncPlan::KeyedJob> keyed_;
  JudgedRank& judged_;
};

void apply_whole(Bench& bench, const TensorSource& source, JudgedRank& judged) {
  for (const PlanTensor& tensor : bench.plan().tensors()) {
    const auto& [s, e] = tensor.entries.front();
    const wire::ManifestEntry& entry = bench.plan().entry(s, e);
    const std::vector<std::byte> bytes = source(entry.name, entry.dtype, entry.shape);
    const std::vector<std::int64_t> strides = packed_strides(entry.shape, dtype_bytes(entry.dtype));
    for (const Box& box : bench.plan().entries(s)[e].wanted) {
      std::int64_t first = 0;
      for (std::size_t d = 0; d < box.rank(); ++d) first += box.lo[d] * strides[d];
      bench.apply(tensor, box, bytes.data() + first, strides);
    }
    ++judged.tensors;
  }
}

void apply_in_pieces(Bench& bench, const TensorSource& source, std::mt19937& random) {
  std::vector<std::size_t> order(bench.plan().tensors().size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (const std::size_t i : order) {
    const PlanTensor& tensor = bench.plan().tensors()[i];
    const auto& [s, e] = tensor.entries.front();
    const wire::ManifestEntry& entry = bench.plan().entry(s, e);
    const std::vector<std::byte> bytes = source(entry.name, entry.dtype, entry.shape);
    const std::int64_t elem_bytes = dtype_bytes(entry.dtype);
    const std::vector<std::int64_t> strides = packed_strides(entry.shape, elem_bytes);
    std::vector<Box> parts;
    for (const Box& box : bench.plan().entries(s)[e].wanted) {
      cut(box, bench.plan().geometry().of(tensor.rule).granule, 3, random, parts);
    }
    std::shuffle(parts.begin(), parts.end(), random);
    for (const Box& part : parts) {
      if (random() % 2 == 0) {
        const std::vector<std::byte> packed = pack(bytes.data(), part, strides, elem_bytes);
        bench.apply(tensor, part, packed.data(), {});
        continue;
      }
      std::int64_t first = 0;
      for (std::size_t d = 0; d < part.rank(); ++d) first += part.lo[d] * strides[d];
      bench.apply(tensor, part, bytes.data() + first, strides);
    }
  }
}

void compare(const ModelLayout& layout, const Bench& whole, const Bench& pieces, JudgedRank& judged) {
  for (std::uint32_t s = 0; s < layout.storages.size(); ++s) {
    const StorageSpec& spec = layout.storages[s];
    const std::span<const std::byte> a = whole.bytes(s);
    const std::span<const std::byte> b = pieces.bytes(s);
    judged.storages.emplace(spec.name, std::vector<std::byte>(a.begin(), a.end()));
    if (!spec.alias_of.empty() || (spec.optional && whole.written(s) == 0)) continue;
    if (!std::equal(a.begin(), a.end(), b.begin())) {
      const auto at = std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin();
      judged.defects.push_back(spec.name + ": byte " + std::to_string(at) + " of " + std::to_string(spec.bytes) +
                               " was not written, or depends on the cut");
    }
    for (const std::int64_t written : {whole.written(s), pieces.written(s)}) {
      if (written == spec.bytes) continue;
      judged.defects.push_back(spec.name + ": " + std::to_string(written) + " bytes written into " + std::to_string(spec.bytes));
    }
  }
}

}  // namespace

std::vector<std::byte> seeded_tensor(const std::string& name, Dtype dtype, const Shape& shape) {
  std::uint64_t state = 14695981039346656037U;
  for (const char c : name + std::string(dtype_name(dtype)) + to_string(shape))
    state = (state ^ static_cast<unsigned char>(c)) * 1099511628211U;
  std::vector<std::byte> bytes(static_cast<std::size_t>(byte_count(dtype, shape).value()));
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(state)) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const std::uint64_t mixed = state ^ (state >> 29);
    std::memcpy(bytes.data() + i, &mixed, std::min(sizeof(mixed), bytes.size() - i));
  }
  return bytes;
}

JudgedRank judge_layout(const ModelLayout& layout, const TensorSource& source, std::uint32_t seed) {
  JudgedRank judged;
  try {
    const std::vector<wire::ManifestEntry> entries = entries_of(layout);
    Bench whole(layout, entries, kFirstFill, judged);
    Bench pieces(layout, entries, kSecondFill, judged);
    if (!whole.ready() || !pieces.ready()) return judged;
    std::mt19937 random(seed);
    whole.write_constants();
    apply_whole(whole, source, judged);
    pieces.write_constants();
    apply_in_pieces(pieces, source, random);
    compare(layout, whole, pieces, judged);
  } catch (const Error& error) {
    judged.defects.emplace_back(error.what());
  }
  return judged;
}

}  // namespace headrace::testing
