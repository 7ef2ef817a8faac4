#include "receiver/models/deepseek_v4_parts.h"

#include <fmt/format.h>

#include <utility>

namespace headrace {
namespace {

constexpr std::string_view kScale = ".scale";

}  // namespace

DeepseekV4Parts::DeepseekV4Parts(LayoutWriter& writer, const DeepseekV4Config& config, Rename rename, std::string scope,
                                 DeepseekV4Sharding sharding)
    : writer_(&writer), config_(&config), rename_(std::move(rename)), scope_(std::move(scope)), sharding_(sharding) {}

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

std::vector<DeepseekV4Parts::NamedPart> DeepseekV4Parts::with_leaf(std::vector<NamedPart> parts, std::string_view leaf) {
  for (NamedPart& part : parts) part.name += leaf;
  return parts;
}

Share DeepseekV4Parts::share(std::int64_t size, bool cut, std::int64_t padded, const std::string& what) const {
  if (!cut) return Share::whole(size);
  if (padded == 0) padded = size;
  writer_->divide(padded, sharding_.tp, what);
  return Share::of(size, padded, sharding_.rank, sharding_.tp);
}

void DeepseekV4Parts::vocabulary(const std::string& name, Dtype dtype, std::int64_t rows, std::int64_t columns) const {
  const std::int64_t padded = (rows + sharding_.tp - 1) / sharding_.tp * sharding_.tp;
  NamedPart part{.name = name, .shard = {}, .part = {.shape = {rows, columns}}};
  part.part.rows = share(rows, true, padded, name + " rows");
  part.part.columns = Share::whole(columns);
  matrix(name, dtype, {dtype}, {.elem_bytes = dtype_bytes(dtype)}, {&part, 1}, {});
}

void DeepseekV4Parts::linear(const std::string& name, std::int64_t rows, std::int64_t columns, const LinearForm& form) const {
  const Stacked whole{name, rows};
  stacked_linear(name, {&whole, 1}, columns, form);
}

void DeepseekV4Parts::stacked_linear(const std::string& name, std::span<const Stacked> parts, std::int64_t columns,
                                     const LinearForm& form) const {
  std::vector<NamedPart> named;
  std::int64_t at_row = 0;
  for (const Stacked& part : parts) {
    MatrixPart weight{.shape = {part.rows, columns}};
    weight.rows = share(part.rows, form.cut == LinearForm::Cut::kRows, form.padded, part.name + " rows");
    weight.columns = share(columns, form.cut == LinearForm::Cut::kColumns, form.padded, part.name + " columns");
    weight.at_row = at_row;
    at_row += weight.rows.size;
    std::string shard = parts.size() == 1 ? "" : std::to_string(named.size());
    named.push_back({part.name, std::move(shard), std::move(weight)});
  }
  matrix(name + ".weight", Dtype::kF8E4M3, {Dtype::kF8E4M3}, {.group_rows = form.group_rows}, with_leaf(named, ".weight"),
         form.permutation);
  scales(name, std::move(named), form);
}

MatrixPart DeepseekV4Parts::in_blocks(const MatrixPart& part, const std::string& what) const {
  const std::int64_t block = config_->block;
  const std::string rank = fmt::format(" on one of {} ranks", sharding_.tp);
  writer_->divide(part.rows.size, block, what + " rows" + (part.rows.size == part.shape[0] ? "" : rank));
  writer_->divide(part.columns.size, block, what + " columns" + (part.columns.size == part.shape[1] ? "" : rank));
  const auto blocks = [&](const Share& share) { return Share{share.lo / block, share.hi / block, share.size / block}; };
  return {.shape = {writer_->divide(part.shape[0], block, what + " rows"), writer_->divide(part.shape[1], block, what + " columns")},
          .rows = blocks(part.rows),
          .columns = blocks(part.columns),
          .repeat = 1,
          .at_row = part.at_row / block};
}

void DeepseekV4Parts::scales(const std::string& name, std::vector<NamedPart> parts, const LinearForm& form) const {
  ScaleForm scales = sharding_.scales;
  if (form.rows_permuted && scales == ScaleForm::kBlocks) scales = ScaleForm::kRows;
  const bool by_row = scales != ScaleForm::kBlocks || form.group_rows > 0;
  for (NamedPart& part : parts) {
    const std::int64_t at_row = part.part.at_row;
    part.part = in_blocks(part.part, part.name);
    if (!by_row) continue;
    part.part.repeat = config_->block;
    part.part.at_row = at_row;
  }
  MatrixLayout layout;
  if (scales == ScaleForm::kSwizzled) layout.form = MatrixForm::kSwizzled;
  if (form.group_rows > 0) {
    layout.form = MatrixForm::kWords;
    layout.group_rows = form.group_rows;
    writer_->divide(parts.front().part.columns.size, 4, name + " blocks of columns");
  }
  if (form.permutation && layout.form == MatrixForm::kSwizzled) {
    // What is permuted has to fill its tiles: a nest brings the whole of it.
    writer_->divide(parts.front().part.rows.size * config_->block, 128, name + " rows of this rank");
    writer_->divide(parts.front().part.columns.size, 4, name + " blocks of columns");
  }
  matrix(name + std::string(kScale), Dtype::kU8, {Dtype::kF8E8M0, Dtype::kU8}, layout, with_leaf(std::move(parts), kScale),
         form.permutation);
}

void DeepseekV4Parts::matrix(const std::string& name, Dtype stored, const std::vector<Dtype>& dtypes, MatrixLayout layout,
                             std::span<const NamedPart> parts, const Permutation& permutation) const {
  if (!writer_->status().ok()) return;
  layout.columns = parts.front().part.columns.size;
  std::vector<MatrixPart> all;
  for (const NamedPart& part : parts) {
    layout.rows += part.part.rows.size * part.part.repeat;
    all.push_back(part.part);
  }
  StorageSpec spec = storage_of(layout, stored);
  const std::uint32_t dst = storage(name, spec.dtype, std::move(spec.shape), std::move(spec.strides));
  for (const NamedPart& part : parts) {
    TensorRule tensor = rule(dst, part.shard, dtypes, part.part.shape);
    Result<std::vector<Placement>> placements = place_part(layout, part.part, permutation, dst);
    if (!placements.ok()) return writer_->fail(Status(placements.status().code(), part.name + ": " + placements.status().message()));
    tensor.placements = std::move(placements).value();
    writer_->named(part.name, std::move(tensor));
  }
  for (StridedCopy& pad : padding_of(layout, all)) writer_->constant(dst, std::move(pad));
}

}  // namespace headrace
