#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/fingerprint_sum.h"
#include "core/base/shape.h"
#include "core/base/worker_pool.h"
#include "kernels/executor.h"
#include "kernels/fingerprint.h"
#include "kernels/strided_copy.h"

namespace headrace {

/// A box of a tensor and where its elements lie in this process.
struct CellSource {
  TensorKey key;
  std::int64_t elem_bytes = 1;
  std::span<const std::int64_t> shape;    // of the whole tensor
  const Box* box = nullptr;               // of that tensor
  const std::byte* data = nullptr;        // element box.lo
  std::span<const std::int64_t> strides;  // bytes, one per dimension, not negative; 0 repeats an element
};

/// The same walk over a cell seen twice: from memory into a packed buffer, and from memory to the tensor's own row-major bytes.
/// Both have equal counts, runs and source sides, so runs end where either side ends.
struct PackNests {
  StridedCopy copy;
  StridedCopy tensor_offsets;
};
PackNests make_pack_nests(const CellSource& source);

/// Whether the innermost elements lie next to each other and nothing is repeated: what receivers can read in place.
bool readable_in_place(const CellSource& source);

/// Packs cells row-major, summing their fingerprints in the same pass. One thread at a time.
class Packer {
 public:
  Packer(std::uint32_t threads, bool fingerprints);
  /// Writes the cell's bytes to `packed`; returns their fingerprint (zero with fingerprints off).
  FingerprintSum pack(const CellSource& source, std::byte* packed);
  /// The fingerprint of a cell that stays where it is. Precondition: readable_in_place().
  FingerprintSum sum(const CellSource& source);

 private:
  WorkerPool pool_;
  HostExecutor executor_;
  bool fingerprints_;
};

}  // namespace headrace
