#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/shape.h"
#include "core/base/status.h"

namespace [[gnu::visibility("default")]] headrace {

inline constexpr std::size_t kCopyDimsMax = 8;

/// One loop of a nest. Strides are bytes.
struct CopyDim {
  std::int64_t count = 1;
  std::int64_t src_stride = 0;  // 0: the same source bytes at every step (a repeat)
  std::int64_t dst_stride = 0;
  bool operator==(const CopyDim&) const = default;
};

/// Destination steps of an indexed dimension: step k lands at slots[k] * dst_stride. Shared, since copies of a nest are values and
/// every expert run of a layer uses the same table.
using SlotTable = std::shared_ptr<const std::vector<std::int32_t>>;

/// A loop nest that moves `run_bytes` contiguous bytes for every combination of its dimensions, outermost first:
///   dst[dst_offset + sum_j step_j * dst_stride_j + b] = src[src_offset + sum_j i_j * src_stride_j + b],  b in [0, run_bytes)
/// with step_j = i_j, or slots[i_j] for the one dimension that may be indexed.
/// A constant source is a nest whose source strides are all 0 over a pattern of run_bytes (CopyJob::constant). A value; free to copy.
struct StridedCopy {
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::int64_t run_bytes = 0;
  std::uint8_t dim_count = 0;
  std::int8_t indexed_dim = -1;  // which dimension goes through `slots`; -1 for none
  std::array<CopyDim, kCopyDimsMax> dims{};
  SlotTable slots;              // at least dims[indexed_dim].count entries, none negative
  bool indexed_source = false;  // the table steps the source side instead: what inverse() makes of an indexed destination

  /// Builds a nest from the outermost dimension inwards. Precondition: at most kCopyDimsMax.
  static StridedCopy make(std::int64_t src_offset, std::int64_t dst_offset, std::int64_t run_bytes, std::span<const CopyDim> dims);
  /// A flat copy.
  static StridedCopy flat(std::int64_t src_offset, std::int64_t dst_offset, std::int64_t bytes);

  std::span<const CopyDim> loops() const noexcept { return {dims.data(), dim_count}; }
  /// Product of the counts.
  std::int64_t run_count() const noexcept;
  /// Destination bytes written: run_count * run_bytes.
  std::int64_t dst_bytes() const noexcept;
  /// Distinct source bytes read, repeats counted once.
  std::int64_t src_bytes() const noexcept;
  bool operator==(const StridedCopy& other) const noexcept;
  std::string to_string() const;
};

/// What a source tensor looks like to a nest: row-major elements of `elem_bytes`.
struct TensorGeometry {
  Shape shape;
  std::int64_t elem_bytes = 1;
};

/// kInvalidArgument unless every count is positive, run_bytes is positive, all source bytes lie in [0, src_bytes), all destination bytes
/// in [0, dst_bytes), and no destination byte is written twice. Overlap is decided exactly (by strides when they nest, else by bitmap).
Status validate(const StridedCopy& copy, std::int64_t src_bytes, std::int64_t dst_bytes);

/// How many times each source byte is written: the product of the counts of dimensions with source stride 0.
std::int64_t repeats(const StridedCopy& copy) noexcept;
/// The r-th of these copies alone, a nest without repeats. Precondition: 0 <= r < repeats(copy).
StridedCopy repeat(const StridedCopy& copy, std::int64_t r);

/// The nest that reads where `copy` writes and the other way round, each repeat (source stride 0) reduced to its first copy.
/// An indexed dimension keeps its table and moves to the source side (`indexed_source`).
StridedCopy inverse(const StridedCopy& copy);

/// The same bytes moved with as few dimensions and as long runs as possible. Order of writes is not kept.
StridedCopy coalesce(const StridedCopy& copy);

/// A nest that equals `first` (a -> b) followed by `second` (b -> c), when `first` covers what `second` reads and one nest can say it;
/// kUnsupported otherwise, with the dimension at which it failed.
Result<StridedCopy> compose(const StridedCopy& first, const StridedCopy& second);

/// Where a box may be cut, per tensor dimension, in elements: cut coordinates must be multiples of the granule or the end of the tensor.
/// `copy` reads the packed tensor `source`. A dimension that the nest does not walk in equal steps has its whole size as granule.
/// kInvalidArgument for a tensor without elements or a nest that reads beyond it.
Result<std::vector<std::int64_t>> granule(const StridedCopy& copy, const TensorGeometry& source);

/// The part of `copy` whose source bytes lie in `box`, reading from memory where element (i0, i1, ...) of the box, counted from box.lo,
/// stands at src_offset + sum_j i_j * src_strides[j] bytes. kInvalidArgument when the box cuts off a part of what `copy` reads elsewhere
/// than at the granule, or when the innermost source stride would break a run (a run needs elements that lie next to each other). A box
/// that holds nothing of what `copy` reads gives a nest of no bytes (run_bytes 0), which executor and fingerprint pass over; an empty box
/// is kInvalidArgument. kUnsupported when the part needs more than kCopyDimsMax dimensions.
Result<StridedCopy> slice(const StridedCopy& copy, const TensorGeometry& source, const Box& box, std::int64_t src_offset,
                          std::span<const std::int64_t> src_strides);

/// Row-major byte strides of a packed tensor of this shape.
std::vector<std::int64_t> packed_strides(std::span<const std::int64_t> shape, std::int64_t elem_bytes);

/// The nest that packs a box out of strided memory into row-major bytes at dst_offset 0. Strides are bytes, one per dimension, not
/// negative.
Result<StridedCopy> pack_nest(std::span<const std::int64_t> box_shape, std::int64_t elem_bytes, std::span<const std::int64_t> src_strides);

/// One storage and everything that is ever written into it.
struct LayoutPart {
  StridedCopy copy;
  bool constant = false;  // padding: a constant source
};

/// Proves that `parts`, which fill one slot of `slot_bytes`, and their repetition at `slot_stride` for `slots` steps write each byte of a
/// storage of `storage_bytes` exactly once: slot 0 by bitmap, the others by the constant step.
Status prove_layout(std::span<const LayoutPart> parts, std::int64_t slot_bytes, std::int64_t slots, std::int64_t slot_stride,
                    std::int64_t storage_bytes);

}  // namespace headrace
