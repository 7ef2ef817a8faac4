#include "kernels/copy_plan.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace headrace {
namespace {

// From here on a run is worth a call of its own, and rows follow each other.
constexpr std::int64_t kLongRunMin = 128;
// Words of a column side by side: a cache line.
constexpr std::int64_t kTileWordsWanted = 16;
// Words of a tile, and bytes of a window: what is read ahead has to stay in the first-level cache until it is moved.
constexpr std::int64_t kTileWords = 4096;
constexpr std::int64_t kWindowBytes = 4 * kTileWords;
// Steps along each side of a block of short runs.
constexpr std::int64_t kBlockSteps = 32;
// Flat work is cut at pages.
constexpr std::int64_t kFlatPart = 4096;

/// Follows the loops that stand side by side on one side of a nest, from 4-byte words on, until `wanted` steps are covered; takes them out
/// of the nest and lists what each step is worth on the other side. A loop that would take more than `limit` steps is cut. What was taken
/// also goes to `window`. Returns how many offsets were listed.
std::int64_t take_chain(LoopNest& nest, std::int64_t Loop::* along, std::int64_t Loop::* across, std::int64_t wanted, std::int64_t limit,
                        std::int64_t* offsets, LoopNest& window) noexcept {
  std::int64_t steps = 1;
  offsets[0] = 0;
  bool cut = false;
  while (steps < wanted && !cut) {
    std::size_t j = 0;
    while (j < nest.size && (nest.loops[j].*along != 4 * steps || nest.loops[j].indexed)) ++j;
    if (j == nest.size) break;
    Loop& loop = nest.loops[j];
    const std::int64_t take = largest_divisor(loop.count, limit / steps);
    if (take == 1) break;
    for (std::int64_t k = 1; k < take; ++k) {
      for (std::int64_t i = 0; i < steps; ++i) offsets[k * steps + i] = offsets[i] + k * (loop.*across);
    }
    steps *= take;
    if (loop.src != 0) window.push({take, loop.src, loop.src, false});
    cut = take != loop.count;
    if (cut) {
      loop = {loop.count / take, loop.src * take, loop.dst * take, false};
    } else {
      nest.erase(j);
    }
  }
  return steps;
}

/// Reads one byte of each cache line. Loads, since the processor takes no hint that asks for so many lines.
void read_lines(const std::byte* from, std::int64_t bytes) noexcept {
  for (std::int64_t at = 0; at < bytes; at += 64) static_cast<void>(*static_cast<const volatile std::byte*>(from + at));
  static_cast<void>(*static_cast<const volatile std::byte*>(from + bytes - 1));
}

}  // namespace

CopyPlan::CopyPlan(const StridedCopy& copy, bool constant, ElementCast cast) noexcept
    : nest_(copy), constant_(constant), cast_(cast) {  // NOLINT: offsets are set when used
  order();
}

CopyPlan::CopyPlan(const LoopNest& nest, bool constant) noexcept : nest_(nest), constant_(constant) {  // NOLINT: offsets are set when used
  order();
}

void CopyPlan::order() noexcept {
  if (constant_) {
    for (Loop& loop : nest_.all()) loop.src = 0;
    nest_.indexed_source = false;
  }
  if (!cast_.none()) {
    merge_cast();
  } else if (nest_.size > 0) {
    nest_.merge(constant_);
  }
  path_ = CopyPath::kFlat;
  if (constant_) path_ = CopyPath::kConstant;
  if (!cast_.none()) path_ = CopyPath::kCast;
  if (nest_.size == 0) return;
  nest_.sort_by_destination();
  if (constant_ || !cast_.none()) return;
  path_ = nest_.run >= kLongRunMin ? CopyPath::kPitched : CopyPath::kGeneric;
  if (nest_.run == 4) choose_words();
  if (path_ == CopyPath::kGeneric) block_short_runs();
}

/// Merges as if both sides had elements of the destination's width. A source that is not stepped in whole elements keeps its loops.
void CopyPlan::merge_cast() noexcept {
  const std::int64_t from = cast_.from_bytes();
  const std::int64_t to = cast_.to_bytes();
  const auto loops = nest_.all();
  if (std::any_of(loops.begin(), loops.end(), [&](const Loop& loop) { return loop.src % from != 0; })) return;
  const std::int64_t begin = std::exchange(nest_.src_offset, 0);
  for (Loop& loop : loops) loop.src = loop.src / from * to;
  nest_.merge();
  for (Loop& loop : nest_.all()) loop.src = loop.src / to * from;
  nest_.src_offset = begin + nest_.src_offset / to * from;
}

