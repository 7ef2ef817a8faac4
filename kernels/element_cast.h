#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"

namespace headrace {

/// A conversion between two of F32, F16 and BF16, or none when both are equal. docs/protocol.md states its rules: to nearest, ties to even;
/// beyond the largest number infinity; subnormals like all others; a NaN keeps its sign and its upper payload and is quiet.
struct ElementCast {
  Dtype from = Dtype::kU8;
  Dtype to = Dtype::kU8;

  bool none() const noexcept { return from == to; }
  std::int64_t from_bytes() const noexcept { return dtype_bytes(from); }
  std::int64_t to_bytes() const noexcept { return dtype_bytes(to); }
  /// Source bytes of what makes `bytes` whole elements of the destination.
  std::int64_t source_bytes(std::int64_t bytes) const noexcept { return none() ? bytes : bytes / to_bytes() * from_bytes(); }
  bool operator==(const ElementCast&) const = default;
};

/// Whether there is such a conversion; equal dtypes need none.
bool castable(Dtype from, Dtype to) noexcept;

/// `rows` runs of `elements` elements, each run contiguous on both sides, strides in bytes; any alignment. Precondition: castable and not
/// none. Any thread.
void cast_rows(ElementCast cast, const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride,
               std::int64_t elements) noexcept;

}  // namespace headrace
