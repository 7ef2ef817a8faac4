#include <fmt/format.h>

#include <string_view>
#include <unordered_set>

#include "receiver/models/family.h"

namespace headrace {

Result<ModelLayout> build_dense(const ModelRequest& request, const JsonValue* /*config*/, std::span<const CheckpointTensor> tensors) {
  const std::string what = fmt::format("layout {} of dense", request.parallel.to_string());
  if (request.variant != "plain")
    return Status(Code::kUnsupported, fmt::format("{}: variant {}, the family has plain", what, request.variant));
  if (request.parallel.ranks() != 1) return Status(Code::kUnsupported, fmt::format("{}: the family has one rank", what));
  if (request.rank != 0) return Status(Code::kInvalidArgument, fmt::format("{}: rank {} of 1", what, request.rank));
  if (tensors.empty()) return Status(Code::kInvalidArgument, what + ": the checkpoint has no tensors");

  ModelLayout layout;
  layout.family = "dense";
  layout.variant = request.variant;
  layout.parallel = request.parallel;
  layout.named.reserve(tensors.size());
  std::unordered_set<std::string_view> names;
  for (const CheckpointTensor& tensor : tensors) {
    if (tensor.name.empty()) return Status(Code::kInvalidArgument, what + ": a tensor has no name");
    if (!names.insert(tensor.name).second) return Status(Code::kInvalidArgument, fmt::format("{}: {} is there twice", what, tensor.name));
    const auto bytes = byte_count(tensor.dtype, tensor.shape);
    if (!bytes) {
      return Status(Code::kInvalidArgument, fmt::format("{}: {} {} {} has no whole number of bytes", what, tensor.name,
                                                        dtype_name(tensor.dtype), to_string(tensor.shape)));
    }
    NamedRule named{.name = tensor.name, .rule = {}};
    named.rule.param = tensor.name;
    named.rule.dtypes = {tensor.dtype};
    named.rule.shape = tensor.shape;
    if (*bytes == 0) {
      // A tensor without elements has nowhere to live and nothing to write: its name, dtype and shape are checked, its absence is no gap.
      named.rule.optional = true;
    } else {
      const auto storage = static_cast<std::uint32_t>(layout.storages.size());
      layout.storages.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .strides = {}, .bytes = *bytes});
      named.rule.placements.push_back({.storage = storage, .box = Box::whole(tensor.shape), .copy = StridedCopy::flat(0, 0, *bytes)});
    }
    layout.named.push_back(std::move(named));
  }
  if (layout.storages.empty()) return Status(Code::kInvalidArgument, what + ": no tensor of the checkpoint has elements");
  return layout;
}

}  // namespace headrace