void CopyPlan::choose_words() noexcept {
  LoopNest rest(nest_);
  LoopNest window(0, 0, 4);
  const std::int64_t rows = take_chain(rest, &Loop::dst, &Loop::src, kTileWordsWanted, kTileRowsMax, row_offsets_.data(), window);
  const std::int64_t columns = take_chain(rest, &Loop::src, &Loop::dst, kTileWordsWanted, std::min(kTileColumnsMax, kTileWords / rows),
                                          column_offsets_.data(), window);
  if (rows < 4 || columns < 4) return;
  path_ = CopyPath::kTranspose32;
  tile_rows_ = rows;
  tile_columns_ = columns;
  tile_aligned_ = rows % kTileWordsWanted == 0 && rest.dst_offset % 64 == 0 &&
                  std::all_of(column_offsets_.begin(), column_offsets_.begin() + columns, [](std::int64_t o) { return o % 64 == 0; });
  nest_.size = rest.size;
  std::copy_n(rest.loops.begin(), rest.size, nest_.loops.begin());
  nest_.sort_by_destination();
  tile_aligned_ = tile_aligned_ && std::all_of(nest_.loops.begin(), nest_.loops.begin() + static_cast<std::ptrdiff_t>(nest_.size),
                                               [](const Loop& loop) { return loop.dst % 64 == 0; });
  open_window(window, 4 * rows * columns);
}

/// Scattered streaming stores and loads that miss hinder each other: from cold memory, tiles of which each loads its own rows move 5.8
/// GB/s, the same tiles after their rows were read in the order of memory 9 to 11. So tiles that together read a stretch of memory share
/// one reading.
void CopyPlan::open_window(LoopNest& tile, std::int64_t bytes) noexcept {
  for (std::size_t j = nest_.size; j-- > 0;) {
    const Loop& loop = nest_.loops[j];
    if (loop.indexed || loop.count * bytes > kWindowBytes) break;
    bytes *= loop.count;
    if (loop.src != 0) tile.push({loop.count, loop.src, loop.src, false});
    ++window_loops_;
  }
  tile.merge();
  tile.sort_by_destination();
  window_.run = tile.run;
  for (const Loop& loop : tile.all()) window_.push(loop);
}

/// Where the source's smallest step is not the destination's, both are walked in blocks, so that each line is fetched once.
void CopyPlan::block_short_runs() noexcept {
  const std::size_t last = nest_.size - 1;
  std::size_t near = last;
  for (std::size_t j = 0; j < nest_.size; ++j) {
    const Loop& loop = nest_.loops[j];
    if (loop.src != 0 && !loop.indexed && std::abs(loop.src) < std::abs(nest_.loops[near].src)) near = j;
  }
  if (near == last || nest_.loops[last].indexed || nest_.size + 2 > kLoopsMax) return;
  const auto split = [](Loop& outer) {
    const std::int64_t inner = largest_divisor(outer.count, kBlockSteps);
    const Loop part{inner, outer.src, outer.dst, false};
    outer = {outer.count / inner, outer.src * inner, outer.dst * inner, false};
    return part;
  };
  const Loop near_part = split(nest_.loops[near]);
  const Loop last_part = split(nest_.loops[last]);
  nest_.push(near_part);
  nest_.push(last_part);
}

std::int64_t CopyPlan::parts(std::int64_t pieces) const noexcept {
  if (nest_.size == 0) return std::clamp<std::int64_t>(nest_.run / kFlatPart, 1, pieces);
  std::int64_t product = 1;
  for (std::size_t j = 0; j + window_loops_ < nest_.size && product < pieces; ++j) product *= nest_.loops[j].count;
  return product;
}

void CopyPlan::run_flat(const std::byte* src, std::byte* dst, std::uint32_t pattern, std::int64_t begin, std::int64_t end,
                        std::int64_t parts, Stores stores) const noexcept {
  const auto edge = [&](std::int64_t part) {
    return part == parts ? nest_.run : static_cast<std::int64_t>(static_cast<__int128>(nest_.run) * part / parts) / 64 * 64;
  };
  const std::int64_t from = edge(begin);
  const std::int64_t bytes = edge(end) - from;
  if (bytes <= 0) return;
  if (constant_) {
    fill_bytes(dst + nest_.dst_offset + from, bytes, pattern, stores);
  } else if (!cast_.none()) {
    cast_rows(cast_, src + nest_.src_offset + cast_.source_bytes(from), dst + nest_.dst_offset + from, 1, 0, 0, bytes / cast_.to_bytes());
  } else {
    copy_rows(src + nest_.src_offset + from, dst + nest_.dst_offset + from, 1, 0, 0, bytes, stores);
  }
}

