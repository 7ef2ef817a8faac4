#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "kernels/executor.h"

namespace headrace {

/// Turns copies of single experts into few nests with one more dimension. Copies are collected per key, one key per (parameter, shard), so
/// that senders may emit w1, w2, w3 of an expert before the next and experts in any order; flush() joins those with equal nests whose
/// source and destination addresses advance by constant steps, the source never backwards. One thread. No two copies between flushes may
/// write the same byte.
class ExpertRuns {
 public:
  ExpertRuns() = default;
  ExpertRuns(ExpertRuns&&) = default;
  ExpertRuns& operator=(ExpertRuns&&) = default;

  /// `key` names the (parameter, shard); `job` has no more than kCopyDimsMax - 1 dimensions, otherwise it stays a run of its own.
  void add(std::uint32_t key, const CopyJob& job);
  /// Appends the joined nests to `out` and forgets them. The end of a call or a bucket.
  void flush(std::vector<CopyJob>& out);

  /// Since construction.
  std::uint64_t experts() const noexcept { return experts_; }
  std::uint64_t runs() const noexcept { return runs_; }

 private:
  struct Open {
    std::vector<CopyJob> jobs;  // keeps its memory from bucket to bucket; the first `used` are this bucket's
    std::size_t used = 0;
    bool sorted = true;
  };
  void join(const std::vector<CopyJob>& jobs, std::vector<CopyJob>& out) const;

  std::unordered_map<std::uint32_t, Open> open_;  // its elements stay where they are
  std::vector<Open*> order_;                      // in the order of their first copy since the last flush
  std::vector<std::uint32_t> by_destination_;     // scratch of flush()
  std::uint64_t experts_ = 0;
  std::uint64_t runs_ = 0;
};

}  // namespace headrace
