#include "receiver/expert_runs.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

namespace headrace {
namespace {

/// The same loops, wherever they start.
bool joinable(const CopyJob& a, const CopyJob& b) {
  return (a.src == nullptr) == (b.src == nullptr) && a.constant == b.constant && a.cast == b.cast && a.copy.run_bytes == b.copy.run_bytes &&
         a.copy.dim_count == b.copy.dim_count && a.copy.indexed_dim == b.copy.indexed_dim &&
         a.copy.indexed_source == b.copy.indexed_source &&
         std::equal(a.copy.dims.begin(), a.copy.dims.begin() + a.copy.dim_count, b.copy.dims.begin()) &&
         (a.copy.slots == b.copy.slots || (a.copy.slots && b.copy.slots && *a.copy.slots == *b.copy.slots));
}

struct Step {
  std::int64_t src = 0;
  std::int64_t dst = 0;
  bool operator==(const Step&) const = default;
};

std::int64_t address(const std::byte* base, std::int64_t offset) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(base)) + offset;
}

/// Between first bytes: callers may give each tensor a base of its own. Joined nests touch exactly the bytes of their parts.
Step step_between(const CopyJob& a, const CopyJob& b) {
  return {address(b.src, b.copy.src_offset) - address(a.src, a.copy.src_offset),
          address(b.dst, b.copy.dst_offset) - address(a.dst, a.copy.dst_offset)};
}

/// A source that goes backwards would need a negative stride, which nests do not have; a step of 0 is a repeat (one expert, two slots).
bool can_start(const CopyJob& a, const CopyJob& b) {
  const Step step = step_between(a, b);
  return step.dst > 0 && step.src >= 0 && a.copy.dim_count < kCopyDimsMax && joinable(a, b);
}

CopyJob with_outer(const CopyJob& first, std::int64_t count, Step step) {
  CopyJob job = first;
  std::copy_backward(first.copy.dims.begin(), first.copy.dims.begin() + first.copy.dim_count,
                     job.copy.dims.begin() + first.copy.dim_count + 1);
  job.copy.dims[0] = {count, step.src, step.dst};
  ++job.copy.dim_count;
  if (job.copy.indexed_dim >= 0) ++job.copy.indexed_dim;
  return job;
}

bool before(const CopyJob& a, const CopyJob& b) {
  return address(a.dst, a.copy.dst_offset) < address(b.dst, b.copy.dst_offset);
}

/// Steps of a run whose destinations are anywhere: multiples of `unit` from the lowest. None when they are too far apart for a table.
struct Places {
  std::int64_t lowest = 0;
  std::int64_t unit = 0;
  SlotTable slots;
};
std::optional<Places> places_of(std::span<const CopyJob* const> run) {
  const auto place = [](const CopyJob* job) { return address(job->dst, job->copy.dst_offset); };
  Places places;
  places.lowest = place(*std::min_element(run.begin(), run.end(), [](const CopyJob* a, const CopyJob* b) { return before(*a, *b); }));
  for (const CopyJob* job : run) places.unit = std::gcd(places.unit, place(job) - places.lowest);
  std::vector<std::int32_t> slots;
  slots.reserve(run.size());
  for (const CopyJob* job : run) {
    const std::int64_t slot = (place(job) - places.lowest) / places.unit;
    if (slot > INT32_MAX) return std::nullopt;
    slots.push_back(static_cast<std::int32_t>(slot));
  }
  places.slots = std::make_shared<const std::vector<std::int32_t>>(std::move(slots));
  return places;
}

/// Jobs with equal nests whose sources advance by one step, as one nest.
void append_joined(std::span<const CopyJob* const> run, std::vector<CopyJob>& out) {
  const CopyJob& first = *run.front();
  if (run.size() == 1) return out.push_back(first);
  const Step step = step_between(first, *run[1]);
  const auto count = static_cast<std::int64_t>(run.size());
  bool constant = step.dst > 0;
  for (std::size_t i = 2; constant && i < run.size(); ++i) constant = step_between(*run[i - 1], *run[i]) == step;
  if (constant) return out.push_back(with_outer(first, count, step));
  const std::optional<Places> places = places_of(run);
  if (!places) {
    for (const CopyJob* job : run) out.push_back(*job);
    return;
  }
  CopyJob joined = with_outer(first, count, {step.src, places->unit});
  joined.copy.dst_offset += places->lowest - address(first.dst, first.copy.dst_offset);
  joined.copy.indexed_dim = 0;
  joined.copy.slots = places->slots;
  out.push_back(std::move(joined));
}

}  // namespace

