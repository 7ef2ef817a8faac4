#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/fingerprint_sum.h"
#include "kernels/fingerprint_table.h"

namespace headrace {

// The inner loops that run on the widest vectors of this processor, chosen at run time. Any thread.

/// Whether stores go around the caches. Who asks for kStream calls stream_fence() on the same thread before anybody else may read.
enum class Stores : std::uint8_t { kCached, kStream };

/// `rows` runs of `run` bytes.
void copy_rows(const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride, std::int64_t run,
               Stores stores) noexcept;

/// Words of 4 bytes: dst[column_offsets[c] + 4 * r] = src[row_offsets[r] + 4 * c]. Offsets are bytes.
struct WordTile {
  const std::int64_t* row_offsets = nullptr;
  const std::int64_t* column_offsets = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool aligned = false;  // every column begins at a multiple of 64 bytes and has a multiple of 16 rows: it may be streamed
};
void transpose_words(const std::byte* src, std::byte* dst, const WordTile& tile, Stores stores) noexcept;

/// Byte at address a becomes byte (a mod 4) of `pattern`, little-endian.
void fill_bytes(std::byte* dst, std::int64_t bytes, std::uint32_t pattern, Stores stores) noexcept;

void stream_fence() noexcept;

/// The fingerprint of `bytes` bytes that stand at `offset` of the tensor. With `copy_to`, they are also copied there.
FingerprintSum sum_bytes(BlockFactors& factors, std::uint64_t offset, const std::byte* src, std::size_t bytes, std::byte* copy_to = nullptr,
                         Stores stores = Stores::kCached) noexcept;

/// For tests: the instruction sets that this processor and this build have, and the choice of one of them ("" for the best).
/// Not while another thread is in one of the kernels.
std::vector<std::string> simd_targets();
void force_simd_target(const std::string& name);

}  // namespace headrace
