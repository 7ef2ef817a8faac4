#include "receiver/models/dense_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

namespace headrace {
namespace {

/// Vocabularies are padded to a multiple of this before they are divided.
constexpr std::int64_t kVocabUnit = 64;

/// This rank's part [lo, hi) of one dimension, at the start of `extent` elements of the parameter.
struct Share {
  std::size_t dim = 0;
  std::int64_t lo = 0;
  std::int64_t hi = 0;
  std::int64_t extent = 0;
};

struct Part {
  const CheckpointTensor* tensor = nullptr;
  DenseName name;
  Share share;
};

/// All parts of one parameter.
struct Parameter {
  std::string name;
  std::vector<Part> parts;
};

class DenseWriter {
 public:
  DenseWriter(LayoutWriter& writer, const DenseModel& model, std::span<const CheckpointTensor* const> tensors, std::int64_t tp,
              std::int64_t tp_rank)
      : writer_(writer), model_(model), tensors_(tensors), tp_(tp), rank_(tp_rank) {}

  void write() {
    for (const CheckpointTensor* tensor : tensors_) by_name_.emplace(tensor->name, tensor);
    for (const CheckpointTensor* tensor : tensors_) collect(*tensor);
    for (Parameter& parameter : parameters_) {
      if (!writer_.status().ok()) return;
      write(parameter);
    }
  }

 private:
  void refuse(const std::string& message) {
    writer_.fail(Status(Code::kInvalidArgument, fmt::format("layout of {}: {}", writer_.layout().family, message)));
  }

  void collect(const CheckpointTensor& tensor) {
    DenseName name = dense_name(model_.naming, tensor.name);
    if (name.kind == DenseName::Kind::kDropped) return;
    const bool known = name.kind == DenseName::Kind::kTensor;
    if (!known && model_.open) {
      name.param = tensor.name;
    } else if (!known) {
      writer_.fail(
          Status(Code::kUnsupported, fmt::format("layout of {}: tensor {}: no rule for this name in a model of type \"{}\" with {} layers",
                                                 writer_.layout().family, tensor.name, model_.model_type, model_.naming.layers)));
      return;
    }
    const auto [found, added] = by_param_.try_emplace(name.param, parameters_.size());
    if (added) parameters_.push_back({name.param, {}});
    const Share share = known ? share_of(tensor, name) : cut(tensor.name, tensor.shape.empty() ? Shape{1} : tensor.shape, Cut::kWhole);
    parameters_[found->second].parts.push_back({&tensor, std::move(name), share});
  }

  Share share_of(const CheckpointTensor& tensor, const DenseName& name) {
    if (tensor.shape.empty()) return {0, 0, 1, 1};
    if (!name.leaf.starts_with("weight_scale")) return cut(tensor.name, tensor.shape, name.cut);
    const auto weight = by_name_.find(name.module + ".weight");
    if (weight == by_name_.end()) {
      refuse(fmt::format("{}: there is no {}.weight that it scales", tensor.name, name.module));
      return {};
    }
    return scale_share(tensor, weight->second->shape, cut(tensor.name, weight->second->shape, name.cut));
  }

  Share part_of_rows(const std::string& name, std::int64_t rows, std::int64_t units, std::int64_t index, std::int64_t parts) {
    const std::int64_t unit = writer_.divide(rows, units, name + ": rows by heads:");
    const std::int64_t size = unit * writer_.divide(units, parts, name + ": heads by ranks:");
    return {0, index * size, (index + 1) * size, size};
  }

  Share cut(const std::string& name, const Shape& shape, Cut kind) {
    const std::int64_t rows = shape.front();
    switch (kind) {
      case Cut::kWhole: break;
      case Cut::kRows: {
        const std::int64_t size = writer_.divide(rows, tp_, name + ": rows");
        return {0, rank_ * size, (rank_ + 1) * size, size};
      }
      case Cut::kHeads: check_heads(name, rows, model_.heads); return part_of_rows(name, rows, model_.heads, rank_, tp_);
      case Cut::kKvHeads: check_heads(name, rows, model_.kv_heads); return kv_heads(name, rows);
      case Cut::kVocab: return vocabulary(name, rows);
      case Cut::kColumns: {
        if (shape.size() != 2) {
          refuse(fmt::format("{}: shape {}, expected rows and columns", name, to_string(shape)));
          return {};
        }
        const std::int64_t size = writer_.divide(shape[1], tp_, name + ": columns");
        return {1, rank_ * size, (rank_ + 1) * size, size};
      }
    }
    return {0, 0, rows, rows};
  }