void ExpertRuns::add(std::uint32_t key, const CopyJob& job) {
  const auto [entry, fresh] = open_.try_emplace(key);
  Open& open = entry->second;
  if (open.used == 0) order_.push_back(&open);
  if (open.used == open.jobs.size()) {
    open.jobs.push_back(job);
  } else {
    open.jobs[open.used] = job;
  }
  if (open.used != 0 && before(job, open.jobs[open.used - 1])) open.sorted = false;
  ++open.used;
  ++experts_;
}

void ExpertRuns::flush(std::vector<CopyJob>& out) {
  const std::size_t before_flush = out.size();
  std::vector<const CopyJob*> run;
  for (Open* open : order_) {
    divide_by_destination(*open);
    const Runs* fewest = &by_destination_;
    if (by_destination_.ends.size() > 1) {
      divide_by_source(*open);
      if (by_source_.ends.size() < by_destination_.ends.size()) fewest = &by_source_;
    }
    std::size_t begin = 0;
    for (const std::size_t end : fewest->ends) {
      run.clear();
      for (; begin < end; ++begin) run.push_back(&open->jobs[fewest->jobs[begin]]);
      append_joined(run, out);
    }
    open->used = 0;
    open->sorted = true;
  }
  order_.clear();
  runs_ += out.size() - before_flush;
}

void ExpertRuns::divide_by_destination(const Open& open) {
  auto& [order, ends] = by_destination_;
  order.resize(open.used);
  ends.clear();
  std::iota(order.begin(), order.end(), 0U);
  if (!open.sorted) {
    std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return before(open.jobs[a], open.jobs[b]); });
  }
  const auto job = [&](std::size_t i) -> const CopyJob& { return open.jobs[order[i]]; };
  for (std::size_t begin = 0; begin < order.size(); begin = ends.back()) {
    std::size_t end = begin + 1;
    if (end < order.size() && can_start(job(begin), job(end))) {
      const Step step = step_between(job(begin), job(end));
      for (++end; end < order.size(); ++end) {
        if (!joinable(job(begin), job(end)) || step_between(job(end - 1), job(end)) != step) break;
      }
    }
    ends.push_back(end);
  }
}

void ExpertRuns::divide_by_source(const Open& open) {
  const auto source = [&](std::uint32_t j) { return address(open.jobs[j].src, open.jobs[j].copy.src_offset); };
  source_order_ = by_destination_.jobs;
  // Copies of one source, to replicas, in the order of what they write.
  std::sort(source_order_.begin(), source_order_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return source(a) != source(b) ? source(a) < source(b) : before(open.jobs[a], open.jobs[b]);
  });
  taken_.assign(open.used, false);
  auto& [jobs, ends] = by_source_;
  jobs.clear();
  ends.clear();
  for (std::size_t begin = 0; begin < open.used; ++begin) {
    if (taken_[begin]) continue;
    const CopyJob& first = open.jobs[source_order_[begin]];
    // A table for a second dimension, or a ninth dimension, is more than a nest has.
    const bool may_grow = first.copy.indexed_dim < 0 && first.copy.dim_count < kCopyDimsMax;
    std::optional<std::int64_t> step;
    std::int64_t last = source(source_order_[begin]);
    jobs.push_back(source_order_[begin]);
    // One replica of an expert a run: the next run takes the others. Where nothing follows, replicas repeat their source.
    for (std::size_t i = begin + 1; may_grow && i < open.used; ++i) {
      const std::uint32_t j = source_order_[i];
      if (taken_[i] || source(j) == last) continue;
      if ((step && source(j) != last + *step) || !joinable(first, open.jobs[j])) break;
      step = source(j) - last;
      last = source(j);
      taken_[i] = true;
      jobs.push_back(j);
    }
    for (std::size_t i = begin + 1; may_grow && !step && i < open.used; ++i) {
      const std::uint32_t j = source_order_[i];
      if (source(j) != last) break;
      if (taken_[i] || !joinable(first, open.jobs[j])) continue;
      taken_[i] = true;
      jobs.push_back(j);
    }
    ends.push_back(jobs.size());
  }
}

}  // namespace headrace
