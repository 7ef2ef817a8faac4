#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/strided_copy.h"

// The MegaMoE expert layout twice: as nests, and as formulas for one byte each. They share nothing but the shape.
namespace headrace::megamoe {

struct Shape {
  std::string name;
  std::int64_t hidden = 0;
  std::int64_t inter = 0;
  std::int64_t padded = 0;  // inter, or more where the kernels want multiples of 512
};

enum class Part { kW1, kW3, kW2, kW1Scale, kW3Scale, kW2Scale };
inline constexpr Part kParts[] = {Part::kW1, Part::kW3, Part::kW2, Part::kW1Scale, Part::kW3Scale, Part::kW2Scale};

struct Matrix {
  std::int64_t rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t bytes() const { return rows * row_bytes; }
};

inline Matrix source_of(const Shape& s, Part part) {
  switch (part) {
    case Part::kW1:
    case Part::kW3: return {s.inter, s.hidden / 2};
    case Part::kW2: return {s.hidden, s.inter / 2};
    case Part::kW1Scale:
    case Part::kW3Scale: return {s.inter, s.hidden / 32};
    case Part::kW2Scale: return {s.hidden, s.inter / 32};
  }
  return {};
}

inline std::int64_t slot_bytes(const Shape& s, Part part) {
  switch (part) {
    case Part::kW1:
    case Part::kW3: return s.padded * s.hidden;
    case Part::kW2: return s.hidden * s.padded / 2;
    case Part::kW1Scale:
    case Part::kW3Scale: return s.hidden / 128 * 8 * s.padded;
    case Part::kW2Scale: return s.padded / 128 * 4 * s.hidden;
  }
  return 0;
}

inline StridedCopy nest(const Shape& s, Part part, std::int64_t slot) {
  const std::int64_t base = slot * slot_bytes(s, part);
  const std::int64_t up = part == Part::kW3 || part == Part::kW3Scale ? 1 : 0;
  const Matrix source = source_of(s, part);
  const std::int64_t r = source.row_bytes;
  std::vector<CopyDim> dims;
  switch (part) {
    case Part::kW1:
    case Part::kW3: dims = {{s.inter / 8, 8 * r, 16 * r}}; return StridedCopy::make(0, base + up * 8 * r, 8 * r, dims);
    case Part::kW2: dims = {{s.hidden, r, s.padded / 2}}; return StridedCopy::make(0, base, r, dims);
    case Part::kW1Scale:
    case Part::kW3Scale:
      dims = {{s.inter / 64, 64 * r, 512}, {4, 16 * r, 4}, {2, 8 * r, 256}, {8, r, 16}, {s.hidden / 128, 4, 8 * s.padded}};
      return StridedCopy::make(0, base + up * 128, 4, dims);
    case Part::kW2Scale:
      dims = {{s.hidden / 128, 128 * r, 512}, {4, 32 * r, 4}, {32, r, 16}, {s.inter / 128, 4, 4 * s.hidden}};
      return StridedCopy::make(0, base, 4, dims);
  }
  return {};
}

/// Padding of one slot, by the tensor that the part goes into.
inline std::vector<StridedCopy> padding(const Shape& s, Part part) {
  if (s.padded == s.inter) return {};
  switch (part) {
    case Part::kW1:
    case Part::kW3: return {StridedCopy::flat(0, s.inter * s.hidden, (s.padded - s.inter) * s.hidden)};
    case Part::kW2: {
      const std::vector<CopyDim> dims{{s.hidden, 0, s.padded / 2}};
      return {StridedCopy::make(0, s.inter / 2, (s.padded - s.inter) / 2, dims)};
    }
    case Part::kW1Scale:
    case Part::kW3Scale: {
      const std::vector<CopyDim> dims{{s.hidden / 128, 0, 8 * s.padded}};
      return {StridedCopy::make(0, 8 * s.inter, 8 * (s.padded - s.inter), dims)};
    }
    case Part::kW2Scale: return {StridedCopy::flat(0, s.inter / 128 * 4 * s.hidden, (s.padded - s.inter) / 128 * 4 * s.hidden)};
  }
  return {};
}

/// Where byte (row, column) of a source matrix lives, from bit formulas of the kernel's row order.
inline std::int64_t byte_address(const Shape& s, Part part, std::int64_t slot, std::int64_t row, std::int64_t column) {
  const std::int64_t up = part == Part::kW3 || part == Part::kW3Scale ? 1 : 0;
  const std::int64_t interleaved = (row >> 3) << 4 | up << 3 | (row & 7);
  const auto shuffled = [](std::int64_t r) { return (r & ~std::int64_t{127}) | ((r & 31) << 2) | ((r >> 5) & 3); };
  switch (part) {
    case Part::kW1:
    case Part::kW3: return (slot * 2 * s.padded + interleaved) * (s.hidden / 2) + column;
    case Part::kW2: return (slot * s.hidden + row) * (s.padded / 2) + column;
    case Part::kW1Scale:
    case Part::kW3Scale: return ((slot * (s.hidden / 128) + (column >> 2)) * 2 * s.padded + shuffled(interleaved)) * 4 + (column & 3);
    case Part::kW2Scale: return ((slot * (s.padded / 128) + (column >> 2)) * s.hidden + shuffled(row)) * 4 + (column & 3);
  }
  return -1;
}

inline std::vector<Shape> small_shapes() {
  return {{"smallest", 128, 128, 128}, {"H 256 I 128 P 512", 256, 128, 512}, {"demo", 256, 384, 512}, {"demo unpadded", 256, 384, 384}};
}

inline std::vector<Shape> model_shapes() {
  return {{"V4.1 padded", 5120, 2304, 2560}, {"V4.1", 5120, 2304, 2304}, {"V4-Flash", 4096, 2048, 2048},
          {"V4-Pro", 7168, 3072, 3072},      {"demo", 256, 384, 512},    {"demo unpadded", 256, 384, 384}};
}

}  // namespace headrace::megamoe
