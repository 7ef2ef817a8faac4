#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/dtype.h"

namespace [[gnu::visibility("default")]] headrace {

/// Dimensions of a tensor, outermost first, row-major. A scalar has none.
using Shape = std::vector<std::int64_t>;

/// Elements of a tensor of this shape; nullopt on overflow or a negative dimension.
std::optional<std::int64_t> element_count(std::span<const std::int64_t> shape) noexcept;
/// Bytes of a packed tensor; nullopt on overflow or when the bits do not fill whole bytes.
std::optional<std::int64_t> byte_count(Dtype dtype, std::span<const std::int64_t> shape) noexcept;
/// "[2304,2560]".
std::string to_string(std::span<const std::int64_t> shape);

/// A half-open box [lo, hi) of a tensor, one pair per dimension. Coordinates are elements of the whole tensor.
struct Box {
  std::vector<std::int64_t> lo;
  std::vector<std::int64_t> hi;

  static Box whole(const Shape& shape) { return Box{std::vector<std::int64_t>(shape.size(), 0), shape}; }
  std::size_t rank() const noexcept { return lo.size(); }
  bool empty() const noexcept;
  Shape shape() const;
  /// Elements inside; 0 when empty.
  std::int64_t elements() const noexcept;
  bool contains(const Box& other) const noexcept;
  bool operator==(const Box&) const = default;
};

/// Same rank as the tensor, 0 <= lo <= hi <= dimension.
bool box_fits(const Box& box, std::span<const std::int64_t> shape) noexcept;
/// The common part; empty() when there is none. Both have the same rank.
Box intersect(const Box& a, const Box& b);
/// "[0:1152,0:2560]".
std::string to_string(const Box& box);

}  // namespace headrace
