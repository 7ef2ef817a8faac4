#include "kernels/host_kernels.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <type_traits>

// Highway compiles the part between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host_kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace headrace {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// A run shorter than this is mostly head and tail, which a streaming store cannot take.
constexpr std::int64_t kStreamedRunMin = 512;

std::uint8_t* raw(std::byte* p) {
  return reinterpret_cast<std::uint8_t*>(p);
}
const std::uint8_t* raw(const std::byte* p) {
  return reinterpret_cast<const std::uint8_t*>(p);
}

/// Bytes from p to the next multiple of 64.
std::int64_t to_line(const void* p) {
  return static_cast<std::int64_t>((64 - (reinterpret_cast<std::uintptr_t>(p) & 63)) & 63);
}

void stream_run(const std::byte* src, std::byte* dst, std::int64_t run) {
  const hn::ScalableTag<std::uint8_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t head = to_line(dst);
  std::memcpy(dst, src, static_cast<std::size_t>(head));
  std::int64_t at = head;
  for (; at + 4 * lanes <= run; at += 4 * lanes) {
    const auto a = hn::LoadU(d, raw(src + at));
    const auto b = hn::LoadU(d, raw(src + at + lanes));
    const auto c = hn::LoadU(d, raw(src + at + 2 * lanes));
    const auto e = hn::LoadU(d, raw(src + at + 3 * lanes));
    hn::Stream(a, d, raw(dst + at));
    hn::Stream(b, d, raw(dst + at + lanes));
    hn::Stream(c, d, raw(dst + at + 2 * lanes));
    hn::Stream(e, d, raw(dst + at + 3 * lanes));
  }
  std::memcpy(dst + at, src + at, static_cast<std::size_t>(run - at));
}

template <std::size_t kRun>
void copy_short_rows(const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride) {
  for (std::int64_t i = 0; i < rows; ++i) std::memcpy(dst + i * dst_stride, src + i * src_stride, kRun);
}

void CopyRows(const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride, std::int64_t run,
              Stores stores) {
  switch (run) {
    case 1: return copy_short_rows<1>(src, dst, rows, src_stride, dst_stride);
    case 2: return copy_short_rows<2>(src, dst, rows, src_stride, dst_stride);
    case 4: return copy_short_rows<4>(src, dst, rows, src_stride, dst_stride);
    case 8: return copy_short_rows<8>(src, dst, rows, src_stride, dst_stride);
    case 16: return copy_short_rows<16>(src, dst, rows, src_stride, dst_stride);
    case 32: return copy_short_rows<32>(src, dst, rows, src_stride, dst_stride);
    case 64: return copy_short_rows<64>(src, dst, rows, src_stride, dst_stride);
    default: break;
  }
  const bool stream = stores == Stores::kStream && run >= kStreamedRunMin;
  for (std::int64_t i = 0; i < rows; ++i) {
    if (stream) {
      stream_run(src + i * src_stride, dst + i * dst_stride, run);
    } else {
      std::memcpy(dst + i * dst_stride, src + i * src_stride, static_cast<std::size_t>(run));
    }
  }
}

void transpose_scalar(const std::byte* src, std::byte* dst, const WordTile& tile) {
  for (std::int64_t c = 0; c < tile.columns; ++c) {
    std::byte* to = dst + tile.column_offsets[c];
    for (std::int64_t r = 0; r < tile.rows; ++r) std::memcpy(to + 4 * r, src + tile.row_offsets[r] + 4 * c, 4);
  }
}

#if HWY_TARGET != HWY_SCALAR

#if HWY_HAVE_SCALABLE
constexpr std::int64_t kWideLanes = 4;
#else
constexpr std::int64_t kWideLanes = static_cast<std::int64_t>(hn::MaxLanes(hn::CappedTag<std::uint32_t, 16>()));
#endif

