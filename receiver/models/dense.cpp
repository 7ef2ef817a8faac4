#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "receiver/models/dense_tensors.h"
#include "receiver/models/family.h"
#include "receiver/models/layout_writer.h"

namespace headrace {
namespace {

constexpr std::array<std::string_view, 3> kVariants{"plain", "stacked", "open"};

Status check_tensors(const std::string& what, std::span<const CheckpointTensor> tensors) {
  if (tensors.empty()) return Status(Code::kInvalidArgument, what + ": the checkpoint has no tensors");
  std::unordered_set<std::string_view> names;
  for (const CheckpointTensor& tensor : tensors) {
    if (tensor.name.empty()) return Status(Code::kInvalidArgument, what + ": a tensor has no name");
    if (!names.insert(tensor.name).second) return Status(Code::kInvalidArgument, fmt::format("{}: {} is there twice", what, tensor.name));
    if (!byte_count(tensor.dtype, tensor.shape)) {
      return Status(Code::kInvalidArgument, fmt::format("{}: {} {} {} has no whole number of bytes", what, tensor.name,
                                                        dtype_name(tensor.dtype), to_string(tensor.shape)));
    }
  }
  return ok_status();
}

/// Every tensor under its own name, as it is.
void write_plain(LayoutWriter& writer, std::span<const CheckpointTensor> tensors) {
  for (const CheckpointTensor& tensor : tensors) {
    TensorRule rule;
    const Dtype dtype = writer.keep(rule, tensor.dtype);
    // Names keep their meaning here, so that bytes keep their dtype too: nothing but floating-point numbers may change it.
    if (rule.casts.empty()) rule.dtypes = {tensor.dtype};
    rule.param = tensor.name;
    rule.shape = tensor.shape;
    if (element_count(tensor.shape).value_or(0) == 0) {
      // A tensor without elements has nowhere to live and nothing to write: its name, dtype and shape are checked, its absence is no gap.
      rule.optional = true;
    } else {
      const std::uint32_t storage = writer.storage(tensor.name, rule.casts.empty() ? tensor.dtype : dtype, tensor.shape);
      const std::int64_t bytes = writer.layout().storages[storage].bytes;
      rule.placements.push_back({.storage = storage, .box = Box::whole(tensor.shape), .copy = StridedCopy::flat(0, 0, bytes)});
    }
    writer.named(tensor.name, std::move(rule));
  }
}

}  // namespace

Result<ModelLayout> build_dense(const ModelRequest& request, const JsonValue* config, std::span<const CheckpointTensor> tensors) {
  const std::string what = fmt::format("layout {} of dense", request.parallel.to_string());
  const Result<std::vector<std::string>> words = variant_words("dense", request.variant, kVariants);
  if (!words.ok()) return words.status();
  const auto has = [&](std::string_view word) {
    return std::find(words.value().begin(), words.value().end(), word) != words.value().end();
  };
  const bool plain = has("plain");
  if (plain == has("stacked") || (plain && has("open"))) {
    return Status(Code::kUnsupported, fmt::format("{}: variant {}: expected plain, stacked or stacked+open", what, request.variant));
  }
  if (plain && request.parallel.ranks() != 1) {
    return Status(Code::kUnsupported, fmt::format("{}: the family has one rank in variant plain; stacked divides it", what));
  }
  if (request.parallel.ep != 1) return Status(Code::kUnsupported, fmt::format("{}: the family has no experts to divide", what));
  HEADRACE_RETURN_IF_ERROR(check_tensors(what, tensors));

  LayoutWriter writer("dense", request);
  if (plain) {
    write_plain(writer, tensors);
  } else {
    if (config == nullptr) return Status(Code::kInvalidArgument, what + ": variant stacked needs config.json");
    ConfigReader reader(*config, "dense");
    DenseModel model = read_dense_model(reader, tensors);
    model.open = has("open");
    HEADRACE_RETURN_IF_ERROR(reader.status());
    std::vector<const CheckpointTensor*> all;
    for (const CheckpointTensor& tensor : tensors) all.push_back(&tensor);
    write_dense_tensors(writer, model, all, request.parallel.tp, request.rank);
    writer.layout().scan = dense_scan(model.naming);
  }
  if (writer.status().ok() && writer.layout().storages.empty())
    return Status(Code::kInvalidArgument, what + ": no tensor of the checkpoint has elements");
  return std::move(writer).finish();
}

}  // namespace headrace
