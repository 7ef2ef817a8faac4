#include "kernels/fingerprint.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "kernels/copy_plan.h"
#include "kernels/fingerprint_table.h"
#include "kernels/host_kernels.h"
#include "kernels/loop_nest.h"

namespace headrace {
namespace {

// Shorter runs are first gathered, in the order of the tensor, into a buffer that stays in the first-level cache.
constexpr std::int64_t kDirectRunMin = 256;
constexpr std::int64_t kGatherBytes = 16 << 10;
// A fused copy is worth its call from here on.
constexpr std::int64_t kFusedRunMin = 64;
// From here on what is packed goes around the caches: nobody reads it before a whole bucket is full, and a store into the cache first reads
// what it overwrites (8 GB/s instead of 13; for tensors of 4 KiB a third less time, the fence of each included).
constexpr std::int64_t kStreamBytesMin = 4 << 10;

std::uint64_t absorb(std::uint64_t hash, std::uint64_t value) noexcept {
  return splitmix(hash ^ value);
}

/// The innermost loops of a nest from memory to the tensor, as many as fit the buffer. Their bytes are gathered by one plan and summed
/// piece by piece. `gather` moves memory -> buffer; `pieces` walks the same bytes, buffer (source) -> tensor (destination).
struct Tile {
  LoopNest gather{0, 0, 0};
  LoopNest pieces{0, 0, 0};

  Tile(const LoopNest& nest, std::size_t outer, std::int64_t strip) noexcept : gather(0, 0, nest.run), pieces(0, 0, nest.run) {
    std::array<std::int64_t, kLoopsMax> packed;
    std::int64_t bytes = nest.run;
    for (std::size_t j = nest.size; j-- > outer;) {
      packed[j] = bytes;
      bytes *= nest.loops[j].count;
    }
    if (strip > 1) {
      const Loop& loop = nest.loops[outer - 1];
      gather.push({strip, loop.src, bytes, false});
      pieces.push({strip, bytes, loop.dst, false});
    }
    for (std::size_t j = outer; j < nest.size; ++j) {
      gather.push({nest.loops[j].count, nest.loops[j].src, packed[j], false});
      pieces.push({nest.loops[j].count, packed[j], nest.loops[j].dst, false});
    }
    pieces.merge();
  }
};

/// Sums nests from memory to tensor. One call each.
class GatherSum {
 public:
  GatherSum(BlockFactors& factors, const std::byte* memory) noexcept
      : factors_(&factors), memory_(memory) {}  // NOLINT: the buffer is scratch

  FingerprintSum run(LoopNest& nest) noexcept {
    nest.sort_by_destination();
    std::size_t outer = nest.size;
    std::int64_t bytes = nest.run;
    while (outer > 0 && !nest.loops[outer - 1].indexed && bytes * nest.loops[outer - 1].count <= kGatherBytes) {
      bytes *= nest.loops[--outer].count;
    }
    const bool can_strip = outer > 0 && !nest.loops[outer - 1].indexed && bytes * 2 <= kGatherBytes;
    const std::int64_t strip = can_strip ? kGatherBytes / bytes : 1;
    if (!can_strip) {
      sum_tiles(nest, outer, Tile(nest, outer, 1));
      return sum_;
    }
    // The loop just outside is walked in strips that fill the buffer, then what is left of it.
    const Loop whole = nest.loops[outer - 1];
    Loop& strips = nest.loops[outer - 1];
    const std::int64_t left = whole.count % strip;
    const Tile full(nest, outer, strip);
    const Tile rest(nest, outer, left);
    strips = {whole.count / strip, whole.src * strip, whole.dst * strip, false};
    sum_tiles(nest, outer, full);
    if (left > 0) {
      nest.src_offset += whole.src * (whole.count - left);
      nest.dst_offset += whole.dst * (whole.count - left);
      strips.count = 1;
      sum_tiles(nest, outer, rest);
    }
    return sum_;
  }

 private:
  void sum_tiles(const LoopNest& nest, std::size_t outer, const Tile& tile) noexcept {
    const CopyPlan plan(tile.gather);
    for_each_step(nest, outer, [&](std::int64_t src, std::int64_t dst) {
      plan.run(memory_ + src, buffer_.data(), 0, Stores::kCached);
      for_each_step(tile.pieces, tile.pieces.size, [&](std::int64_t from, std::int64_t offset) {
        sum_ += sum_bytes(*factors_, static_cast<std::uint64_t>(dst + offset), buffer_.data() + from,
                          static_cast<std::size_t>(tile.pieces.run));
      });
    });
  }

