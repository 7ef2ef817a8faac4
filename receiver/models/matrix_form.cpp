#include "receiver/models/matrix_form.h"

#include <algorithm>
#include <utility>

#include "receiver/models/layout_writer.h"

namespace headrace {
namespace {

constexpr std::int64_t kTileRows = 128;
constexpr std::int64_t kTileColumns = 4;
constexpr std::int64_t kTileBytes = kTileRows * kTileColumns;
constexpr std::int64_t kQuarterRows = 32;  // a tile interleaves its four quarters
constexpr std::int64_t kWordColumns = 4;

std::int64_t whole_tiles(std::int64_t size, std::int64_t tile) {
  return (size + tile - 1) / tile;
}

/// A part of the rank's matrix.
struct Rect {
  std::int64_t row = 0;
  std::int64_t column = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

/// A part of the rank's matrix that one nest brings from packed rows to where the form has it.
struct Piece {
  Rect rect;
  StridedCopy copy;
};

struct Interval {
  std::int64_t lo = 0;
  std::int64_t size = 0;
};

/// Cuts [lo, lo + size) into what lies in a tile that began before, whole tiles, and what is left.
std::vector<Interval> cut_at_tiles(std::int64_t lo, std::int64_t size, std::int64_t tile) {
  const std::int64_t end = lo + size;
  std::vector<Interval> parts;
  for (const std::int64_t to : {std::min(end, whole_tiles(lo, tile) * tile), end / tile * tile, end}) {
    if (to <= lo) continue;
    parts.push_back({lo, to - lo});
    lo = to;
  }
  return parts;
}

StridedCopy swizzle(const MatrixLayout& layout, const Rect& rect) {
  const std::int64_t row_of_tiles = whole_tiles(layout.columns, kTileColumns) * kTileBytes;
  const std::int64_t offset = rect.row / kTileRows * row_of_tiles + rect.column / kTileColumns * kTileBytes +
                              rect.row % kTileRows / kQuarterRows * kTileColumns + rect.column % kTileColumns;
  const bool tall = rect.rows % kTileRows == 0;
  const bool wide = rect.columns % kTileColumns == 0;
  const std::int64_t row = rect.columns;
  return nest_of(0, offset, wide ? kTileColumns : rect.columns,
                 {{tall ? rect.rows / kTileRows : 1, kTileRows * row, row_of_tiles},
                  {tall ? kTileRows / kQuarterRows : rect.rows / kQuarterRows, kQuarterRows * row, kTileColumns},
                  {kQuarterRows, row, kTileRows / kQuarterRows * kTileColumns},
                  {wide ? rect.columns / kTileColumns : 1, kTileColumns, kTileBytes}});
}

StridedCopy words(const MatrixLayout& layout, const Rect& rect) {
  const std::int64_t group = layout.group_rows;
  return nest_of(0, rect.row * rect.columns, kWordColumns,
                 {{rect.rows / group, group * rect.columns, group * rect.columns},
                  {group, rect.columns, kWordColumns},
                  {rect.columns / kWordColumns, kWordColumns, kWordColumns * group}});
}

std::vector<Piece> pieces_of(const MatrixLayout& layout, const Rect& rect) {
  std::vector<Piece> pieces;
  switch (layout.form) {
    case MatrixForm::kRows: {
      const std::int64_t run = rect.columns * layout.elem_bytes;
      const std::int64_t row = layout.columns * layout.elem_bytes;
      pieces.push_back({rect, nest_of(0, rect.row * row + rect.column * layout.elem_bytes, run, {{rect.rows, run, row}})});
      break;
    }
    case MatrixForm::kSwizzled:
      for (const Interval& rows : cut_at_tiles(rect.row, rect.rows, kTileRows)) {
        for (const Interval& columns : cut_at_tiles(rect.column, rect.columns, kTileColumns)) {
          const Rect piece{rows.lo, columns.lo, rows.size, columns.size};
          pieces.push_back({piece, swizzle(layout, piece)});
        }
      }
      break;
    case MatrixForm::kWords: pieces.push_back({rect, words(layout, rect)}); break;
  }
  return pieces;
}

/// The part of the tensor that fills `rect`.
Box source_of(const MatrixPart& part, const Rect& rect) {
  const std::int64_t row = part.rows.lo + (rect.row - part.at_row) / part.repeat;
  const std::int64_t column = part.columns.lo + rect.column;
  return {{row, column}, {row + rect.rows / part.repeat, column + rect.columns}};
}

/// From the tensor to packed rows of the rank's matrix.
StridedCopy load(const MatrixPart& part, const Box& box, std::int64_t elem_bytes) {
  const std::int64_t source_row = part.shape[1] * elem_bytes;
  const std::int64_t row = (box.hi[1] - box.lo[1]) * elem_bytes;
  return nest_of(box.lo[0] * source_row + box.lo[1] * elem_bytes, 0, row,
                 {{box.hi[0] - box.lo[0], source_row, part.repeat * row}, {part.repeat, 0, row}});
}

Rect filled(const MatrixPart& part) {
  return {part.at_row, 0, (part.rows.hi - part.rows.lo) * part.repeat, part.columns.hi - part.columns.lo};
}

}  // namespace

StorageSpec storage_of(const MatrixLayout& layout, Dtype dtype) {
  StorageSpec spec;
  switch (layout.form) {
    case MatrixForm::kRows:
      spec.dtype = dtype;
      spec.shape = layout.group_rows > 0 ? Shape{layout.rows / layout.group_rows, layout.group_rows, layout.columns}
                                         : Shape{layout.rows, layout.columns};
      break;
    case MatrixForm::kSwizzled:
      spec.dtype = dtype;
      spec.shape = {whole_tiles(layout.rows, kTileRows) * whole_tiles(layout.columns, kTileColumns) * kTileBytes};
      break;
    case MatrixForm::kWords: {
      const std::int64_t across = layout.columns / kWordColumns;
      spec.dtype = Dtype::kI32;
      spec.shape = {layout.rows / layout.group_rows, layout.group_rows, across};
      spec.strides = {layout.group_rows * across, 1, layout.group_rows};
      break;
    }
  }
  return spec;
}

Share Share::of(std::int64_t size, std::int64_t padded, std::int64_t rank, std::int64_t ranks) {
  const std::int64_t part = padded / ranks;
  return {std::min(size, rank * part), std::min(size, (rank + 1) * part), part};
}

Result<std::vector<Placement>> place_part(const MatrixLayout& layout, const MatrixPart& part, const Permutation& permutation,
                                          std::uint32_t storage) {
  std::vector<Placement> placements;
  const Rect rect = filled(part);
  if (rect.rows == 0 || rect.columns == 0) return placements;
  for (const Piece& piece : pieces_of(layout, rect)) {
    Box box = source_of(part, piece.rect);
    Result<StridedCopy> copy = load(part, box, layout.elem_bytes);
    if (permutation) copy = compose(copy.value(), permutation(rect.rows, rect.columns * layout.elem_bytes));
    if (copy.ok()) copy = compose(copy.value(), piece.copy);
    if (!copy.ok()) return copy.status();
    placements.push_back({.storage = storage, .box = std::move(box), .copy = std::move(copy).value()});
  }
  return placements;
}

std::vector<StridedCopy> padding_of(const MatrixLayout& layout, std::span<const MatrixPart> parts) {
  std::vector<Rect> pads;
  for (const MatrixPart& part : parts) {
    const Rect has = filled(part);
    const std::int64_t rows = part.rows.size * part.repeat;
    pads.push_back({has.row + has.rows, 0, rows - has.rows, layout.columns});
    pads.push_back({has.row, has.columns, has.rows, layout.columns - has.columns});
  }
  if (layout.form == MatrixForm::kSwizzled) {
    const std::int64_t rows = whole_tiles(layout.rows, kTileRows) * kTileRows;
    const std::int64_t columns = whole_tiles(layout.columns, kTileColumns) * kTileColumns;
    pads.push_back({layout.rows, 0, rows - layout.rows, columns});
    pads.push_back({0, layout.columns, layout.rows, columns - layout.columns});
  }
  std::vector<StridedCopy> copies;
  for (const Rect& pad : pads) {
    if (pad.rows == 0 || pad.columns == 0) continue;
    for (Piece& piece : pieces_of(layout, pad)) {
      for (CopyDim& dim : piece.copy.dims) dim.src_stride = 0;
      copies.push_back(std::move(piece.copy));
    }
  }
  return copies;
}

}  // namespace headrace
