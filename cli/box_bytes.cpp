#include "cli/box_bytes.h"

#include <algorithm>
#include <cstring>

namespace headrace::cli {
namespace {

constexpr std::int64_t kRowsAtATime = 128;

void cut_along(const Box& box, std::size_t dim, std::int64_t elements_max, std::vector<Box>& out) {
  if (box.empty()) return;
  if (dim >= box.rank() || box.elements() <= elements_max) {
    out.push_back(box);
    return;
  }
  const std::int64_t rows = box.hi[dim] - box.lo[dim];
  const std::int64_t row_elements = box.elements() / rows;
  std::int64_t step = std::max<std::int64_t>(1, elements_max / row_elements);
  if (step > kRowsAtATime) step -= step % kRowsAtATime;
  for (std::int64_t row = box.lo[dim]; row < box.hi[dim]; row += step) {
    Box part = box;
    part.lo[dim] = row;
    part.hi[dim] = std::min(row + step, box.hi[dim]);
    cut_along(part, dim + 1, elements_max, out);
  }
}

}  // namespace

std::vector<Box> cut_box(const Box& box, std::int64_t elements_max) {
  std::vector<Box> parts;
  cut_along(box, 0, elements_max, parts);
  return parts;
}

std::int64_t element_offset(const Shape& shape, const Box& box, std::int64_t index) {
  std::int64_t offset = 0;
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    const std::int64_t extent = box.hi[d] - box.lo[d];
    offset += (box.lo[d] + index % extent) * stride;
    index /= extent;
    stride *= shape[d];
  }
  return offset;
}

std::optional<std::int64_t> first_difference(std::span<const std::byte> tensor, const Shape& shape, std::int64_t element_bytes,
                                             const Box& box, std::span<const std::byte> packed) {
  const std::int64_t run = shape.empty() ? 1 : box.hi.back() - box.lo.back();
  const std::int64_t elements = box.elements();
  for (std::int64_t index = 0; index < elements; index += run) {
    const auto at = static_cast<std::size_t>(element_offset(shape, box, index) * element_bytes);
    const auto from = static_cast<std::size_t>(index * element_bytes);
    const auto bytes = static_cast<std::size_t>(run * element_bytes);
    const auto live = packed.subspan(from, bytes);
    const auto [difference, end] = std::mismatch(live.begin(), live.end(), tensor.begin() + static_cast<std::ptrdiff_t>(at));
    if (difference != live.end()) return static_cast<std::int64_t>(at) + (difference - live.begin());
  }
  return std::nullopt;
}

}  // namespace headrace::cli
