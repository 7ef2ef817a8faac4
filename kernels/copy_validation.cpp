#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "kernels/byte_set.h"
#include "kernels/loop_nest.h"
#include "kernels/strided_copy.h"

namespace headrace {
namespace {

using Wide = __int128;

// A bitmap of 256 MiB decides overlap over 2 G units; nests that need more are not layouts.
constexpr std::int64_t kOverlapUnitsMax = std::int64_t{1} << 31;

Status refuse(const StridedCopy& copy, const std::string& why) {
  return {Code::kInvalidArgument, fmt::format("strided copy [{}]: {}", copy.to_string(), why)};
}

struct StepRange {
  std::int64_t lo = 0;
  std::int64_t hi = 0;
  std::int64_t gap_min = 1;  // between neighbouring steps
};

Status check_table(const StridedCopy& copy, StepRange& range) {
  const CopyDim& dim = copy.dims[static_cast<std::uint8_t>(copy.indexed_dim)];
  if (!copy.slots || static_cast<std::int64_t>(copy.slots->size()) < dim.count) {
    return refuse(copy, fmt::format("dimension {} goes through a table of {} slots, expected at least {}", copy.indexed_dim,
                                    copy.slots ? copy.slots->size() : 0, dim.count));
  }
  std::vector<std::int32_t> sorted(copy.slots->begin(), copy.slots->begin() + dim.count);
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0) return refuse(copy, fmt::format("slot {} is negative", sorted.front()));
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) return refuse(copy, fmt::format("slot {} stands twice in the table", *twice));
  range = {sorted.front(), sorted.back(), sorted.size() > 1 ? std::int64_t{sorted[1]} - sorted[0] : 1};
  for (std::size_t k = 2; k < sorted.size(); ++k) range.gap_min = std::min<std::int64_t>(range.gap_min, sorted[k] - sorted[k - 1]);
  return ok_status();
}

Status check_counts(const StridedCopy& copy) {
  if (copy.dim_count > kCopyDimsMax) return refuse(copy, fmt::format("{} dimensions, at most {}", copy.dim_count, kCopyDimsMax));
  if (copy.run_bytes <= 0) return refuse(copy, fmt::format("run of {} bytes, expected at least 1", copy.run_bytes));
  if (copy.indexed_dim >= static_cast<int>(copy.dim_count) || copy.indexed_dim < -1) {
    return refuse(copy, fmt::format("indexed dimension {} of {}", copy.indexed_dim, copy.dim_count));
  }
  Wide bytes = copy.run_bytes;
  for (std::size_t j = 0; j < copy.dim_count; ++j) {
    if (copy.dims[j].count <= 0) return refuse(copy, fmt::format("dimension {} has count {}, expected at least 1", j, copy.dims[j].count));
    bytes *= copy.dims[j].count;
    if (bytes > INT64_MAX) return refuse(copy, fmt::format("more than 2^63 bytes at dimension {}", j));
  }
  return ok_status();
}

/// Which steps dimension j takes on the source or the destination side.
StepRange steps_of(const StridedCopy& copy, std::size_t j, bool source, const StepRange& table) {
  const bool indexed = copy.indexed_dim == static_cast<int>(j) && copy.indexed_source == source;
  return indexed ? table : StepRange{0, copy.dims[j].count - 1, 1};
}

Status check_bounds(const StridedCopy& copy, bool source, std::int64_t bytes, const StepRange& table) {
  Wide lo = source ? copy.src_offset : copy.dst_offset;
  Wide hi = lo + copy.run_bytes;
  for (std::size_t j = 0; j < copy.dim_count; ++j) {
    const Wide stride = source ? copy.dims[j].src_stride : copy.dims[j].dst_stride;
    const StepRange steps = steps_of(copy, j, source, table);
    lo += stride * (stride >= 0 ? steps.lo : steps.hi);
    hi += stride * (stride >= 0 ? steps.hi : steps.lo);
    if (lo < INT64_MIN / 2 || hi > INT64_MAX / 2) return refuse(copy, fmt::format("dimension {} leaves the 64-bit range", j));
  }
  if (lo >= 0 && hi <= bytes) return ok_status();
  return refuse(copy, fmt::format("{} bytes [{},{}) lie outside of [0,{})", source ? "source" : "destination",
                                  static_cast<std::int64_t>(lo), static_cast<std::int64_t>(hi), bytes));
}

struct Axis {
  std::int64_t stride = 0;    // absolute
  std::int64_t span = 0;      // from the first step to the last, in bytes
  std::int64_t distance = 0;  // smallest distance of two steps, in bytes
  Loop loop{};
};

