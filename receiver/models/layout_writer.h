#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "receiver/models/family.h"

namespace headrace {

/// Writes down the storages, rules and constants of one rank: what every family builds its answer with. The first failure sticks and is
/// what finish() returns, so that a family reads as a list of tensors. What config.json claims costs little before it is checked: a layout
/// of more tensors than one manifest may name, or of more physical experts, fails, and nothing more is kept then. One thread.
class LayoutWriter {
 public:
  /// `family` names the layout in errors and in the result.
  LayoutWriter(std::string family, const ModelRequest& request);

  void fail(Status status);
  /// size / by; fails when it leaves a rest: what does not fill its group would stay unwritten without a word.
  std::int64_t divide(std::int64_t size, std::int64_t by, std::string_view what);
  const Status& status() const noexcept { return status_; }

  /// Says which dtypes `rule` takes for a tensor that the checkpoint has in `checkpoint`, and gives the dtype that storage holds: that of
  /// the request when both are of F32, F16 and BF16, the others of these then being converted; else the checkpoint's own. E8M0 lives as U8,
  /// and packed bytes are taken with and without a sign: a numeric conversion would destroy them.
  Dtype keep(TensorRule& rule, Dtype checkpoint, bool convert = true);

  /// A storage of this rank, contiguous unless `strides` (elements) say otherwise. `scope` is the model that owns it.
  std::uint32_t storage(std::string name, Dtype dtype, Shape shape, std::string_view scope = "target",
                        std::vector<std::int64_t> strides = {});
  /// Index of a map for the next MoE layer. The last one's once something has failed.
  std::uint32_t expert_map(const ExpertMap& map);

  void named(std::string name, TensorRule rule);
  void expert(std::uint32_t map, std::string prefix, std::string suffix, TensorRule rule);
  /// Bytes that no tensor brings: `pattern` over every byte that `copy` writes. Its source strides are 0.
  void constant(std::uint32_t storage, StridedCopy copy, std::uint32_t pattern = 0);

  ModelLayout& layout() noexcept { return layout_; }
  Result<ModelLayout> finish() &&;

 private:
  /// Whether `count` more tensors may still be kept.
  bool room(std::size_t count, std::string_view name);

  ModelLayout layout_;
  std::size_t tensors_ = 0;
  std::size_t physical_ = 0;  // slots, over the layers' maps
  std::optional<Dtype> dtype_;
  Status status_;
};

/// A nest, outermost dimension first.
StridedCopy nest_of(std::int64_t src_offset, std::int64_t dst_offset, std::int64_t run_bytes, std::initializer_list<CopyDim> dims);

/// The nest that brings the part `box` of a row-major tensor of `shape` to where it starts at element `corner` of a row-major
/// destination of `dst_shape`, both of `elem_bytes`: slices, stacked parts, padded parameters. Precondition: equal ranks, the part fits.
StridedCopy place_box(std::span<const std::int64_t> shape, const Box& box, std::span<const std::int64_t> dst_shape,
                      std::span<const std::int64_t> corner, std::int64_t elem_bytes);

/// Zeros over the rows [first, last) of dimension 0 of a row-major storage of `shape`.
StridedCopy zero_rows(std::span<const std::int64_t> shape, std::int64_t elem_bytes, std::int64_t first, std::int64_t last);

/// The part `index` of `parts` equal ones of a tensor along `dimension`. Precondition: it divides.
Box part_of(std::span<const std::int64_t> shape, std::size_t dimension, std::int64_t index, std::int64_t parts);

}  // namespace headrace
