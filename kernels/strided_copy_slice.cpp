#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "kernels/loop_nest.h"
#include "kernels/strided_copy.h"

namespace headrace {
namespace {

Status refuse(const std::string& why) {
  return {Code::kInvalidArgument, "slice: " + why};
}

/// Bytes of one step along each tensor dimension; a last entry of 1 stands for the bytes inside an element.
Result<std::vector<std::int64_t>> steps_of(const TensorGeometry& source) {
  const auto elements = element_count(source.shape);
  std::int64_t bytes = 0;
  if (!elements || *elements == 0 || source.elem_bytes <= 0 || __builtin_mul_overflow(*elements, source.elem_bytes, &bytes)) {
    return refuse(fmt::format("tensor {} of {}-byte elements has no bytes or too many", to_string(source.shape), source.elem_bytes));
  }
  std::vector<std::int64_t> steps = packed_strides(source.shape, source.elem_bytes);
  steps.push_back(1);
  return steps;
}

/// A loop of the nest that stays inside one tensor dimension.
struct Piece {
  Loop loop;              // src in bytes of the packed tensor
  std::size_t dim = 0;    // rank for the bytes inside an element
  std::int64_t unit = 0;  // src in steps of that dimension; 0 for a repeat, which belongs to none
  bool of_run = false;
};

/// A nest in terms of its source tensor: where it begins, and its loops cut at the dimensions of the tensor, outermost first.
struct Anatomy {
  std::vector<std::int64_t> sizes;  // of the dimensions, then elem_bytes
  std::vector<std::int64_t> steps;
  std::vector<std::int64_t> begin;  // coordinates of src_offset
  std::vector<Piece> pieces;
  std::int64_t slots_from = 0;  // steps cut off in front of the indexed dimension
};

Status cut_loop(Anatomy& anatomy, Loop loop, bool of_run, std::vector<Piece>& out) {
  while (loop.count > 1) {
    std::size_t dim = 0;
    while (anatomy.steps[dim] > loop.src) ++dim;
    const std::int64_t step = anatomy.steps[dim];
    const std::int64_t span = step * anatomy.sizes[dim];
    if (loop.src % step != 0) return refuse(fmt::format("a stride of {} bytes is no multiple of dimension {}'s {}", loop.src, dim, step));
    const bool inside = (loop.count - 1) * loop.src < span;
    const std::int64_t inner = inside ? loop.count : span / loop.src;
    if (!inside && (dim == 0 || loop.indexed || span % loop.src != 0 || loop.count % inner != 0)) {
      return refuse(fmt::format("{} steps of {} bytes do not end with dimension {}", loop.count, loop.src, dim));
    }
    if (inner > 1) out.push_back({{inner, loop.src, loop.dst, loop.indexed}, dim, loop.src / step, of_run});
    if (inside) return ok_status();
    loop = {loop.count / inner, span, loop.dst * inner, false};
  }
  return ok_status();
}

/// One past the last coordinate of dimension `dim` that the nest reads.
std::int64_t end_of(const Anatomy& anatomy, std::size_t dim) {
  std::int64_t end = anatomy.begin[dim] + 1;
  for (const Piece& piece : anatomy.pieces) end += piece.dim == dim ? (piece.loop.count - 1) * piece.unit : 0;
  return end;
}

Result<Anatomy> dissect(const LoopNest& nest, const TensorGeometry& source) {
  Result<std::vector<std::int64_t>> steps = steps_of(source);
  if (!steps.ok()) return steps.status();
  Anatomy anatomy{source.shape, std::move(steps).value(), {}, {}, 0};
  anatomy.sizes.push_back(source.elem_bytes);
  std::vector<Piece>& pieces = anatomy.pieces;  // innermost first until the end
  HEADRACE_RETURN_IF_ERROR(cut_loop(anatomy, {nest.run, 1, 1, false}, true, pieces));
  for (std::size_t j = nest.size; j-- > 0;) {
    const Loop& loop = nest.loops[j];
    if (loop.src < 0 || (loop.indexed && nest.indexed_source))
      return refuse(fmt::format("source dimension {} runs backwards or is indexed", j));
    if (loop.src == 0) {
      pieces.push_back({loop, 0, 0, false});
    } else {
      HEADRACE_RETURN_IF_ERROR(cut_loop(anatomy, loop, false, pieces));
    }
  }
  std::reverse(pieces.begin(), pieces.end());
  std::int64_t rest = nest.src_offset;
  for (std::size_t d = 0; d < anatomy.steps.size(); ++d) {
    anatomy.begin.push_back(rest / anatomy.steps[d]);
    rest %= anatomy.steps[d];
    const std::int64_t end = end_of(anatomy, d);
    if (nest.src_offset < 0 || end > anatomy.sizes[d]) {
      return refuse(fmt::format("the nest reads [{},{}) of dimension {}, which has {}", anatomy.begin[d], end, d, anatomy.sizes[d]));
    }
  }
  return anatomy;
}

/// The piece with the largest step in `dim`, null when the nest stands still there.
Piece* outermost(Anatomy& anatomy, std::size_t dim) {
  Piece* found = nullptr;
  for (Piece& piece : anatomy.pieces) {
    if (piece.unit > 0 && piece.dim == dim && (found == nullptr || piece.unit > found->unit)) found = &piece;
  }
  return found;
}

std::int64_t granule_of(Anatomy& anatomy, std::size_t dim) {
  const Piece* outer = outermost(anatomy, dim);
  if (outer == nullptr) return 1;
  std::int64_t extent = 1;  // of what the inner pieces cover
  for (const Piece& piece : anatomy.pieces) {
    if (&piece != outer && piece.unit > 0 && piece.dim == dim) extent += (piece.loop.count - 1) * piece.unit;
  }
  return anatomy.begin[dim] % outer->unit + extent <= outer->unit ? outer->unit : anatomy.sizes[dim];
}

Status check_box(const TensorGeometry& source, const Box& box, std::span<const std::int64_t> src_strides) {
  if (!box_fits(box, source.shape) || box.empty()) {
    return refuse(fmt::format("box {} of tensor {}", to_string(box), to_string(source.shape)));
  }
  if (src_strides.size() != source.shape.size()) {
    return refuse(fmt::format("{} strides for a tensor of {} dimensions", src_strides.size(), source.shape.size()));
  }
  for (std::size_t d = 0; d < src_strides.size(); ++d) {
    if (src_strides[d] < 0) return refuse(fmt::format("source stride {} of dimension {} is negative", src_strides[d], d));
  }
  return ok_status();
}

/// Keeps the steps of dimension `dim` that lie in [lo, hi). False when none is left. An edge that takes nothing away may be anywhere.
Result<bool> cut(Anatomy& anatomy, std::size_t dim, std::int64_t lo, std::int64_t hi) {
  std::int64_t& begin = anatomy.begin[dim];
  const std::int64_t end = end_of(anatomy, dim);
  if (lo >= end || hi <= begin) return false;
  const std::int64_t granule = granule_of(anatomy, dim);
  if ((lo > begin && lo % granule != 0) || (hi < end && hi % granule != 0)) {
    return refuse(fmt::format("dimension {} is cut to [{},{}), expected multiples of {} or what the nest reads, [{},{})", dim, lo, hi,
                              granule, begin, end));
  }
  Piece* outer = outermost(anatomy, dim);
  if (outer == nullptr || (lo <= begin && hi >= end)) return true;
  const auto steps_before = [&](std::int64_t edge) {
    return std::clamp<std::int64_t>((edge - begin + outer->unit - 1) / outer->unit, 0, outer->loop.count);
  };
  const std::int64_t from = lo > begin ? steps_before(lo) : 0;
  const std::int64_t to = steps_before(hi);
  if (from >= to) return false;
  begin += from * outer->unit;
  outer->loop.count = to - from;
  if (outer->loop.indexed) anatomy.slots_from = from;
  return true;
}

/// The destination moves on by what was cut off in front.
std::int64_t dst_shift(const Anatomy& before, const Anatomy& after) {
  std::int64_t shift = 0;
  Anatomy whole = before;
  for (std::size_t d = 0; d + 1 < whole.steps.size(); ++d) {
    const Piece* outer = outermost(whole, d);
    if (outer != nullptr && !outer->loop.indexed) shift += (after.begin[d] - whole.begin[d]) / outer->unit * outer->loop.dst;
  }
  return shift;
}

Result<StridedCopy> assemble(const Anatomy& part, SlotTable table, const Box& box, std::int64_t src_offset, std::int64_t dst_offset,
                             std::span<const std::int64_t> src_strides, std::int64_t elem_bytes) {
  const std::size_t rank = src_strides.size();
  LoopNest out(src_offset + part.begin[rank], dst_offset, 1);
  if (part.slots_from > 0) table = std::make_shared<const std::vector<std::int32_t>>(table->begin() + part.slots_from, table->end());
  if (table) out.slots = table->data();
  for (std::size_t d = 0; d < rank; ++d) out.src_offset += (part.begin[d] - box.lo[d]) * src_strides[d];
  for (const Piece& piece : part.pieces) {
    const bool run_of_elements = piece.of_run && piece.dim + 1 == rank && piece.loop.count > 1;
    if (run_of_elements && src_strides[piece.dim] != elem_bytes) {
      return refuse(fmt::format("source elements stand {} bytes apart, a run needs {}", src_strides[piece.dim], elem_bytes));
    }
    const std::int64_t stride = piece.unit == 0 ? 0 : piece.unit * (piece.dim == rank ? 1 : src_strides[piece.dim]);
    out.push({piece.loop.count, stride, piece.loop.dst, piece.loop.indexed});
  }
  out.merge();
  return out.to_copy(table);
}

}  // namespace

std::vector<std::int64_t> packed_strides(std::span<const std::int64_t> shape, std::int64_t elem_bytes) {
  std::vector<std::int64_t> strides(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = elem_bytes;
    elem_bytes *= shape[d];
  }
  return strides;
}

Result<StridedCopy> pack_nest(std::span<const std::int64_t> box_shape, std::int64_t elem_bytes, std::span<const std::int64_t> src_strides) {
  const auto elements = element_count(box_shape);
  if (!elements || *elements == 0 || elem_bytes <= 0 || src_strides.size() != box_shape.size()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("pack: box of shape {}, {}-byte elements, {} strides", to_string(box_shape), elem_bytes, src_strides.size()));
  }
  const std::vector<std::int64_t> packed = packed_strides(box_shape, elem_bytes);
  LoopNest nest(0, 0, elem_bytes);
  for (std::size_t d = 0; d < box_shape.size(); ++d) {
    if (src_strides[d] < 0)
      return Status(Code::kInvalidArgument, fmt::format("pack: stride {} of dimension {} is negative", src_strides[d], d));
    if (box_shape[d] > 1) nest.push({box_shape[d], src_strides[d], packed[d], false});
  }
  nest.merge();
  return nest.to_copy({});
}