  void check_heads(const std::string& name, std::int64_t rows, std::int64_t heads) {
    if (model_.head_dim == 0 || model_.naming.latent_attention || rows == heads * model_.head_dim) return;
    refuse(fmt::format("{}: {} rows, config.json has {} heads of {}", name, rows, heads, model_.head_dim));
  }

  Share kv_heads(const std::string& name, std::int64_t rows) {
    if (model_.kv_heads >= tp_) return part_of_rows(name, rows, model_.kv_heads, rank_, tp_);
    const std::int64_t replicas = writer_.divide(tp_, model_.kv_heads, name + ": ranks by key and value heads:");
    if (replicas == 0) return {};
    return part_of_rows(name, rows, model_.kv_heads, rank_ / replicas, model_.kv_heads);
  }

  Share vocabulary(const std::string& name, std::int64_t rows) {
    const std::int64_t padded = (rows + kVocabUnit - 1) / kVocabUnit * kVocabUnit;
    const std::int64_t extent = writer_.divide(padded, tp_, name + ": padded vocabulary");
    return {0, std::min(rows, rank_ * extent), std::min(rows, (rank_ + 1) * extent), extent};
  }

  /// The part of a scale that belongs to a part of its weight. A cut inside a block would need the block's scale twice.
  Share scale_share(const CheckpointTensor& tensor, const Shape& weight, const Share& share) {
    if (tensor.shape.size() != weight.size()) {
      refuse(fmt::format("{}: shape {} for a weight of {}", tensor.name, to_string(tensor.shape), to_string(weight)));
      return {};
    }
    for (std::size_t d = 0; d < weight.size(); ++d) {
      if ((weight[d] + block(tensor, weight, d) - 1) / block(tensor, weight, d) == tensor.shape[d]) continue;
      refuse(fmt::format("{}: shape {}, a weight of {} in blocks of {} needs {} along dimension {}", tensor.name, to_string(tensor.shape),
                         to_string(weight), block(tensor, weight, d), (weight[d] + block(tensor, weight, d) - 1) / block(tensor, weight, d),
                         d));
      return {};
    }
    const std::int64_t size = block(tensor, weight, share.dim);
    const bool last = share.hi == weight[share.dim];
    if (share.lo % size != 0 || (share.hi % size != 0 && !last) || (last && share.extent > share.hi - share.lo)) {
      refuse(fmt::format("{}: [{}, {}) of its weight's dimension {} is cut inside a block of {}", tensor.name, share.lo, share.hi,
                         share.dim, size));
      return {};
    }
    const std::int64_t lo = share.lo / size;
    const std::int64_t hi = (share.hi + size - 1) / size;
    return {share.dim, lo, hi, hi - lo};
  }

  std::int64_t block(const CheckpointTensor& scale, const Shape& weight, std::size_t d) const {
    if (scale.shape[d] == weight[d]) return 1;
    if (scale.shape[d] <= 1) return std::max<std::int64_t>(weight[d], 1);
    if (d < model_.block.size()) return model_.block[d];
    return std::max<std::int64_t>(weight[d] / scale.shape[d], 1);
  }

  void write(Parameter& parameter) {
    std::sort(parameter.parts.begin(), parameter.parts.end(), [](const Part& a, const Part& b) { return a.name.part < b.name.part; });
    const Part& first = parameter.parts.front();
    if (std::cmp_not_equal(parameter.parts.size(), first.name.parts)) {
      refuse(fmt::format("{}: {} of its {} parts, the first of them {}", parameter.name, parameter.parts.size(), first.name.parts,
                         first.tensor->name));
      return;
    }
    Shape shape = first.tensor->shape;
    if (!shape.empty()) shape[first.share.dim] = first.share.extent;
    for (std::size_t p = 1; p < parameter.parts.size(); ++p) {
      const Part& part = parameter.parts[p];
      if (!fits(first, part)) {
        refuse(fmt::format("{}: {} is {} {}, {} is {} {}", parameter.name, first.tensor->name, dtype_name(first.tensor->dtype),
                           to_string(first.tensor->shape), part.tensor->name, dtype_name(part.tensor->dtype),
                           to_string(part.tensor->shape)));
        return;
      }
      shape[0] += part.share.extent;
    }
    if (element_count(shape).value_or(0) == 0) {
      refuse(fmt::format("{}: shape {} on this rank, a parameter needs elements", parameter.name, to_string(shape)));
      return;
    }
    TensorRule rule;
    const bool convert = !first.name.leaf.starts_with("weight_scale") && first.name.leaf != "e_score_correction_bias";
    const std::uint32_t storage = writer_.storage(parameter.name, writer_.keep(rule, first.tensor->dtype, convert), shape);
    std::vector<std::int64_t> corner(shape.size(), 0);
    for (const Part& part : parameter.parts) {
      place(part, rule, storage, shape, corner);
      if (!corner.empty()) corner[0] += part.share.extent;
    }
    if (model_.tied && parameter.name.ends_with("embed_tokens.weight")) alias_of_embedding(storage);
  }