  BlockFactors* factors_;
  const std::byte* memory_;
  FingerprintSum sum_;
  alignas(64) std::array<std::byte, kGatherBytes> buffer_;
};

/// `nest` leads from memory to the tensor.
FingerprintSum sum_nest(BlockFactors& factors, LoopNest& nest, const std::byte* memory) noexcept {
  FingerprintSum sum;
  if (nest.run == 0) return sum;
  nest.merge();
  if (nest.run < kDirectRunMin && nest.size > 0) return GatherSum(factors, memory).run(nest);
  for_each_step(nest, nest.size, [&](std::int64_t src, std::int64_t dst) {
    sum += sum_bytes(factors, static_cast<std::uint64_t>(dst), memory + src, static_cast<std::size_t>(nest.run));
  });
  return sum;
}

/// Copy and sum in one pass, run by run.
FingerprintSum copy_and_sum(BlockFactors& factors, const StridedCopy& copy, const StridedCopy& tensor_offsets, const std::byte* src,
                            std::byte* dst, Stores stores) noexcept {
  FingerprintSum sum;
  // Both nests have the same counts and the same source side, so they step together; the tensor's offset rides along as a difference.
  const LoopNest to_memory(copy);
  LoopNest to_tensor(tensor_offsets);
  std::int64_t tensor = to_tensor.dst_offset;
  std::array<std::int64_t, kLoopsMax> step{};
  for (std::size_t j = 0; j < to_tensor.size; ++j) tensor += to_tensor.dst_step(to_tensor.loops[j], 0);
  for_each_step(to_memory, to_memory.size, [&](std::int64_t from, std::int64_t to) {
    sum += sum_bytes(factors, static_cast<std::uint64_t>(tensor), src + from, static_cast<std::size_t>(copy.run_bytes), dst + to, stores);
    for (std::size_t j = to_tensor.size; j-- > 0;) {
      const Loop& loop = to_tensor.loops[j];
      const std::int64_t next = step[j] + 1 == loop.count ? 0 : step[j] + 1;
      tensor += to_tensor.dst_step(loop, next) - to_tensor.dst_step(loop, step[j]);
      step[j] = next;
      if (next != 0) break;
    }
  });
  return sum;
}

}  // namespace

TensorKey tensor_key(std::string_view name, Dtype dtype, std::span<const std::int64_t> shape) noexcept {
  std::uint64_t hash = absorb(0, name.size());
  for (std::size_t at = 0; at < name.size(); at += 8) {
    std::uint64_t word = 0;
    for (std::size_t i = at; i < std::min(name.size(), at + 8); ++i)
      word |= std::uint64_t{static_cast<std::uint8_t>(name[i])} << (8 * (i - at));
    hash = absorb(hash, word);
  }
  hash = absorb(hash, static_cast<std::uint64_t>(dtype));
  hash = absorb(hash, shape.size());
  for (const std::int64_t dimension : shape) hash = absorb(hash, static_cast<std::uint64_t>(dimension));
  return {hash};
}

FingerprintSum fingerprint(TensorKey key, std::uint64_t offset, std::span<const std::byte> bytes) noexcept {
  BlockFactors factors(key.value);
  return sum_bytes(factors, offset, bytes.data(), bytes.size());
}

FingerprintSum fingerprint_nest(TensorKey key, const StridedCopy& tensor_to_memory, const std::byte* memory) noexcept {
  BlockFactors factors(key.value);
  LoopNest nest(tensor_to_memory);
  nest.swap_sides();
  return sum_nest(factors, nest, memory);
}

CastSums fingerprint_cast(TensorKey read_key, TensorKey converted_key, ElementCast cast, const StridedCopy& memory_to_tensor,
                          const std::byte* memory) noexcept {
  BlockFactors read_factors(read_key.value);
  BlockFactors converted_factors(converted_key.value);
  CastSums sums;
  LoopNest nest(memory_to_tensor);
  nest.merge();
  std::array<std::byte, kGatherBytes> buffer;   // NOLINT: written before it is read
  const std::int64_t piece = kGatherBytes / 4;  // elements
  for_each_step(nest, nest.size, [&](std::int64_t src, std::int64_t dst) {
    const std::int64_t elements = nest.run / cast.from_bytes();
    const std::int64_t first = dst / cast.from_bytes();
    for (std::int64_t done = 0; done < elements; done += piece) {
      const std::int64_t here = std::min(piece, elements - done);
      const std::byte* from = memory + src + done * cast.from_bytes();
      sums.read += sum_bytes(read_factors, static_cast<std::uint64_t>((first + done) * cast.from_bytes()), from,
                             static_cast<std::size_t>(here * cast.from_bytes()));
      cast_rows(cast, from, buffer.data(), 1, 0, 0, here);
      sums.converted += sum_bytes(converted_factors, static_cast<std::uint64_t>((first + done) * cast.to_bytes()), buffer.data(),
                                  static_cast<std::size_t>(here * cast.to_bytes()));
    }
  });
  return sums;
}

FingerprintSum copy_and_fingerprint(TensorKey key, const StridedCopy& copy, const StridedCopy& tensor_offsets, const std::byte* src,
                                    std::byte* dst) noexcept {
  BlockFactors factors(key.value);
  const Stores stores = copy.dst_bytes() >= kStreamBytesMin ? Stores::kStream : Stores::kCached;
  FingerprintSum sum;
  if (copy.run_bytes < kFusedRunMin) {
    CopyPlan(copy, false).run(src, dst, 0, stores);
    LoopNest nest(tensor_offsets);
    sum = sum_nest(factors, nest, src);
  } else {
    sum = copy_and_sum(factors, copy, tensor_offsets, src, dst, stores);
  }
  if (stores == Stores::kStream) stream_fence();
  return sum;
}

}  // namespace headrace
