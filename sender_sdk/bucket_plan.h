#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/shape.h"
#include "core/base/status.h"
#include "core/wire/messages.h"

namespace headrace {

/// Bytes of one entry that are packed (or read in place) once and go to every receiver of a group.
struct Cell {
  Box box;                  // coordinates of the whole tensor
  std::uint32_t group = 0;  // index into BucketPlan::groups
};

/// What of each manifest entry goes to whom, in pieces that fit into a bucket. A value, computed once per set of ACCEPTs.
struct BucketPlan {
  struct Entry {
    std::uint32_t first_cell = 0;
    std::uint32_t cell_count = 0;
  };
  std::vector<std::vector<std::uint32_t>> groups;  // receivers, ascending; no two groups are equal
  std::vector<Cell> cells;
  std::vector<Entry> entries;  // one per manifest entry
  std::int64_t bytes = 0;      // of all cells

  std::span<const Cell> cells_of(std::size_t entry) const {
    return std::span(cells).subspan(entries[entry].first_cell, entries[entry].cell_count);
  }
};

/// Which entries may stay unwanted without every receiver ignoring them.
enum class Unwanted : std::uint8_t {
  kRefuse,         // none: holes are mistakes of somebody
  kAllowEntirely,  // entries that nobody wants any of: another sender owns the same bytes
  kAllow,          // any part: other ranks of the engine, which are not part of this update, hold it
};

struct BucketPlanInput {
  std::span<const wire::ManifestEntry> entries;
  std::span<const std::span<const wire::Wanted>> wanted;  // per receiver, one for each entry
  std::span<const std::string> receivers;                 // names for messages, as many as `wanted`
  std::int64_t bucket_bytes_max = 0;
  Unwanted unwanted = Unwanted::kRefuse;
};

/// Cuts each entry's box along the edges of all wanted boxes, so that bytes which several receivers want are packed once. Receivers whose
/// granule such a cut would break get their boxes packed by themselves. Cells larger than a bucket are split at the granule.
/// kInvalidArgument: entries that are neither wanted as a whole by all receivers together nor ignored by all, every one named; a tensor
/// whose smallest cut is larger than a bucket. kCorruption: an answer that does not fit the entry, with the receiver.
Result<BucketPlan> make_bucket_plan(const BucketPlanInput& input);

}  // namespace headrace