/// Four words of rows r, r + 4, r + 8, ..., one row to each block of 16 bytes.
template <std::size_t kLanes>
hn::VFromD<hn::FixedTag<std::uint32_t, kLanes>> load_rows(const std::byte* src, const std::int64_t* rows) {
  const hn::FixedTag<std::uint32_t, kLanes> d;
  if constexpr (kLanes == 4) {
    return hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(src + rows[0]));
  } else {
    return hn::Combine(d, load_rows<kLanes / 2>(src, rows + kLanes / 2), load_rows<kLanes / 2>(src, rows));
  }
}

/// kLanes rows by 4 columns, of which the first `done` are not written. Each block of 16 bytes is transposed by itself, which leaves kLanes
/// rows of one column side by side.
template <std::size_t kLanes>
void transpose_block(const std::byte* src, const std::int64_t* rows, std::byte* dst, const std::int64_t* columns, std::int64_t done,
                     bool stream) {
  const hn::FixedTag<std::uint32_t, kLanes> d;
  const hn::Repartition<std::uint64_t, decltype(d)> d64;
  const auto r0 = load_rows<kLanes>(src, rows);
  const auto r1 = load_rows<kLanes>(src, rows + 1);
  const auto r2 = load_rows<kLanes>(src, rows + 2);
  const auto r3 = load_rows<kLanes>(src, rows + 3);
  const auto lo01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto lo23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto hi01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto hi23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  const auto put = [&](auto column, std::byte* to) HWY_ATTR {
    if (stream) {
      hn::Stream(hn::BitCast(d, column), d, reinterpret_cast<std::uint32_t*>(to));
    } else {
      hn::StoreU(hn::BitCast(d, column), d, reinterpret_cast<std::uint32_t*>(to));
    }
  };
  if (done < 1) put(hn::InterleaveLower(d64, lo01, lo23), dst + columns[0]);
  if (done < 2) put(hn::InterleaveUpper(d64, lo01, lo23), dst + columns[1]);
  if (done < 3) put(hn::InterleaveLower(d64, hi01, hi23), dst + columns[2]);
  put(hn::InterleaveUpper(d64, hi01, hi23), dst + columns[3]);
}

/// A last block that would reach over the edge is moved back over its neighbour. Columns are not written twice, since stores that go around
/// the caches cost as much the second time; rows are: only what is not streamed has some that fill no vector.
template <std::size_t kLanes>
void transpose_blocks(const std::byte* src, std::byte* dst, const WordTile& tile, bool stream) {
  constexpr auto kStep = static_cast<std::int64_t>(kLanes);
  for (std::int64_t c = 0; c < tile.columns; c += 4) {
    const std::int64_t column = std::min(c, tile.columns - 4);
    for (std::int64_t r = 0; r < tile.rows; r += kStep) {
      const std::int64_t row = std::min(r, tile.rows - kStep);
      transpose_block<kLanes>(src + 4 * column, tile.row_offsets + row, dst + 4 * row, tile.column_offsets + column, c - column, stream);
    }
  }
}

/// The blocks of a vector go to consecutive columns 0, 4, 8, ... of `columns`.
template <std::size_t kLanes>
void store_columns(hn::VFromD<hn::FixedTag<std::uint32_t, kLanes>> blocks, std::byte* dst, const std::int64_t* columns) {
  const hn::FixedTag<std::uint32_t, kLanes> d;
  if constexpr (kLanes == 4) {
    hn::StoreU(blocks, d, reinterpret_cast<std::uint32_t*>(dst + columns[0]));
  } else {
    const hn::Half<decltype(d)> half;
    store_columns<kLanes / 2>(hn::LowerHalf(half, blocks), dst, columns);
    store_columns<kLanes / 2>(hn::UpperHalf(half, blocks), dst, columns + kLanes / 2);
  }
}

