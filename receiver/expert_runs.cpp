#include "receiver/expert_runs.h"

#include <algorithm>
#include <numeric>

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
  for (Open* open : order_) {
    by_destination_.resize(open->used);
    std::iota(by_destination_.begin(), by_destination_.end(), 0U);
    const std::vector<CopyJob>& jobs = open->jobs;
    if (!open->sorted) {
      std::sort(by_destination_.begin(), by_destination_.end(), [&](std::uint32_t a, std::uint32_t b) { return before(jobs[a], jobs[b]); });
    }
    join(jobs, out);
    open->used = 0;
    open->sorted = true;
  }
  order_.clear();
  runs_ += out.size() - before_flush;
}

void ExpertRuns::join(const std::vector<CopyJob>& jobs, std::vector<CopyJob>& out) const {
  const auto job = [&](std::size_t i) -> const CopyJob& { return jobs[by_destination_[i]]; };
  for (std::size_t begin = 0; begin < by_destination_.size();) {
    std::size_t end = begin + 1;
    if (end == by_destination_.size() || !can_start(job(begin), job(end))) {
      out.push_back(job(begin));
      begin = end;
      continue;
    }
    const Step step = step_between(job(begin), job(end));
    for (++end; end < by_destination_.size(); ++end) {
      if (!joinable(job(begin), job(end)) || step_between(job(end - 1), job(end)) != step) break;
    }
    out.push_back(with_outer(job(begin), static_cast<std::int64_t>(end - begin), step));
    begin = end;
  }
}

}  // namespace headrace
