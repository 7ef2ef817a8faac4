#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/base/fingerprint_sum.h"
#include "core/base/shape.h"
#include "kernels/strided_copy.h"

namespace headrace {

/// Names a logical checkpoint tensor inside the fingerprint: a hash of canonical name, dtype and shape (docs/protocol.md).
struct TensorKey {
  std::uint64_t value = 0;
  bool operator==(const TensorKey&) const = default;
};
TensorKey tensor_key(std::string_view name, Dtype dtype, std::span<const std::int64_t> shape) noexcept;

// For byte b at offset o of the tensor's row-major bytes, lane j in {0, 1}:
//   F_j += b * 256^(o mod 4) * K[(o/4) mod 1024 + 16*j] * kappa_j(key, o/4096)   (mod 2^64)
// Any cut at any byte, in any order, on any thread, adds up.

/// The share of `bytes`, which stand at `offset` of the tensor.
FingerprintSum fingerprint(TensorKey key, std::uint64_t offset, std::span<const std::byte> bytes) noexcept;

/// The share of what a nest covers, read from memory: the nest's source side counts packed tensor bytes, its destination side says where in
/// `memory` they stand (a placement, or a view's strides). Precondition: no dimension repeats its source (see repeat() in strided_copy.h).
FingerprintSum fingerprint_nest(TensorKey key, const StridedCopy& tensor_to_memory, const std::byte* memory) noexcept;

/// Packs and sums in one pass: moves `copy` from `src` to `dst`, and sums the moved bytes at the tensor offsets that stand on the
/// destination side of `tensor_offsets`, which has the counts, the runs and the source side of `copy`.
FingerprintSum copy_and_fingerprint(TensorKey key, const StridedCopy& copy, const StridedCopy& tensor_offsets, const std::byte* src,
                                    std::byte* dst) noexcept;

}  // namespace headrace
