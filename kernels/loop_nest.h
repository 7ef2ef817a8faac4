#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/status.h"
#include "kernels/strided_copy.h"

namespace headrace {

/// One loop of a LoopNest. Strides are bytes.
struct Loop {
  std::int64_t count;
  std::int64_t src;
  std::int64_t dst;
  bool indexed;  // goes through LoopNest::slots
};

inline constexpr std::size_t kLoopsMax = 24;

/// The working form of a StridedCopy: room for more loops than a descriptor may keep, no heap. Not for storing: `slots` points into the
/// table of the copy it was made from.
struct LoopNest {
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::int64_t run = 0;
  std::size_t size = 0;
  const std::int32_t* slots = nullptr;
  bool indexed_source = false;
  bool overflow = false;              // a loop did not fit
  std::array<Loop, kLoopsMax> loops;  // the first `size` are set

  explicit LoopNest(const StridedCopy& copy) noexcept;
  LoopNest(std::int64_t src_offset_bytes, std::int64_t dst_offset_bytes, std::int64_t run_bytes) noexcept
      : src_offset(src_offset_bytes), dst_offset(dst_offset_bytes), run(run_bytes) {}  // NOLINT: loops are set as they are pushed
  LoopNest(const LoopNest& other) noexcept;
  LoopNest& operator=(const LoopNest&) = delete;

  std::span<Loop> all() noexcept { return {loops.data(), size}; }
  std::span<const Loop> all() const noexcept { return {loops.data(), size}; }
  void push(const Loop& loop) noexcept;
  void erase(std::size_t index) noexcept;

  /// Step k of `loop` on the source side, in bytes.
  std::int64_t src_step(const Loop& loop, std::int64_t k) const noexcept {
    return (loop.indexed && indexed_source ? slots[k] : k) * loop.src;
  }
  std::int64_t dst_step(const Loop& loop, std::int64_t k) const noexcept {
    return (loop.indexed && !indexed_source ? slots[k] : k) * loop.dst;
  }

  /// Fewest loops, longest run. With `constant_source` only the destination has to be contiguous.
  void merge(bool constant_source = false) noexcept;
  /// Largest destination step outermost. A table's steps are far apart and cannot be cut, so it stays outermost of all.
  void sort_by_destination() noexcept;
  /// Exchanges the two sides.
  void swap_sides() noexcept;
  /// kUnsupported when there are more than kCopyDimsMax loops. `table` is the one that `slots` points into.
  Result<StridedCopy> to_copy(const SlotTable& table) const;
};

/// The largest divisor of n that is at most `limit`; n >= 1, limit >= 1.
std::int64_t largest_divisor(std::int64_t n, std::int64_t limit) noexcept;

/// Walks loops [0, depth) of a nest as an odometer and calls visit(src offset, dst offset) for each step, the nest's own offsets included.
template <class Visit>
void for_each_step(const LoopNest& nest, std::size_t depth, const Visit& visit) {
  std::array<std::int64_t, kLoopsMax> step;
  std::int64_t src = nest.src_offset;
  std::int64_t dst = nest.dst_offset;
  for (std::size_t j = 0; j < depth; ++j) {
    step[j] = 0;
    src += nest.src_step(nest.loops[j], 0);
    dst += nest.dst_step(nest.loops[j], 0);
  }
  while (true) {
    visit(src, dst);
    std::size_t j = depth;
    while (j > 0) {
      const Loop& loop = nest.loops[j - 1];
      const std::int64_t from = step[j - 1];
      const std::int64_t to = from + 1 == loop.count ? 0 : from + 1;
      src += nest.src_step(loop, to) - nest.src_step(loop, from);
      dst += nest.dst_step(loop, to) - nest.dst_step(loop, from);
      step[j - 1] = to;
      if (to != 0) break;
      --j;
    }
    if (j == 0) return;
  }
}

}  // namespace headrace