  static bool fits(const Part& first, const Part& part) {
    Shape a = first.tensor->shape;
    Shape b = part.tensor->shape;
    if (a.empty() || a.size() != b.size() || first.tensor->dtype != part.tensor->dtype || first.name.part == part.name.part) return false;
    a[0] = b[0];
    return a == b && first.share.dim == 0 && part.share.dim == 0;
  }

  void place(const Part& part, TensorRule rule, std::uint32_t storage, const Shape& shape, const std::vector<std::int64_t>& corner) {
    const std::int64_t elem_bytes = dtype_bytes(rule.dtypes.front());
    rule.param = part.name.param;
    rule.shard = part.name.shard;
    rule.shape = part.tensor->shape;
    Box box = Box::whole(rule.shape);
    const bool scalar = rule.shape.empty();
    if (!scalar) {
      box.lo[part.share.dim] = part.share.lo;
      box.hi[part.share.dim] = part.share.hi;
    }
    // A rank far enough behind the vocabulary holds nothing but padding.
    if (!box.empty()) {
      StridedCopy copy = place_box(rule.shape, box, shape, corner, elem_bytes);
      rule.placements.push_back({.storage = storage, .box = std::move(box), .copy = std::move(copy)});
    }
    writer_.named(part.tensor->name, std::move(rule));
    const std::int64_t used = part.share.hi - part.share.lo;
    if (!scalar && used < part.share.extent)
      writer_.constant(storage, zero_rows(shape, elem_bytes, corner[0] + used, corner[0] + part.share.extent));
  }

  /// The engine has one tensor under two names.
  void alias_of_embedding(std::uint32_t embedding) {
    StorageSpec head = writer_.layout().storages[embedding];
    head.alias_of = head.name;
    head.name = "lm_head.weight";
    writer_.layout().storages.push_back(std::move(head));
  }

  LayoutWriter& writer_;
  const DenseModel& model_;
  std::span<const CheckpointTensor* const> tensors_;
  std::int64_t tp_;
  std::int64_t rank_;
  std::unordered_map<std::string_view, const CheckpointTensor*> by_name_;
  std::unordered_map<std::string, std::size_t> by_param_;
  std::vector<Parameter> parameters_;
};

}  // namespace

DenseModel read_dense_model(ConfigReader& config, std::span<const CheckpointTensor> tensors) {
  DenseModel model;
  if (const JsonValue* type = config.find("model_type"); type != nullptr && type->as_string() != nullptr)
    model.model_type = *type->as_string();
  model.heads = config.size({"num_attention_heads"});
  model.kv_heads = config.size_or("num_key_value_heads", model.heads);
  const std::int64_t hidden = config.size({"hidden_size"});
  model.head_dim = config.size_or("head_dim", hidden / model.heads);
  model.block = config.weight_block();
  model.naming.latent_attention = config.find("kv_lora_rank") != nullptr;
  model.naming.compressed_query = config.find("q_lora_rank") != nullptr;
  model.naming.layers = config.size({"num_hidden_layers"});
  model.naming.draft_layers = config.count_or("num_nextn_predict_layers", 0);
  const auto ends_with = [&](std::string_view end) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const CheckpointTensor& t) { return t.name.ends_with(end); });
  };
  model.tied = ends_with("embed_tokens.weight") && config.flag("tie_word_embeddings").value_or(!ends_with("lm_head.weight"));
  model.naming.drop_lm_head = model.tied;
  return model;
}

void write_dense_tensors(LayoutWriter& writer, const DenseModel& model, std::span<const CheckpointTensor* const> tensors, std::int64_t tp,
                         std::int64_t tp_rank) {
  DenseWriter(writer, model, tensors, tp, tp_rank).write();
}

NameScan dense_scan(const DenseNaming& naming) {
  return [naming](std::string_view name) {
    ScanAnswer answer;
    if (dense_name(naming, name).kind == DenseName::Kind::kDropped) answer.kind = ScanAnswer::Kind::kDropped;
    return answer;
  };
}

}  // namespace headrace
