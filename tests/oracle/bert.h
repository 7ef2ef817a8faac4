#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tests/oracle/storages.h"

namespace headrace::oracle {

/// A float32 tensor with every number rounded to bfloat16: to the nearest, ties to the even one; a NaN keeps its sign and upper payload and
/// is quiet. Little-endian on both sides.
std::vector<std::uint8_t> bfloat16_of(std::span<const std::uint8_t> floats);

/// What an engine with stacked projections holds of a BERT on `rank` of `tp`: queries, keys and values of its heads in one parameter, the
/// rows of what widens, the columns of what narrows, its rows of each embedding table, which is filled up with zeros, and everything else
/// whole. `bfloat16`: the checkpoint's float32 numbers are rounded. Throws for a name that a BERT has not.
std::vector<ExpectedStorage> bert_storages(const CheckpointBytes& checkpoint, std::int64_t tp, std::int64_t rank, bool bfloat16);

}  // namespace headrace::oracle
