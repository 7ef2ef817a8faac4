#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "kernels/executor.h"

namespace headrace {

/// Turns copies of single experts into few nests with one more dimension. Copies are collected per key, one key per (parameter, shard), so
/// that senders may emit w1, w2, w3 of an expert before the next and experts in any order; flush() joins those with equal nests whose
/// source addresses advance by a constant step. Where the destinations do too, as they do at load, that is a plain dimension, otherwise (a
/// rebalanced expert map) one that goes through a table. One thread. No two copies between flushes may write the same byte.
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
  /// Jobs of one key divided into runs: run r is jobs[ends[r - 1]] to jobs[ends[r] - 1], as indices.
  struct Runs {
    std::vector<std::uint32_t> jobs;
    std::vector<std::size_t> ends;
  };
  void divide_by_destination(const Open& open);
  void divide_by_source(const Open& open);

  std::unordered_map<std::uint32_t, Open> open_;  // its elements stay where they are
  std::vector<Open*> order_;                      // in the order of their first copy since the last flush
  Runs by_destination_;                           // scratch of flush(), as what follows
  Runs by_source_;
  std::vector<std::uint32_t> source_order_;
  std::vector<bool> taken_;  // by place in source_order_
  std::uint64_t experts_ = 0;
  std::uint64_t runs_ = 0;
};

}  // namespace headrace
