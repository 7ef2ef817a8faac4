#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "receiver/models/layout_writer.h"

namespace headrace {

/// The one dimension of an expert's matrix that tensor parallelism divides: the experts' intermediate size, counted in what the tensor has
/// along it: elements, bytes of packed pairs, or blocks that share a scale.
struct MoeAxis {
  std::int64_t count = 0;   // in the checkpoint
  std::int64_t repeat = 1;  // copies of each in the parameter, whose blocks are smaller where a rank's part ends inside one
  std::int64_t first = 0;   // this rank's part, counted in copies
  std::int64_t last = 0;
  std::int64_t extent = 0;  // in the parameter, padding included

  /// Parts of the checkpoint tensor with equally many copies each.
  struct Piece {
    std::int64_t lo = 0;  // checkpoint
    std::int64_t hi = 0;
    std::int64_t at = 0;  // in the parameter
    std::int64_t copies = 1;
  };
  std::vector<Piece> pieces() const;
};

/// How experts are divided on one rank. `intermediate` and `padded`: elements, the latter of one rank.
struct MoeDivision {
  std::int64_t intermediate = 0;
  std::int64_t padded = 0;
  std::int64_t tp = 1;
  std::int64_t rank = 0;  // of tp
};

/// For a tensor with `count` entries along the dimension. `scale`: they are blocks of `block` where that fits, else equal blocks that fill
/// the dimension, and may be repeated; else a cut must fall between two entries. The writer fails by `what` and the numbers.
MoeAxis moe_axis(LayoutWriter& writer, const MoeDivision& division, std::int64_t count, bool scale, std::int64_t block,
                 std::string_view what);

}  // namespace headrace
