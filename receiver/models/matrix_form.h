#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "core/base/status.h"
#include "receiver/models/family.h"

namespace headrace {

/// How an engine keeps a matrix. All but kRows are forms of scales, whose elements are bytes.
enum class MatrixForm : std::uint8_t {
  kRows,      // row after row
  kSwizzled,  // tiles of 128 rows and 4 columns, row of tiles after row of tiles; rows and columns padded to whole tiles
  kWords,     // groups of rows; in a group 4 columns are a word, and words lie column after column
};

/// The rank's matrix in the engine's form. Rows and columns are those of the loader's form, before padding to tiles.
struct MatrixLayout {
  MatrixForm form = MatrixForm::kRows;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t elem_bytes = 1;
  std::int64_t group_rows = 0;  // a divisor of rows, 0 for no groups; kWords needs them, and columns in fours
};

/// What the rank's storage is declared as: one dimension of bytes for kSwizzled, 32-bit words [groups, group_rows, columns / 4] with
/// strides for kWords, else `dtype` [rows, columns] or [groups, group_rows, columns].
StorageSpec storage_of(const MatrixLayout& layout, Dtype dtype);

/// The part of one dimension of a tensor that a rank holds: [lo, hi) of the tensor, at the start of `size` of its own; the rest is padding.
struct Share {
  std::int64_t lo = 0;
  std::int64_t hi = 0;
  std::int64_t size = 0;

  static Share whole(std::int64_t size) { return {0, size, size}; }
  /// Share `rank` of `ranks` equal ones of a dimension of `size` that is padded at its end to `padded`. Precondition: it divides.
  static Share of(std::int64_t size, std::int64_t padded, std::int64_t rank, std::int64_t ranks);
};

/// One checkpoint matrix and where the rank's part of it stands in the rank's matrix.
struct MatrixPart {
  Shape shape;  // of the checkpoint tensor
  Share rows{};
  Share columns{};
  std::int64_t repeat = 1;  // rows of the rank's matrix for each row of the tensor
  std::int64_t at_row = 0;  // of the rank's matrix
};

/// Reorders the rank's matrix of `rows` rows of `row_bytes` each, after the loader and before the engine's form. Empty: it stays.
using Permutation = std::function<StridedCopy(std::int64_t rows, std::int64_t row_bytes)>;

/// The places of `part` in storage `storage`: several where the form's tiles do not begin and end with the part, none when the rank has
/// only padding of it. With a permutation the part is the whole of the rank's matrix. kUnsupported when one of them is not one nest.
Result<std::vector<Placement>> place_part(const MatrixLayout& layout, const MatrixPart& part, const Permutation& permutation,
                                          std::uint32_t storage);

/// What no part fills, as nests with a constant source: the padding of each part, then that of the tiles.
std::vector<StridedCopy> padding_of(const MatrixLayout& layout, std::span<const MatrixPart> parts);

}  // namespace headrace