/// 4 rows by kLanes columns: the mirror image, for sources whose rows stand so far apart that each line should be read only once.
template <std::size_t kLanes>
void transpose_strip(const std::byte* src, const std::int64_t* rows, std::byte* dst, const std::int64_t* columns) {
  const hn::FixedTag<std::uint32_t, kLanes> d;
  const hn::Repartition<std::uint64_t, decltype(d)> d64;
  const auto load = [&](std::int64_t row) HWY_ATTR { return hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(src + row)); };
  const auto r0 = load(rows[0]);
  const auto r1 = load(rows[1]);
  const auto r2 = load(rows[2]);
  const auto r3 = load(rows[3]);
  const auto lo01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto lo23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto hi01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto hi23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  store_columns<kLanes>(hn::BitCast(d, hn::InterleaveLower(d64, lo01, lo23)), dst, columns);
  store_columns<kLanes>(hn::BitCast(d, hn::InterleaveUpper(d64, lo01, lo23)), dst, columns + 1);
  store_columns<kLanes>(hn::BitCast(d, hn::InterleaveLower(d64, hi01, hi23)), dst, columns + 2);
  store_columns<kLanes>(hn::BitCast(d, hn::InterleaveUpper(d64, hi01, hi23)), dst, columns + 3);
}

template <std::size_t kLanes>
void transpose_strips(const std::byte* src, std::byte* dst, const WordTile& tile) {
  constexpr auto kStep = static_cast<std::int64_t>(kLanes);
  for (std::int64_t r = 0; r < tile.rows; r += 4) {
    const std::int64_t row = std::min(r, tile.rows - 4);
    for (std::int64_t c = 0; c < tile.columns; c += kStep) {
      const std::int64_t column = std::min(c, tile.columns - kStep);
      transpose_strip<kLanes>(src + 4 * column, tile.row_offsets + row, dst + 4 * row, tile.column_offsets + column);
    }
  }
}

/// Calls make with the widest vector that `words` fill.
template <class Make>
void with_lanes(std::int64_t words, const Make& make) {
  if constexpr (kWideLanes >= 16) {
    if (words >= 16) return make(std::integral_constant<std::size_t, 16>());
  }
  if constexpr (kWideLanes >= 8) {
    if (words >= 8) return make(std::integral_constant<std::size_t, 8>());
  }
  make(std::integral_constant<std::size_t, 4>());
}

void TransposeWords(const std::byte* src, std::byte* dst, const WordTile& tile, Stores stores) {
  const bool stream = stores == Stores::kStream && tile.aligned;
  if (tile.columns < 4 || tile.rows < 4) return transpose_scalar(src, dst, tile);
  // The side whose lines stand further apart is touched in whole lines; the other one stays in the cache.
  const std::int64_t row_step = std::abs(tile.row_offsets[1] - tile.row_offsets[0]);
  const std::int64_t column_step = std::abs(tile.column_offsets[1] - tile.column_offsets[0]);
  if (row_step > column_step && !stream) {
    with_lanes(tile.columns, [&](auto lanes) HWY_ATTR { transpose_strips<lanes>(src, dst, tile); });
  } else {
    with_lanes(tile.rows, [&](auto lanes) HWY_ATTR { transpose_blocks<lanes>(src, dst, tile, stream); });
  }
}

#else

void TransposeWords(const std::byte* src, std::byte* dst, const WordTile& tile, Stores) {
  transpose_scalar(src, dst, tile);
}

#endif

void FillBytes(std::byte* dst, std::int64_t bytes, std::uint32_t pattern, Stores stores) {
  std::int64_t at = 0;
  const auto byte_at = [&](std::int64_t i) {
    return static_cast<std::byte>(pattern >> (8 * (reinterpret_cast<std::uintptr_t>(dst + i) & 3)));
  };
  const std::int64_t head = std::min(bytes, to_line(dst));
  for (; at < head; ++at) dst[at] = byte_at(at);
  const hn::ScalableTag<std::uint32_t> d;
  const auto step = static_cast<std::int64_t>(4 * hn::Lanes(d));
  const auto value = hn::Set(d, pattern);
  for (; at + step <= bytes; at += step) {
    auto* to = reinterpret_cast<std::uint32_t*>(dst + at);
    if (stores == Stores::kStream) {
      hn::Stream(value, d, to);
    } else {
      hn::StoreU(value, d, to);
    }
  }
  for (; at < bytes; ++at) dst[at] = byte_at(at);
}

