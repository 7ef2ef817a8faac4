#pragma once

#include <cstdint>

namespace headrace {

/// How much memory this process holds beyond what it held before its first update: anonymous and shared resident pages, as the kernel
/// counts them. One thread.
class MemoryMeter {
 public:
  /// Sets the base once; later calls do nothing.
  void start();
  /// Looks now. Before start() nothing is counted.
  void sample();
  std::uint64_t extra_bytes_max() const noexcept { return extra_max_; }

 private:
  bool started_ = false;
  std::uint64_t base_ = 0;
  std::uint64_t extra_max_ = 0;
};

}  // namespace headrace
