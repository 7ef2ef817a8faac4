#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/base/fingerprint_sum.h"
#include "core/base/shape.h"
#include "kernels/element_cast.h"
#include "kernels/strided_copy.h"

namespace headrace {

/// Names a logical checkpoint tensor inside the fingerprint: a hash of canonical name, dtype and shape (docs/protocol.md).
/// With splitmix(x) of fingerprint_table.h and absorb(h, v) = splitmix(h ^ v), from h = 0 it absorbs in this order: the name's length in
/// bytes; the name in words of 8 bytes, little-endian, the last one filled up with zeros; the dtype's wire number; the number of
/// dimensions; each dimension, outermost first.
struct TensorKey {
  std::uint64_t value = 0;
  bool operator==(const TensorKey&) const = default;
};
TensorKey tensor_key(std::string_view name, Dtype dtype, std::span<const std::int64_t> shape) noexcept;

// For byte b at offset o of the tensor's row-major bytes, lane j in {0, 1}:
//   F_j += b * 256^(o mod 4) * K[(o/4) mod 1024 + 16*j] * kappa_j(key, o/4096)   (mod 2^64)
//   kappa_j(key, block) = splitmix(splitmix(splitmix(key) ^ block) ^ j) | 1
// K and splitmix: fingerprint_table.h. Zero bytes add nothing. Any cut at any byte, in any order, on any thread, adds up.
// A change inside one 4-byte word is never missed, one inside a block of 4 KiB with probability 2^-64 at most, one over many blocks with
// about 2^-54. That is meant for faults, not for attackers.

/// The share of `bytes`, which stand at `offset` of the tensor.
FingerprintSum fingerprint(TensorKey key, std::uint64_t offset, std::span<const std::byte> bytes) noexcept;

/// The share of what a nest covers, read from memory: the nest's source side counts packed tensor bytes, its destination side says where in
/// `memory` they stand (a placement, or a view's strides). Precondition: no dimension repeats its source (see repeat() in strided_copy.h).
FingerprintSum fingerprint_nest(TensorKey key, const StridedCopy& tensor_to_memory, const std::byte* memory) noexcept;

/// The two sums of a tensor that is converted: of the bytes as they are read, and of what they become.
struct CastSums {
  FingerprintSum read;
  FingerprintSum converted;
};
/// Reads what a nest covers once: its source side says where in `memory` the bytes stand, its destination side counts bytes of the tensor
/// before the conversion. Runs are whole elements. The conversion is one of its own, made for the sum; where the bytes go does not matter.
CastSums fingerprint_cast(TensorKey read_key, TensorKey converted_key, ElementCast cast, const StridedCopy& memory_to_tensor,
                          const std::byte* memory) noexcept;

/// Packs and sums in one pass: moves `copy` from `src` to `dst`, and sums the moved bytes at the tensor offsets that stand on the
/// destination side of `tensor_offsets`, which has the counts, the runs and the source side of `copy`.
FingerprintSum copy_and_fingerprint(TensorKey key, const StridedCopy& copy, const StridedCopy& tensor_offsets, const std::byte* src,
                                    std::byte* dst) noexcept;

}  // namespace headrace
