#include "receiver/models/deepseek_v4_parts.h"

#include <utility>

namespace headrace {

DeepseekV4Parts::DeepseekV4Parts(LayoutWriter& writer, const DeepseekV4Config& config, Rename rename, std::string scope)
    : writer_(&writer), config_(&config), rename_(std::move(rename)), scope_(std::move(scope)) {}

std::uint32_t DeepseekV4Parts::storage(std::string_view checkpoint_name, Dtype dtype, Shape shape,
                                       std::vector<std::int64_t> strides) const {
  return writer_->storage(param_of(checkpoint_name), dtype, std::move(shape), scope_, std::move(strides));
}

TensorRule DeepseekV4Parts::rule(std::uint32_t dst, std::string_view shard, std::vector<Dtype> dtypes, Shape shape) const {
  TensorRule rule;
  rule.param = writer_->layout().storages[dst].name;
  rule.shard = shard;
  rule.dtypes = std::move(dtypes);
  rule.shape = std::move(shape);
  rule.scope = scope_;
  return rule;
}

void DeepseekV4Parts::flat_rule(std::string name, std::string_view shard, std::vector<Dtype> dtypes, Shape shape, std::uint32_t dst,
                                std::int64_t dst_offset) const {
  const std::int64_t bytes = byte_count(dtypes.front(), shape).value_or(0);
  TensorRule flat = rule(dst, shard, std::move(dtypes), std::move(shape));
  flat.placements.push_back({.storage = dst, .box = Box::whole(flat.shape), .copy = StridedCopy::flat(0, dst_offset, bytes)});
  writer_->named(std::move(name), std::move(flat));
}

void DeepseekV4Parts::tensor(const std::string& name, Dtype dtype, Shape shape) const {
  const std::uint32_t dst = storage(name, dtype, shape);
  flat_rule(name, "", {dtype}, std::move(shape), dst, 0);
}

void DeepseekV4Parts::linear(const std::string& name, std::int64_t rows, std::int64_t columns) const {
  tensor(name + ".weight", Dtype::kF8E4M3, {rows, columns});
  const Shape shape{writer_->divide(rows, config_->block, name + " rows"), writer_->divide(columns, config_->block, name + " columns")};
  const std::string scale = name + ".scale";
  const std::uint32_t dst = storage(scale, Dtype::kU8, shape);
  flat_rule(scale, "", {Dtype::kF8E8M0, Dtype::kU8}, shape, dst, 0);
}

void DeepseekV4Parts::stacked(const std::string& name, std::string_view leaf, const std::vector<Dtype>& dtypes, Dtype stored,
                              std::span<const Stacked> parts, std::int64_t columns) const {
  std::int64_t rows = 0;
  for (const Stacked& part : parts) rows += part.rows;
  const std::uint32_t dst = storage(name + std::string(leaf), stored, {rows, columns});
  const std::int64_t row_bytes = columns * dtype_bytes(stored);
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    flat_rule(parts[i].name + std::string(leaf), i == 0 ? "0" : "1", dtypes, {parts[i].rows, columns}, dst, offset);
    offset += parts[i].rows * row_bytes;
  }
}

void DeepseekV4Parts::stacked_linear(const std::string& name, std::vector<Stacked> parts, std::int64_t columns) const {
  stacked(name, ".weight", {Dtype::kF8E4M3}, Dtype::kF8E4M3, parts, columns);
  for (Stacked& part : parts) part.rows = writer_->divide(part.rows, config_->block, part.name + " rows");
  stacked(name, ".scale", {Dtype::kF8E8M0, Dtype::kU8}, Dtype::kU8, parts, writer_->divide(columns, config_->block, name + " columns"));
}

}  // namespace headrace
