#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "receiver/sync_plan.h"

namespace headrace {

/// Which wanted bytes of one update have arrived. Pure; one thread.
class Coverage {
 public:
  explicit Coverage(const SyncPlan& plan);
  /// Takes note of a box of an entry. kInvalidArgument when it lies in no wanted box of the entry, or has bytes that came before.
  Status add(std::uint32_t sender, std::uint32_t entry, const Box& box);
  bool complete() const noexcept { return elements_left_ == 0; }
  /// Names of tensors that are not whole, at most `count`.
  std::vector<std::string> missing(std::size_t count) const;

 private:
  /// Parts that came, side by side in one array: a bucket may bring a million of them, and each is compared with all before it.
  struct Entry {
    std::int64_t elements_left = 0;
    std::vector<std::int64_t> bounds;  // per part lo of every dimension, then hi; empty once the entry is whole
  };
  const SyncPlan* plan_;
  std::vector<std::vector<Entry>> entries_;
  std::int64_t elements_left_ = 0;
};

}  // namespace headrace