void CopyPlan::run_inner(const LoopNest& nest, const std::byte* src, std::byte* dst, std::uint32_t pattern, Stores stores) const noexcept {
  if (constant_) {
    for_each_step(nest, nest.size, [&](std::int64_t, std::int64_t d) { fill_bytes(dst + d, nest.run, pattern, stores); });
    return;
  }
  if (path_ == CopyPath::kTranspose32) {
    run_tiles(nest, src, dst, stores);
    return;
  }
  const bool single = nest.size == 0 || nest.loops[nest.size - 1].indexed;
  const Loop rows = single ? Loop{1, 0, 0, false} : nest.loops[nest.size - 1];
  const std::size_t depth = single ? nest.size : nest.size - 1;
  if (path_ == CopyPath::kCast) {
    const std::int64_t elements = nest.run / cast_.to_bytes();
    for_each_step(nest, depth,
                  [&](std::int64_t s, std::int64_t d) { cast_rows(cast_, src + s, dst + d, rows.count, rows.src, rows.dst, elements); });
    return;
  }
  for_each_step(nest, depth,
                [&](std::int64_t s, std::int64_t d) { copy_rows(src + s, dst + d, rows.count, rows.src, rows.dst, nest.run, stores); });
}

void CopyPlan::run_tiles(const LoopNest& nest, const std::byte* src, std::byte* dst, Stores stores) const noexcept {
  const bool aligned = tile_aligned_ && reinterpret_cast<std::uintptr_t>(dst) % 64 == 0;
  const WordTile tile{row_offsets_.data(), column_offsets_.data(), tile_rows_, tile_columns_, aligned};
  // Only stores around the caches suffer from loads that miss among them.
  const std::size_t outer = stores == Stores::kStream ? nest.size - window_loops_ : nest.size;
  LoopNest inner(0, 0, nest.run);
  for (std::size_t j = outer; j < nest.size; ++j) inner.push(nest.loops[j]);
  for_each_step(nest, outer, [&](std::int64_t s, std::int64_t d) {
    if (stores == Stores::kStream) {
      for_each_step(window_, window_.size, [&](std::int64_t from, std::int64_t) { read_lines(src + s + from, window_.run); });
    }
    for_each_step(inner, inner.size,
                  [&](std::int64_t from, std::int64_t to) { transpose_words(src + s + from, dst + d + to, tile, stores); });
  });
}

void CopyPlan::run(const std::byte* src, std::byte* dst, std::uint32_t pattern, std::int64_t begin, std::int64_t end, std::int64_t parts,
                   Stores stores) const noexcept {
  if (nest_.run == 0) return;
  if (nest_.size == 0 && path_ != CopyPath::kTranspose32) return run_flat(src, dst, pattern, begin, end, parts, stores);
  std::size_t depth = 0;  // the loops whose steps are the parts
  for (std::int64_t product = 1; product < parts; ++depth) product *= nest_.loops[depth].count;
  if (depth == 0) return run_inner(nest_, src, dst, pattern, stores);
  const Loop& cut = nest_.loops[depth - 1];
  // One call for each stretch of the innermost part loop.
  for (std::int64_t at = begin; at < end;) {
    LoopNest inner(nest_.src_offset, nest_.dst_offset, nest_.run);
    std::int64_t rest = at;
    for (std::size_t j = depth; j-- > 0;) {
      const Loop& loop = nest_.loops[j];
      inner.src_offset += nest_.src_step(loop, rest % loop.count);
      inner.dst_offset += nest_.dst_step(loop, rest % loop.count);
      rest /= loop.count;
    }
    const std::int64_t steps = cut.indexed ? 1 : std::min(end - at, cut.count - at % cut.count);
    if (steps > 1) inner.push({steps, cut.src, cut.dst, false});
    for (std::size_t j = depth; j < nest_.size; ++j) inner.push(nest_.loops[j]);
    inner.slots = nest_.slots;
    inner.indexed_source = nest_.indexed_source;
    run_inner(inner, src, dst, pattern, stores);
    at += steps;
  }
}

}  // namespace headrace
