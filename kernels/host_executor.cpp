#include <algorithm>

#include "kernels/copy_plan.h"
#include "kernels/executor.h"

namespace headrace {
namespace {

// Work below this is not worth a hand-over between threads; above the other bound a thread holds it too long.
constexpr std::int64_t kWorkBytesMin = 256 << 10;
constexpr std::int64_t kWorkBytesMax = 4 << 20;
constexpr std::int64_t kWorksPerThread = 4;

bool is_constant(const CopyJob& job) noexcept {
  return job.src == nullptr;
}

}  // namespace

std::string_view copy_path_name(CopyPath path) noexcept {
  switch (path) {
    case CopyPath::kFlat: return "flat";
    case CopyPath::kPitched: return "pitched";
    case CopyPath::kTranspose32: return "transpose32";
    case CopyPath::kGeneric: return "generic";
    case CopyPath::kConstant: return "constant";
    case CopyPath::kCast: return "cast";
  }
  return "unknown";
}

CopyPath choose_path(const CopyJob& job) noexcept {
  return CopyPlan(job.copy, is_constant(job), job.cast).path();
}

HostExecutor::HostExecutor(WorkerPool& pool, std::int64_t streaming_bytes_min) : pool_(&pool), streaming_bytes_min_(streaming_bytes_min) {}

CopyStats HostExecutor::run(std::span<const CopyJob> jobs) {
  CopyStats stats{1, jobs.size(), 0};
  for (const CopyJob& job : jobs) stats.bytes += static_cast<std::uint64_t>(job.copy.dst_bytes());
  stores_ = static_cast<std::int64_t>(stats.bytes) >= streaming_bytes_min_ ? Stores::kStream : Stores::kCached;
  const auto threads = static_cast<std::int64_t>(pool_->threads());
  const std::int64_t share = static_cast<std::int64_t>(stats.bytes) / (threads * kWorksPerThread);
  if (threads == 1 || static_cast<std::int64_t>(stats.bytes) < 2 * kWorkBytesMin) {
    if (!jobs.empty()) execute(jobs, {0, jobs.size(), 0, 1, 1});
    return stats;
  }
  cut(jobs, std::clamp(share, kWorkBytesMin, kWorkBytesMax));
  pool_->run(works_.size(), [&](std::size_t i) { execute(jobs, works_[i]); });
  return stats;
}

void HostExecutor::cut(std::span<const CopyJob> jobs, std::int64_t work_bytes) {
  works_.clear();
  std::size_t first = 0;
  std::int64_t gathered = 0;
  const auto flush = [&](std::size_t last) {
    if (last > first) works_.push_back({first, last, 0, 1, 1});
    first = last;
    gathered = 0;
  };
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::int64_t bytes = jobs[i].copy.dst_bytes();
    if (bytes < 2 * work_bytes) {
      gathered += bytes;
      if (gathered >= work_bytes) flush(i + 1);
      continue;
    }
    flush(i);
    const std::int64_t pieces = bytes / work_bytes;
    const std::int64_t parts = CopyPlan(jobs[i].copy, is_constant(jobs[i]), jobs[i].cast).parts(pieces);
    const std::int64_t works = std::min(pieces, parts);
    for (std::int64_t w = 0; w < works; ++w) {
      works_.push_back({i, i + 1, parts * w / works, parts * (w + 1) / works, parts});
    }
    first = i + 1;
  }
  flush(jobs.size());
}

void HostExecutor::execute(std::span<const CopyJob> jobs, const Work& work) const noexcept {
  for (std::size_t i = work.first; i < work.last; ++i) {
    const CopyJob& job = jobs[i];
    if (job.copy.dim_count == 0 && !is_constant(job) && job.cast.none()) {
      if (work.parts == 1) {
        copy_rows(job.src + job.copy.src_offset, job.dst + job.copy.dst_offset, 1, 0, 0, job.copy.run_bytes, stores_);
        continue;
      }
    }
    CopyPlan(job.copy, is_constant(job), job.cast).run(job.src, job.dst, job.constant, work.begin, work.end, work.parts, stores_);
  }
  if (stores_ == Stores::kStream) stream_fence();
}

}  // namespace headrace