struct Lanes {
  std::uint64_t sum0 = 0;
  std::uint64_t sum1 = 0;
};

#if HWY_TARGET != HWY_SCALAR
/// SumOfLanes adds signed numbers on some targets, which may not wrap.
template <class D>
std::uint64_t wrapped_sum(D d, hn::VFromD<D> lanes) {
  alignas(64) std::array<std::uint64_t, hn::MaxLanes(D())> parts;
  hn::StoreU(lanes, d, parts.data());
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) sum += parts[i];
  return sum;
}
#endif

void sum_word(const std::byte* src, std::byte* to, const std::uint32_t* table, Lanes& sums) {
  std::uint32_t word = 0;
  std::memcpy(&word, src, 4);
  if (to != nullptr) std::memcpy(to, &word, 4);
  sums.sum0 += std::uint64_t{word} * table[0];
  sums.sum1 += std::uint64_t{word} * table[kFingerprintLaneShift];
}

enum class Moves : std::uint8_t { kNone, kCached, kStream };

/// Adds word * K of the words at `src`; `table` points at the first word's constant. With kStream `to` is a multiple of 4.
template <Moves kMoves>
void sum_words(const std::byte* src, std::byte* to, const std::uint32_t* table, std::size_t words, Lanes& sums) {
  const auto word_to = [to](std::size_t at) { return kMoves == Moves::kNone ? nullptr : to + 4 * at; };
  std::size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<std::uint32_t> d;
  const hn::RepartitionToWide<decltype(d)> d64;
  const std::size_t lanes = hn::Lanes(d);
  auto even0 = hn::Zero(d64);
  auto even1 = hn::Zero(d64);
  auto odd0 = hn::Zero(d64);
  auto odd1 = hn::Zero(d64);
  const auto upper = [&](auto v) HWY_ATTR { return hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(d64, v))); };
  if constexpr (kMoves == Moves::kStream) {
    const std::size_t head = std::min(words, static_cast<std::size_t>(to_line(to)) / 4);
    for (; i < head; ++i) sum_word(src + 4 * i, to + 4 * i, table + i, sums);
  }
  for (; i + lanes <= words; i += lanes) {
    const auto word = hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(src + 4 * i));
    const auto k0 = hn::LoadU(d, table + i);
    const auto k1 = hn::LoadU(d, table + i + kFingerprintLaneShift);
    if constexpr (kMoves == Moves::kCached) hn::StoreU(word, d, reinterpret_cast<std::uint32_t*>(to + 4 * i));
    if constexpr (kMoves == Moves::kStream) hn::Stream(word, d, reinterpret_cast<std::uint32_t*>(to + 4 * i));
    const auto word_odd = upper(word);
    even0 = hn::Add(even0, hn::MulEven(word, k0));
    even1 = hn::Add(even1, hn::MulEven(word, k1));
    odd0 = hn::Add(odd0, hn::MulEven(word_odd, upper(k0)));
    odd1 = hn::Add(odd1, hn::MulEven(word_odd, upper(k1)));
  }
  sums.sum0 += wrapped_sum(d64, hn::Add(even0, odd0));
  sums.sum1 += wrapped_sum(d64, hn::Add(even1, odd1));
#endif
  for (; i < words; ++i) sum_word(src + 4 * i, word_to(i), table + i, sums);
}

/// Up to 3 bytes that do not fill a word. They never cross a block.
void sum_part(const std::byte* src, std::size_t at, std::size_t bytes, Lanes& sums) {
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < bytes; ++i) word |= std::uint32_t{static_cast<std::uint8_t>(src[i])} << (8 * ((at + i) % 4));
  const std::uint32_t* table = kFingerprintTable.data() + at / 4;
  sums.sum0 += std::uint64_t{word} * table[0];
  sums.sum1 += std::uint64_t{word} * table[kFingerprintLaneShift];
}

