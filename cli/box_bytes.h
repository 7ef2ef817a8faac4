#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/base/shape.h"
#include "core/base/status.h"

// Boxes of a tensor in row-major bytes. Pure.
namespace headrace::cli {

/// Cuts a box into boxes of at most `elements_max` elements, in row-major order: along the outermost dimension that suffices, in steps of
/// whole multiples of 128 rows where there is room, since layouts cut there.
std::vector<Box> cut_box(const Box& box, std::int64_t elements_max);

/// Offset in elements of the packed element number `index` of `box` within a tensor of this shape.
std::int64_t element_offset(const Shape& shape, const Box& box, std::int64_t index);

/// Byte offset within the tensor of the first byte in which `packed`, the box's packed bytes, differs from the tensor's own.
std::optional<std::int64_t> first_difference(std::span<const std::byte> tensor, const Shape& shape, std::int64_t element_bytes,
                                             const Box& box, std::span<const std::byte> packed);

}  // namespace headrace::cli
