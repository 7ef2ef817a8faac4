#include "kernels/loop_nest.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace headrace {
namespace {

/// Takes a table whose entries advance by a constant step for what it is: a plain loop.
void unindex(LoopNest& nest, Loop& loop) noexcept {
  const std::int64_t first = nest.slots[0];
  const std::int64_t step = loop.count > 1 ? std::int64_t{nest.slots[1]} - first : 0;
  for (std::int64_t k = 2; k < loop.count; ++k) {
    if (nest.slots[k] - std::int64_t{nest.slots[k - 1]} != step) return;
  }
  std::int64_t& stride = nest.indexed_source ? loop.src : loop.dst;
  (nest.indexed_source ? nest.src_offset : nest.dst_offset) += first * stride;
  stride *= step;
  loop.indexed = false;
}

bool join_pair(LoopNest& nest) noexcept {
  for (std::size_t outer = 0; outer < nest.size; ++outer) {
    for (std::size_t inner = 0; inner < nest.size; ++inner) {
      Loop& a = nest.loops[outer];
      const Loop& b = nest.loops[inner];
      if (outer == inner || a.indexed || b.indexed || a.src != b.src * b.count || a.dst != b.dst * b.count) continue;
      a = {a.count * b.count, b.src, b.dst, false};
      nest.erase(inner);
      return true;
    }
  }
  return false;
}

bool join_run(LoopNest& nest, bool constant_source) noexcept {
  for (std::size_t j = 0; j < nest.size; ++j) {
    const Loop& loop = nest.loops[j];
    if (loop.indexed || loop.dst != nest.run || (!constant_source && loop.src != nest.run)) continue;
    nest.run *= loop.count;
    nest.erase(j);
    return true;
  }
  return false;
}

}  // namespace

LoopNest::LoopNest(const StridedCopy& copy) noexcept : src_offset(copy.src_offset), dst_offset(copy.dst_offset), run(copy.run_bytes) {
  for (std::size_t j = 0; j < copy.dim_count; ++j) {
    const CopyDim& dim = copy.dims[j];
    loops[size++] = {dim.count, dim.src_stride, dim.dst_stride, copy.indexed_dim == static_cast<int>(j)};
  }
  if (copy.slots) slots = copy.slots->data();
  indexed_source = copy.indexed_source;
}

LoopNest::LoopNest(const LoopNest& other) noexcept
    : src_offset(other.src_offset),
      dst_offset(other.dst_offset),
      run(other.run),
      size(other.size),
      slots(other.slots),
      indexed_source(other.indexed_source),
      overflow(other.overflow) {
  std::copy_n(other.loops.begin(), size, loops.begin());
}

void LoopNest::push(const Loop& loop) noexcept {
  if (size == kLoopsMax) {
    overflow = true;
    return;
  }
  loops[size++] = loop;
}

void LoopNest::erase(std::size_t index) noexcept {
  for (std::size_t j = index + 1; j < size; ++j) loops[j - 1] = loops[j];
  --size;
}

void LoopNest::merge(bool constant_source) noexcept {
  for (std::size_t j = size; j-- > 0;) {
    if (loops[j].indexed) unindex(*this, loops[j]);
    if (loops[j].count == 1) erase(j);
  }
  while (size > 0 && (join_run(*this, constant_source) || join_pair(*this))) {
  }
}

void LoopNest::sort_by_destination() noexcept {
  const auto outer = [](const Loop& a, const Loop& b) { return a.indexed != b.indexed ? a.indexed : std::abs(a.dst) > std::abs(b.dst); };
  // Few loops, once for every job: by insertion, without the heap that std::stable_sort would ask for.
  for (std::size_t i = 1; i < size; ++i) {
    const Loop loop = loops[i];
    std::size_t at = i;
    for (; at > 0 && outer(loop, loops[at - 1]); --at) loops[at] = loops[at - 1];
    loops[at] = loop;
  }
}

void LoopNest::swap_sides() noexcept {
  std::swap(src_offset, dst_offset);
  for (Loop& loop : all()) std::swap(loop.src, loop.dst);
  indexed_source = !indexed_source;
}

Result<StridedCopy> LoopNest::to_copy(const SlotTable& table) const {
  if (overflow || size > kCopyDimsMax) {
    return Status(Code::kUnsupported,
                  fmt::format("strided copy: {} dimensions are needed, a nest has at most {}",
                              overflow ? fmt::format("more than {}", kLoopsMax) : fmt::format("{}", size), kCopyDimsMax));
  }
  StridedCopy copy;
  copy.src_offset = src_offset;
  copy.dst_offset = dst_offset;
  copy.run_bytes = run;
  copy.dim_count = static_cast<std::uint8_t>(size);
  for (std::size_t j = 0; j < size; ++j) {
    copy.dims[j] = {loops[j].count, loops[j].src, loops[j].dst};
    if (!loops[j].indexed) continue;
    copy.indexed_dim = static_cast<std::int8_t>(j);
    copy.slots = table;
    copy.indexed_source = indexed_source;
  }
  return copy;
}

std::int64_t largest_divisor(std::int64_t n, std::int64_t limit) noexcept {
  for (std::int64_t d = std::min(n, limit); d > 1; --d) {
    if (n % d == 0) return d;
  }
  return 1;
}

}  // namespace headrace
