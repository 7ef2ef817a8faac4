#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "receiver/models/family.h"

namespace headrace::testing {

/// All bytes of one checkpoint tensor, row-major.
using TensorSource = std::function<std::vector<std::byte>(const std::string& name, Dtype dtype, const Shape& shape)>;

/// Bytes that depend on the name, the dtype and the shape, and on nothing else: any two tensors differ, and so do two places of one tensor.
std::vector<std::byte> seeded_tensor(const std::string& name, Dtype dtype, const Shape& shape);

/// What one rank's storages hold after its constants and every tensor of its layout were applied.
struct JudgedRank {
  std::map<std::string, std::vector<std::byte>> storages;
  /// Tensors that were applied, local experts one by one.
  std::size_t tensors = 0;
  /// Bytes that nothing wrote, that were written more than once, or that depend on how the tensors were cut; what was refused. Empty when
  /// all is well.
  std::vector<std::string> defects;
};

/// Applies the layout twice through index, plan and executor: to storages filled with one byte, every tensor whole and in order; and to
/// storages filled with another, every tensor in random boxes cut at its granules, half of them packed first, all in random order.
/// A storage whose bytes are equal afterwards was written everywhere, and if no more bytes were written than it has, everywhere once.
/// Storages that are optional and that nothing writes are passed over.
JudgedRank judge_layout(const ModelLayout& layout, const TensorSource& source = seeded_tensor, std::uint32_t seed = 1);

}  // namespace headrace::testing
