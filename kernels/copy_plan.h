#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/executor.h"
#include "kernels/host_kernels.h"
#include "kernels/loop_nest.h"

namespace headrace {

/// A nest made ready to run: merged, its loops put in the order that suits the caches, the innermost ones given to a kernel.
/// Points into the nest's slot table. Immutable after construction; any thread.
class CopyPlan {
 public:
  /// `constant` runs write a pattern instead of reading a source.
  explicit CopyPlan(const StridedCopy& copy, bool constant = false, ElementCast cast = {}) noexcept;
  explicit CopyPlan(const LoopNest& nest, bool constant = false) noexcept;
  CopyPlan(const CopyPlan&) = delete;
  CopyPlan& operator=(const CopyPlan&) = delete;

  CopyPath path() const noexcept { return path_; }
  /// Into how many parts of about `pieces` or more (less when the nest is small) the work can be cut.
  std::int64_t parts(std::int64_t pieces) const noexcept;
  /// Moves part range [begin, end) of `parts`, a value that parts() gave. `pattern` is for constants.
  void run(const std::byte* src, std::byte* dst, std::uint32_t pattern, std::int64_t begin, std::int64_t end, std::int64_t parts,
           Stores stores) const noexcept;
  /// The whole nest.
  void run(const std::byte* src, std::byte* dst, std::uint32_t pattern, Stores stores) const noexcept {
    run(src, dst, pattern, 0, 1, 1, stores);
  }

 private:
  static constexpr std::int64_t kTileRowsMax = 128;
  static constexpr std::int64_t kTileColumnsMax = 256;

  void order() noexcept;
  void merge_cast() noexcept;
  void choose_words() noexcept;
  void open_window(LoopNest& tile, std::int64_t bytes) noexcept;
  void block_short_runs() noexcept;
  void run_flat(const std::byte* src, std::byte* dst, std::uint32_t pattern, std::int64_t begin, std::int64_t end, std::int64_t parts,
                Stores stores) const noexcept;
  void run_inner(const LoopNest& nest, const std::byte* src, std::byte* dst, std::uint32_t pattern, Stores stores) const noexcept;
  void run_tiles(const LoopNest& nest, const std::byte* src, std::byte* dst, Stores stores) const noexcept;

  LoopNest nest_;  // outer loops; rows of copy_rows included
  bool constant_ = false;
  ElementCast cast_;
  CopyPath path_ = CopyPath::kFlat;
  std::int64_t tile_rows_ = 0;  // of kTranspose32
  std::int64_t tile_columns_ = 0;
  bool tile_aligned_ = false;
  std::size_t window_loops_ = 0;                        // innermost loops of nest_ whose tiles are read before the first of them is moved
  LoopNest window_{0, 0, 0};                            // what they read, from the first byte of the first tile on
  std::array<std::int64_t, kTileRowsMax> row_offsets_;  // the first tile_rows_ are set
  std::array<std::int64_t, kTileColumnsMax> column_offsets_;  // the first tile_columns_ are set
};

}  // namespace headrace