Result<std::vector<std::int64_t>> granule(const StridedCopy& copy, const TensorGeometry& source) {
  const Result<std::vector<std::int64_t>> steps = steps_of(source);
  if (!steps.ok()) return steps.status();
  HEADRACE_RETURN_IF_ERROR(
      validate(copy, steps.value().empty() ? 0 : element_count(source.shape).value_or(0) * source.elem_bytes, INT64_MAX / 2));
  LoopNest nest(copy);
  nest.merge();
  Result<Anatomy> anatomy = dissect(nest, source);
  if (!anatomy.ok()) return source.shape;  // no inner cut is expressible: whole tensors only
  std::vector<std::int64_t> granules;
  granules.reserve(source.shape.size());
  for (std::size_t d = 0; d < source.shape.size(); ++d) granules.push_back(granule_of(anatomy.value(), d));
  return granules;
}

Result<StridedCopy> slice(const StridedCopy& copy, const TensorGeometry& source, const Box& box, std::int64_t src_offset,
                          std::span<const std::int64_t> src_strides) {
  const Result<std::vector<std::int64_t>> steps = steps_of(source);
  if (!steps.ok()) return steps.status();
  HEADRACE_RETURN_IF_ERROR(check_box(source, box, src_strides));
  LoopNest nest(copy);
  nest.merge();
  if (box == Box::whole(source.shape) && std::equal(src_strides.begin(), src_strides.end(), steps.value().begin())) {
    nest.src_offset += src_offset;
    return nest.to_copy(copy.slots);
  }
  Result<Anatomy> whole = dissect(nest, source);
  if (!whole.ok()) return whole.status();
  Anatomy part = whole.value();
  for (std::size_t d = 0; d < box.rank(); ++d) {
    const Result<bool> some = cut(part, d, box.lo[d], box.hi[d]);
    if (!some.ok()) return some.status();
    if (!some.value()) return StridedCopy::flat(src_offset, nest.dst_offset, 0);
  }
  return assemble(part, copy.slots, box, src_offset, nest.dst_offset + dst_shift(whole.value(), part), src_strides, source.elem_bytes);
}

}  // namespace headrace
