#include "kernels/strided_copy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "kernels/loop_nest.h"

namespace headrace {

StridedCopy StridedCopy::make(std::int64_t src_offset, std::int64_t dst_offset, std::int64_t run_bytes, std::span<const CopyDim> dims) {
  HEADRACE_CHECK(dims.size() <= kCopyDimsMax, "a nest has at most kCopyDimsMax dimensions");
  StridedCopy copy;
  copy.src_offset = src_offset;
  copy.dst_offset = dst_offset;
  copy.run_bytes = run_bytes;
  copy.dim_count = static_cast<std::uint8_t>(dims.size());
  std::copy(dims.begin(), dims.end(), copy.dims.begin());
  return copy;
}

StridedCopy StridedCopy::flat(std::int64_t src_offset, std::int64_t dst_offset, std::int64_t bytes) {
  return make(src_offset, dst_offset, bytes, {});
}

std::int64_t StridedCopy::run_count() const noexcept {
  std::int64_t product = 1;
  for (const CopyDim& dim : loops()) product *= dim.count;
  return product;
}

std::int64_t StridedCopy::dst_bytes() const noexcept {
  return run_count() * run_bytes;
}

std::int64_t StridedCopy::src_bytes() const noexcept {
  const std::int64_t times = repeats(*this);
  return times == 0 ? 0 : dst_bytes() / times;
}

bool StridedCopy::operator==(const StridedCopy& other) const noexcept {
  if (src_offset != other.src_offset || dst_offset != other.dst_offset || run_bytes != other.run_bytes || dim_count != other.dim_count ||
      indexed_dim != other.indexed_dim || !std::equal(loops().begin(), loops().end(), other.loops().begin())) {
    return false;
  }
  if (indexed_dim < 0) return true;
  if (indexed_source != other.indexed_source || !slots != !other.slots) return false;
  return slots == other.slots || *slots == *other.slots;
}

std::string StridedCopy::to_string() const {
  std::string text = fmt::format("src {} dst {} run {}", src_offset, dst_offset, run_bytes);
  for (std::size_t j = 0; j < dim_count; ++j) {
    text += fmt::format(" ({},{},{})", dims[j].count, dims[j].src_stride, dims[j].dst_stride);
    if (indexed_dim != static_cast<int>(j)) continue;
    text += indexed_source ? "@src" : "@dst";
    if (slots) text += fmt::format("{}", *slots);
  }
  return text;
}

std::int64_t repeats(const StridedCopy& copy) noexcept {
  std::int64_t product = 1;
  for (const CopyDim& dim : copy.loops()) {
    if (dim.src_stride == 0) product *= dim.count;
  }
  return product;
}

StridedCopy repeat(const StridedCopy& copy, std::int64_t r) {
  HEADRACE_CHECK(r >= 0 && r < repeats(copy), "repeat index out of range");
  StridedCopy one = copy;
  std::size_t kept = copy.dim_count;
  for (std::size_t j = copy.dim_count; j-- > 0;) {
    const CopyDim& dim = copy.dims[j];
    if (dim.src_stride != 0) {
      one.dims[--kept] = dim;
      if (copy.indexed_dim == static_cast<int>(j)) one.indexed_dim = static_cast<std::int8_t>(kept);
      continue;
    }
    const std::int64_t step = r % dim.count;
    r /= dim.count;
    const bool through_table = copy.indexed_dim == static_cast<int>(j) && !copy.indexed_source;
    one.dst_offset += (through_table ? std::int64_t{(*copy.slots)[static_cast<std::size_t>(step)]} : step) * dim.dst_stride;
    if (copy.indexed_dim == static_cast<int>(j)) one.indexed_dim = -1;
  }
  const std::size_t dropped = kept;
  std::move(one.dims.begin() + static_cast<std::ptrdiff_t>(dropped), one.dims.begin() + copy.dim_count, one.dims.begin());
  one.dim_count = static_cast<std::uint8_t>(copy.dim_count - dropped);
  std::fill(one.dims.begin() + one.dim_count, one.dims.end(), CopyDim{});
  if (one.indexed_dim >= 0) {
    one.indexed_dim = static_cast<std::int8_t>(one.indexed_dim - static_cast<int>(dropped));
  } else {
    one.slots.reset();
    one.indexed_source = false;
  }
  return one;
}

StridedCopy inverse(const StridedCopy& copy) {
  StridedCopy back = repeat(copy, 0);
  std::swap(back.src_offset, back.dst_offset);
  for (CopyDim& dim : back.dims) std::swap(dim.src_stride, dim.dst_stride);
  if (back.indexed_dim >= 0) back.indexed_source = !back.indexed_source;
  return back;
}

StridedCopy coalesce(const StridedCopy& copy) {
  LoopNest nest(copy);
  nest.merge();
  return nest.to_copy(copy.slots).value();
}

}  // namespace headrace