/// Bytes of one block, from byte `at` of it.
Lanes sum_in_block(const std::byte* src, std::byte* to, std::size_t at, std::size_t bytes, Stores stores) {
  Lanes sums;
  const std::size_t head = std::min(bytes, (4 - at % 4) % 4);
  const std::size_t words = (bytes - head) / 4;
  const std::size_t tail = bytes - head - 4 * words;
  if (head > 0) sum_part(src, at, head, sums);
  const std::uint32_t* table = kFingerprintTable.data() + (at + head) / 4;
  if (to == nullptr) {
    sum_words<Moves::kNone>(src + head, nullptr, table, words, sums);
  } else {
    std::memcpy(to, src, head);
    if (stores == Stores::kStream && reinterpret_cast<std::uintptr_t>(to + head) % 4 == 0) {
      sum_words<Moves::kStream>(src + head, to + head, table, words, sums);
    } else {
      sum_words<Moves::kCached>(src + head, to + head, table, words, sums);
    }
    std::memcpy(to + head + 4 * words, src + head + 4 * words, tail);
  }
  if (tail > 0) sum_part(src + head + 4 * words, at + head + 4 * words, tail, sums);
  return sums;
}

FingerprintSum SumBytes(BlockFactors& factors, std::uint64_t offset, const std::byte* src, std::size_t bytes, std::byte* copy_to,
                        Stores stores) {
  FingerprintSum total;
  while (bytes > 0) {
    const std::size_t at = offset % kFingerprintBlockBytes;
    const std::size_t here = std::min<std::size_t>(bytes, kFingerprintBlockBytes - at);
    const Lanes sums = sum_in_block(src, copy_to, at, here, stores);
    const auto& kappa = factors.of(offset / kFingerprintBlockBytes);
    total.lanes[0] += sums.sum0 * kappa[0];
    total.lanes[1] += sums.sum1 * kappa[1];
    src += here;
    if (copy_to != nullptr) copy_to += here;
    offset += here;
    bytes -= here;
  }
  return total;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace headrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headrace {

HWY_EXPORT(CopyRows);
HWY_EXPORT(TransposeWords);
HWY_EXPORT(FillBytes);
HWY_EXPORT(SumBytes);

void copy_rows(const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride, std::int64_t run,
               Stores stores) noexcept {
  HWY_DYNAMIC_DISPATCH(CopyRows)(src, dst, rows, src_stride, dst_stride, run, stores);
}

void transpose_words(const std::byte* src, std::byte* dst, const WordTile& tile, Stores stores) noexcept {
  HWY_DYNAMIC_DISPATCH(TransposeWords)(src, dst, tile, stores);
}

void fill_bytes(std::byte* dst, std::int64_t bytes, std::uint32_t pattern, Stores stores) noexcept {
  HWY_DYNAMIC_DISPATCH(FillBytes)(dst, bytes, pattern, stores);
}

void stream_fence() noexcept {
  hwy::FlushStream();
}

FingerprintSum sum_bytes(BlockFactors& factors, std::uint64_t offset, const std::byte* src, std::size_t bytes, std::byte* copy_to,
                         Stores stores) noexcept {
  return HWY_DYNAMIC_DISPATCH(SumBytes)(factors, offset, src, bytes, copy_to, stores);
}

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (std::int64_t bits = hwy::SupportedTargets() & HWY_TARGETS; bits != 0; bits &= bits - 1)
    names.emplace_back(hwy::TargetName(bits & -bits));
  return names;
}

void force_simd_target(const std::string& name) {
  hwy::SetSupportedTargetsForTest(0);
  for (std::int64_t bits = hwy::SupportedTargets() & HWY_TARGETS; bits != 0; bits &= bits - 1) {
    if (name == hwy::TargetName(bits & -bits)) hwy::SetSupportedTargetsForTest(bits & -bits);
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace headrace
#endif