/// The axes whose steps do not simply stand beside each other; empty when all do. `extent` is set to the bytes these span.
std::vector<Axis> tangled_axes(const StridedCopy& copy, const StepRange& table, std::int64_t& extent) {
  std::vector<Axis> axes;
  const LoopNest nest(copy);
  for (std::size_t j = 0; j < copy.dim_count; ++j) {
    if (copy.dims[j].count == 1) continue;
    const StepRange steps = steps_of(copy, j, false, table);
    const std::int64_t stride = std::abs(copy.dims[j].dst_stride);
    axes.push_back({stride, stride * (steps.hi - steps.lo), stride * steps.gap_min, nest.loops[j]});
  }
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  extent = copy.run_bytes;
  for (const Axis& axis : axes) extent += axis.span;
  while (!axes.empty() && axes.back().distance >= extent - axes.back().span) {
    extent -= axes.back().span;
    axes.pop_back();
  }
  return axes;
}

Status check_no_overlap(const StridedCopy& copy, const StepRange& table) {
  std::int64_t extent = 0;
  const std::vector<Axis> axes = tangled_axes(copy, table, extent);
  if (axes.empty()) return ok_status();
  LoopNest core(0, 0, copy.run_bytes);
  core.slots = copy.slots ? copy.slots->data() : nullptr;
  core.indexed_source = copy.indexed_source;
  std::int64_t unit = copy.run_bytes;
  Wide written = copy.run_bytes;
  for (const Axis& axis : axes) {
    core.push(axis.loop);
    unit = std::gcd(unit, axis.stride);
    written *= axis.loop.count;
  }
  if (written > extent) {
    return refuse(copy, fmt::format("{} bytes are written into a span of {}", static_cast<std::int64_t>(written), extent));
  }
  if (extent / unit > kOverlapUnitsMax) {
    return refuse(copy, fmt::format("dimensions interleave over {} bytes, too far to prove that none is written twice", extent));
  }
  std::int64_t lowest = INT64_MAX;
  for_each_step(core, core.size, [&](std::int64_t, std::int64_t dst) { lowest = std::min(lowest, dst); });
  ByteSet seen((extent + unit - 1) / unit);
  std::optional<std::int64_t> twice;
  for_each_step(core, core.size, [&](std::int64_t, std::int64_t dst) {
    if (!twice) twice = seen.insert((dst - lowest) / unit, copy.run_bytes / unit);
  });
  if (!twice) return ok_status();
  return refuse(copy, fmt::format("destination byte {} is written twice", copy.dst_offset + lowest + *twice * unit));
}

}  // namespace

Status validate(const StridedCopy& copy, std::int64_t src_bytes, std::int64_t dst_bytes) {
  HEADRACE_RETURN_IF_ERROR(check_counts(copy));
  StepRange table;
  if (copy.indexed_dim >= 0) HEADRACE_RETURN_IF_ERROR(check_table(copy, table));
  HEADRACE_RETURN_IF_ERROR(check_bounds(copy, true, src_bytes, table));
  HEADRACE_RETURN_IF_ERROR(check_bounds(copy, false, dst_bytes, table));
  return check_no_overlap(copy, table);
}

Status prove_layout(std::span<const LayoutPart> parts, std::int64_t slot_bytes, std::int64_t slots, std::int64_t slot_stride,
                    std::int64_t storage_bytes) {
  if (slot_bytes <= 0 || slots <= 0 || storage_bytes <= 0) {
    return {Code::kInvalidArgument,
            fmt::format("layout: {} slots of {} bytes in a storage of {}, all must be positive", slots, slot_bytes, storage_bytes)};
  }
  if (slots > 1 && slot_stride != slot_bytes) {
    return {Code::kInvalidArgument, fmt::format("layout: slots of {} bytes stand {} bytes apart", slot_bytes, slot_stride)};
  }
  if (Wide{slots} * slot_bytes != storage_bytes) {
    return {Code::kInvalidArgument, fmt::format("layout: {} slots of {} bytes fill {} bytes, the storage has {}", slots, slot_bytes,
                                                static_cast<std::int64_t>(Wide{slots} * slot_bytes), storage_bytes)};
  }
  ByteSet seen(slot_bytes);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const StridedCopy& copy = parts[p].copy;
    const auto named = [&](const std::string& why) {
      return Status(Code::kInvalidArgument,
                    fmt::format("layout: part {}{} [{}]: {}", p, parts[p].constant ? " (constant)" : "", copy.to_string(), why));
    };
    HEADRACE_RETURN_IF_ERROR(check_counts(copy));
    StepRange table;
    if (copy.indexed_dim >= 0) HEADRACE_RETURN_IF_ERROR(check_table(copy, table));
    HEADRACE_RETURN_IF_ERROR(check_bounds(copy, false, slot_bytes, table));
    if (parts[p].constant && copy.src_bytes() != copy.run_bytes) return named("a constant source has source strides of 0");
    std::optional<std::int64_t> twice;
    for_each_step(LoopNest(copy), copy.dim_count, [&](std::int64_t, std::int64_t dst) {
      if (!twice) twice = seen.insert(dst, copy.run_bytes);
    });
    if (twice) return named(fmt::format("byte {} of the slot is written twice", *twice));
  }
  if (const auto missing = seen.first_missing(slot_bytes)) {
    return {Code::kInvalidArgument, fmt::format("layout: byte {} of the slot's {} is never written", *missing, slot_bytes)};
  }
  return ok_status();
}

}  // namespace headrace
