#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/base/worker_pool.h"
#include "kernels/element_cast.h"
#include "kernels/host_kernels.h"
#include "kernels/strided_copy.h"

namespace headrace {

/// One nest with its two base addresses. A constant source (padding) has `src == nullptr` and repeats `constant` (a pattern of 4 bytes,
/// aligned to the destination address, so run_bytes and destination offsets are multiples of 4 or the four bytes are equal).
/// With a `cast` every element is converted: the source side of `copy` counts bytes of the one type, its destination side and run_bytes
/// bytes of the other, and runs are whole elements.
struct CopyJob {
  StridedCopy copy;
  const std::byte* src = nullptr;
  std::byte* dst = nullptr;
  std::uint32_t constant = 0;
  ElementCast cast{};
};

/// What a batch did. Counted by the executor itself.
struct CopyStats {
  std::uint64_t batches = 0;  // calls
  std::uint64_t copies = 0;   // nests
  std::uint64_t bytes = 0;    // destination bytes
  CopyStats& operator+=(const CopyStats& other) noexcept {
    batches += other.batches;
    copies += other.copies;
    bytes += other.bytes;
    return *this;
  }
};

/// Which fast path a nest takes; chosen from the nest alone (and the alignment of its bases). For tests, traces and benches.
enum class CopyPath : std::uint8_t { kFlat, kPitched, kTranspose32, kGeneric, kConstant, kCast };
std::string_view copy_path_name(CopyPath path) noexcept;
CopyPath choose_path(const CopyJob& job) noexcept;

/// Executes batches on host memory. Preconditions: every nest was validated, and no two jobs of one batch write the same byte.
/// One caller at a time; the pool does the work, cut by bytes so that a large nest does not wait for one thread. Batches of at least
/// `streaming_bytes_min` destination bytes are written with streaming stores and fenced before run() returns: so many bytes would only push
/// others out of the caches, and a store into them first reads what it overwrites.
class HostExecutor {
 public:
  explicit HostExecutor(WorkerPool& pool, std::int64_t streaming_bytes_min = 1 << 20);
  CopyStats run(std::span<const CopyJob> jobs);

 private:
  /// What one thread does at a time: some whole jobs, or some parts of one.
  struct Work {
    std::size_t first = 0;  // job
    std::size_t last = 0;   // one past the last job
    std::int64_t begin = 0;
    std::int64_t end = 1;
    std::int64_t parts = 1;  // of the one job when it is cut
  };

  void cut(std::span<const CopyJob> jobs, std::int64_t work_bytes);
  void execute(std::span<const CopyJob> jobs, const Work& work) const noexcept;

  WorkerPool* pool_;
  std::int64_t streaming_bytes_min_;
  Stores stores_ = Stores::kCached;  // of the batch at hand
  std::vector<Work> works_;          // kept from call to call for its memory
};

}  // namespace headrace
