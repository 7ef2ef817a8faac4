#include "receiver/models/layout_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/check.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

constexpr std::array kConvertible{Dtype::kF32, Dtype::kF16, Dtype::kBF16};

bool is_convertible(Dtype dtype) {
  return std::find(kConvertible.begin(), kConvertible.end(), dtype) != kConvertible.end();
}

}  // namespace

LayoutWriter::LayoutWriter(std::string family, const ModelRequest& request) {
  layout_.family = std::move(family);
  layout_.variant = request.variant;
  layout_.parallel = request.parallel;
  layout_.rank = request.rank;
  dtype_ = request.dtype;
  if (dtype_ && !is_convertible(*dtype_)) {
    fail(Status(Code::kInvalidArgument, fmt::format("layout of {}: floating-point tensors kept as {}, expected F32, F16 or BF16",
                                                    layout_.family, dtype_name(*dtype_))));
  }
  if (request.rank < 0 || request.rank >= request.parallel.ranks()) {
    fail(Status(Code::kInvalidArgument, fmt::format("layout {} of {}: rank {} of {}", request.parallel.to_string(), layout_.family,
                                                    request.rank, request.parallel.ranks())));
  }
}

void LayoutWriter::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

std::int64_t LayoutWriter::divide(std::int64_t size, std::int64_t by, std::string_view what) {
  if (by <= 0 || size % by != 0) {
    fail(Status(Code::kInvalidArgument, fmt::format("layout of {}: {} {} does not divide by {}: rest {}", layout_.family, what, size, by,
                                                    by > 0 ? size % by : size)));
    return 0;
  }
  return size / by;
}

Dtype LayoutWriter::keep(TensorRule& rule, Dtype checkpoint, bool convert) {
  rule.dtypes = {checkpoint};
  if (checkpoint == Dtype::kF8E8M0) rule.dtypes = {Dtype::kU8, Dtype::kF8E8M0};
  if (checkpoint == Dtype::kU8) rule.dtypes = {Dtype::kU8, Dtype::kI8};
  if (checkpoint == Dtype::kI8) rule.dtypes = {Dtype::kI8, Dtype::kU8};
  if (convert && dtype_ && is_convertible(checkpoint)) {
    rule.dtypes = {*dtype_};
    for (const Dtype other : kConvertible)
      if (other != *dtype_) rule.casts.push_back(other);
  }
  return rule.dtypes.front();
}

std::uint32_t LayoutWriter::storage(std::string name, Dtype dtype, Shape shape, std::string_view scope, std::vector<std::int64_t> strides) {
  const auto bytes = byte_count(dtype, shape);
  if (!bytes) fail(Status(Code::kInvalidArgument, fmt::format("layout of {}: {} {} is too large", layout_.family, name, to_string(shape))));
  layout_.storages.push_back({.name = std::move(name),
                              .dtype = dtype,
                              .shape = std::move(shape),
                              .strides = std::move(strides),
                              .bytes = bytes.value_or(0),
                              .owners = {std::string(scope)},
                              .optional = false,
                              .alias_of = {}});
  return static_cast<std::uint32_t>(layout_.storages.size() - 1);
}

std::uint32_t LayoutWriter::expert_map(const ExpertMap& map) {
  physical_ += map.physical().size();
  if (physical_ > limits::kManifestEntriesMax) {
    fail(Status(Code::kInvalidArgument, fmt::format("layout of {}: more than {} physical experts in {} layers", layout_.family,
                                                    limits::kManifestEntriesMax, layout_.experts.size() + 1)));
  }
  // Failed writers keep one map, since callers ask the layout for the one that they were given.
  if (status_.ok() || layout_.experts.empty()) layout_.experts.push_back(map);
  return static_cast<std::uint32_t>(layout_.experts.size() - 1);
}

bool LayoutWriter::room(std::size_t count, std::string_view name) {
  tensors_ += count;
  if (tensors_ > limits::kManifestEntriesMax) {
    fail(Status(Code::kInvalidArgument,
                fmt::format("layout of {}: {}: more than {} tensors", layout_.family, name, limits::kManifestEntriesMax)));
  }
  return status_.ok();
}

void LayoutWriter::named(std::string name, TensorRule rule) {
  if (!room(1, name)) return;
  if (dtype_bits(rule.dtypes.front()) % 8 != 0) {
    return fail(Status(Code::kUnsupported, fmt::format("layout of {}: {}: elements of {} are no whole bytes", layout_.family, name,
                                                       dtype_name(rule.dtypes.front()))));
  }
  layout_.named.push_back({.name = std::move(name), .rule = std::move(rule)});
}

void LayoutWriter::expert(std::uint32_t map, std::string prefix, std::string suffix, TensorRule rule) {
  if (!room(static_cast<std::size_t>(layout_.experts[map].experts()), prefix)) return;
  layout_.expert_rules.push_back({.prefix = std::move(prefix), .suffix = std::move(suffix), .rule = std::move(rule), .map = map});
}

void LayoutWriter::constant(std::uint32_t storage, StridedCopy copy, std::uint32_t pattern) {
  layout_.constants.push_back({.storage = storage, .copy = std::move(copy), .constant = pattern});
}

Result<ModelLayout> LayoutWriter::finish() && {
  if (!status_.ok()) return status_;
  return std::move(layout_);
}

StridedCopy nest_of(std::int64_t src_offset, std::int64_t dst_offset, std::int64_t run_bytes, std::initializer_list<CopyDim> dims) {
  return StridedCopy::make(src_offset, dst_offset, run_bytes, std::span(dims.begin(), dims.size()));
}

StridedCopy place_box(std::span<const std::int64_t> shape, const Box& box, std::span<const std::int64_t> dst_shape,
                      std::span<const std::int64_t> corner, std::int64_t elem_bytes) {
  HEADRACE_CHECK(shape.size() == box.rank() && shape.size() == dst_shape.size() && shape.size() == corner.size(),
                 "place_box() of tensors of unequal ranks");
  const std::vector<std::int64_t> src = packed_strides(shape, elem_bytes);
  const std::vector<std::int64_t> dst = packed_strides(dst_shape, elem_bytes);
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::vector<CopyDim> dims;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    src_offset += box.lo[d] * src[d];
    dst_offset += corner[d] * dst[d];
    dims.push_back({box.hi[d] - box.lo[d], src[d], dst[d]});
  }
  return coalesce(StridedCopy::make(src_offset, dst_offset, elem_bytes, dims));
}

StridedCopy zero_rows(std::span<const std::int64_t> shape, std::int64_t elem_bytes, std::int64_t first, std::int64_t last) {
  const std::int64_t row = packed_strides(shape, elem_bytes).front();
  return nest_of(0, first * row, (last - first) * row, {});
}

Box part_of(std::span<const std::int64_t> shape, std::size_t dimension, std::int64_t index, std::int64_t parts) {
  Box box = Box::whole(Shape(shape.begin(), shape.end()));
  const std::int64_t size = shape[dimension] / parts;
  box.lo[dimension] = index * size;
  box.hi[dimension] = (index + 1) * size;
  return box;
}

}  // namespace headrace
