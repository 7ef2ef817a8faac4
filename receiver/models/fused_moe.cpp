#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "receiver/models/dense_tensors.h"
#include "receiver/models/family.h"
#include "receiver/models/moe_axis.h"
#include "receiver/models/moe_names.h"

namespace headrace {
namespace {

using Projection = MoeName::Projection;

constexpr std::array<std::string_view, 6> kVariants{"plain", "round_robin", "transposed", "padded", "global_scales", "open"};
/// What a rank's part of the intermediate size is padded to.
constexpr std::int64_t kPaddedTo = 256;
constexpr std::array<std::string_view, 6> kLeaves{"weight",       "weight_packed",  "weight_scale_inv",
                                                  "weight_scale", "weight_scale_2", "input_scale"};

struct MoeModel {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t experts = 0;
  std::vector<std::int64_t> block;
  bool round_robin = false;
  bool transposed = false;
  bool global_scales = false;
};

/// The same tensor of all experts of a layer; or one tensor that has them all.
struct ExpertTensors {
  MoeName name;
  const CheckpointTensor* tensor = nullptr;  // of the first expert seen
  std::vector<std::int64_t> seen;            // experts, each once, since names are
};

struct MoeLayer {
  std::string prefix;
  std::vector<ExpertTensors> tensors;

  const ExpertTensors* find(Projection projection, std::string_view leaf) const {
    for (const ExpertTensors& t : tensors)
      if (t.name.projection == projection && t.name.leaf == leaf) return &t;
    return nullptr;
  }
};

/// Strides of one expert's matrix, bytes: along the dimension that is divided and along the other one.
struct MatrixSteps {
  std::int64_t cut = 0;
  std::int64_t other = 0;
};

class MoeWriter {
 public:
  MoeWriter(LayoutWriter& writer, const MoeModel& model, const MoeDivision& division, ExpertMap map)
      : writer_(writer), model_(model), division_(division), map_(std::move(map)), slots_(map_.local_slots()) {}

  void collect(const CheckpointTensor& tensor, MoeName name) {
    const auto [layer, new_layer] = by_prefix_.try_emplace(name.prefix, layers_.size());
    if (new_layer) layers_.push_back({name.prefix, {}});
    const auto [found, added] = by_key_.try_emplace(name.prefix + name.suffix, layers_[layer->second].tensors.size());
    if (added) {
      layers_[layer->second].tensors.push_back({name, &tensor, {}});
    }
    ExpertTensors& all = layers_[layer->second].tensors[found->second];
    if (name.expert >= model_.experts) return refuse(tensor.name, fmt::format("config.json has {} experts", model_.experts));
    if (tensor.dtype != all.tensor->dtype || tensor.shape != all.tensor->shape) {
      return refuse(tensor.name, fmt::format("{} {}, {} is {} {}", dtype_name(tensor.dtype), to_string(tensor.shape), all.tensor->name,
                                             dtype_name(all.tensor->dtype), to_string(all.tensor->shape)));
    }
    if (name.expert >= 0) all.seen.push_back(name.expert);
  }

  void write() {
    std::sort(layers_.begin(), layers_.end(), [](const MoeLayer& a, const MoeLayer& b) { return natural_less(a.prefix, b.prefix); });
    for (MoeLayer& layer : layers_) {
      check_whole(layer);
      if (writer_.status().ok()) write(layer);
    }
  }
  bool empty() const { return layers_.empty(); }

 private:
  void refuse(const std::string& what, const std::string& message) {
    writer_.fail(Status(Code::kInvalidArgument, fmt::format("layout of {}: {}: {}", writer_.layout().family, what, message)));
  }

  void check_whole(MoeLayer& layer) {
    for (ExpertTensors& all : layer.tensors) {
      if (all.name.expert < 0) continue;
      std::sort(all.seen.begin(), all.seen.end());
      std::int64_t next = 0;
      for (const std::int64_t expert : all.seen) next += expert == next ? 1 : 0;
      if (next != model_.experts)
        refuse(layer.prefix + "*." + all.name.suffix, fmt::format("expert {} of {} is missing", next, model_.experts));
      if (std::find(kLeaves.begin(), kLeaves.end(), all.name.leaf) == kLeaves.end())
        refuse(all.tensor->name, fmt::format("no rule for {} of an expert", all.name.leaf));
    }
  }

  void write(const MoeLayer& layer) {
    if (std::any_of(layer.tensors.begin(), layer.tensors.end(), [](const ExpertTensors& t) { return t.name.expert < 0; })) {
      return write_joint(layer);
    }
    map_index_ = writer_.expert_map(map_);
    for (const std::string_view leaf : kLeaves) {
      const ExpertTensors* gate = layer.find(Projection::kGate, leaf);
      const ExpertTensors* up = layer.find(Projection::kUp, leaf);
      const ExpertTensors* down = layer.find(Projection::kDown, leaf);
      if (gate == nullptr && up == nullptr && down == nullptr) continue;
      if (gate == nullptr || up == nullptr || down == nullptr) {
        return refuse(layer.prefix + std::string(leaf), "gate, up and down projection do not all have it");
      }
      if (gate->tensor->dtype != up->tensor->dtype || gate->tensor->shape != up->tensor->shape) {
        return refuse(gate->tensor->name,
                      fmt::format("{}, up projection {}", to_string(gate->tensor->shape), to_string(up->tensor->shape)));
      }
      const std::array both{gate, up};
      const std::array one{down};
      write_parameter(layer, layer.prefix + "w13_" + std::string(leaf), both);
      write_parameter(layer, layer.prefix + "w2_" + std::string(leaf), one);
    }
  }

  void write_parameter(const MoeLayer& layer, const std::string& param, std::span<const ExpertTensors* const> parts) {
    const Shape& shape = parts[0]->tensor->shape;
    if (!writer_.status().ok()) return;
    if (element_count(shape) == 1 && shape.size() <= 1) return write_scalars(param, parts);
    if (shape.size() == 2) return write_matrices(layer, param, parts);
    refuse(parts[0]->tensor->name, fmt::format("shape {}, expected one value or a matrix", to_string(shape)));
  }

  /// One value for each slot and part.
  void write_scalars(const std::string& param, std::span<const ExpertTensors* const> parts) {
    const bool global = model_.global_scales && parts[0]->name.leaf == "input_scale";
    const std::int64_t rows = global ? model_.experts : slots_;
    TensorRule rule;
    const auto count = static_cast<std::int64_t>(parts.size());
    const Dtype dtype = writer_.keep(rule, parts[0]->tensor->dtype, false);
    const std::uint32_t storage = writer_.storage(param, dtype, count == 1 ? Shape{rows} : Shape{rows, count});
    const std::int64_t elem_bytes = dtype_bytes(dtype);
    for (std::int64_t u = 0; u < count; ++u) {
      const ExpertTensors& part = *parts[static_cast<std::size_t>(u)];
      describe(rule, part, param);
      // Kernels that quantise activations once for all experts want the scales of experts that live elsewhere too.
      for (std::int64_t e = 0; global && e < model_.experts; ++e) {
        rule.placements = {
            {.storage = storage, .box = Box::whole(rule.shape), .copy = StridedCopy::flat(0, (e * count + u) * elem_bytes, elem_bytes)}};
        writer_.named(fmt::format("{}{}.{}", part.name.prefix, e, part.name.suffix), rule);
      }
      if (global) continue;
      rule.placements = {{.storage = storage,
                          .box = Box::whole(rule.shape),
                          .copy = StridedCopy::flat(0, u * elem_bytes, elem_bytes),
                          .slot_stride = count * elem_bytes}};
      writer_.expert(map_index_, part.name.prefix, part.name.suffix, rule);
    }
  }

  static void describe(TensorRule& rule, const ExpertTensors& part, const std::string& param) {
    constexpr std::array<std::string_view, 4> kShards{"w1", "w3", "w2", "w13"};
    rule.param = param;
    rule.shard = kShards[static_cast<std::size_t>(part.name.projection)];
    rule.shape = part.tensor->shape;
    rule.placements.clear();
  }

  /// Which dimension of a projection's tensors is the intermediate size. Scales lie as their weights do.
  std::size_t cut_dimension(const MoeLayer& layer, const ExpertTensors& part) {
    const bool down = part.name.projection == Projection::kDown;
    const ExpertTensors* weight = layer.find(part.name.projection, "weight");
    if (weight == nullptr) weight = layer.find(part.name.projection, "weight_packed");
    if (weight == nullptr || weight->tensor->shape.size() != 2) {
      refuse(part.tensor->name, "there is no weight that it belongs to");
      return 0;
    }
    const Shape& shape = weight->tensor->shape;
    const std::int64_t rows = down ? model_.hidden : model_.intermediate;
    if (shape[0] != rows && shape[1] != rows) {
      refuse(weight->tensor->name,
             fmt::format("shape {}, config.json has {} {}", to_string(shape), down ? "hidden size" : "intermediate size", rows));
    }
    const bool turned = shape[0] != rows;
    return turned == down ? 0 : 1;
  }

  /// Entries along the hidden size: elements, packed pairs, equal blocks or blocks of config.json's size.
  void check_hidden(const ExpertTensors& part, std::int64_t count) {
    const std::int64_t block = model_.block.empty() ? 0 : model_.block[part.name.projection == Projection::kDown ? 0 : 1];
    const bool blocks = count > 0 && (model_.hidden % count == 0 || (block > 0 && (model_.hidden + block - 1) / block == count));
    const bool scale = part.name.leaf.find("scale") != std::string::npos;
    const bool packed = dtype_bits(part.tensor->dtype) == 8 && count * 2 == model_.hidden;
    if (scale ? blocks : count == model_.hidden || packed) return;
    refuse(part.tensor->name, fmt::format("shape {}: {} along a hidden size of {}", to_string(part.tensor->shape), count, model_.hidden));
  }

  MoeAxis axis_of(const ExpertTensors& part, std::int64_t count) {
    const bool scale = part.name.leaf.find("scale") != std::string::npos;
    const std::int64_t block = model_.block.empty() ? 0 : model_.block[part.name.projection == Projection::kDown ? 1 : 0];
    return moe_axis(writer_, division_, count, scale, block, part.tensor->name);
  }

  void write_matrices(const MoeLayer& layer, const std::string& param, std::span<const ExpertTensors* const> parts) {
    const Shape& shape = parts[0]->tensor->shape;
    const std::size_t from = cut_dimension(layer, *parts[0]);
    const std::size_t to = (parts.size() == 2) != model_.transposed ? 0 : 1;
    const std::int64_t other = shape[1 - from];
    check_hidden(*parts[0], other);
    const MoeAxis axis = axis_of(*parts[0], shape[from]);
    if (!writer_.status().ok()) return;

    TensorRule rule;
    const bool convert = parts[0]->name.leaf == "weight";
    const Dtype dtype = writer_.keep(rule, parts[0]->tensor->dtype, convert);
    const auto halves = static_cast<std::int64_t>(parts.size());
    const Shape slot = slot_shape(axis, halves, to, other);
    const std::uint32_t storage = writer_.storage(param, dtype, {slots_, slot[0], slot[1]});
    const std::int64_t elem_bytes = dtype_bytes(dtype);
    const auto src = packed_strides(shape, elem_bytes);
    const auto dst = packed_strides(slot, elem_bytes);
    const std::int64_t slot_bytes = slot[0] * slot[1] * elem_bytes;
    for (std::int64_t u = 0; u < halves; ++u) {
      describe(rule, *parts[static_cast<std::size_t>(u)], param);
      for (const MoeAxis::Piece& piece : axis.pieces()) {
        Box box = Box::whole(shape);
        box.lo[from] = piece.lo;
        box.hi[from] = piece.hi;
        StridedCopy copy = piece_copy(piece, {src[from], src[1 - from]}, {dst[to], dst[1 - to]}, other, elem_bytes, {});
        copy.dst_offset += u * axis.extent * dst[to];
        rule.placements.push_back({.storage = storage, .box = std::move(box), .copy = std::move(copy), .slot_stride = slot_bytes});
      }
      writer_.expert(map_index_, parts[static_cast<std::size_t>(u)]->name.prefix, parts[static_cast<std::size_t>(u)]->name.suffix, rule);
    }
    pad(storage, axis, halves, {dst[to], dst[1 - to]}, other, slot_bytes, elem_bytes);
  }

  static Shape slot_shape(const MoeAxis& axis, std::int64_t halves, std::size_t to, std::int64_t other) {
    Shape slot(2);
    slot[to] = axis.extent * halves;
    slot[1 - to] = other;
    return slot;
  }

  /// `outer`: loops around one expert's matrix.
  static StridedCopy piece_copy(const MoeAxis::Piece& piece, MatrixSteps src, MatrixSteps dst, std::int64_t other, std::int64_t elem_bytes,
                                std::vector<CopyDim> outer) {
    outer.push_back({piece.hi - piece.lo, src.cut, piece.copies * dst.cut});
    if (piece.copies > 1) outer.push_back({piece.copies, 0, dst.cut});
    outer.push_back({other, src.other, dst.other});
    return coalesce(StridedCopy::make(piece.lo * src.cut, piece.at * dst.cut, elem_bytes, outer));
  }

  /// Zeros behind this rank's part, in every slot and half.
  void pad(std::uint32_t storage, const MoeAxis& axis, std::int64_t halves, MatrixSteps dst, std::int64_t other, std::int64_t slot_bytes,
           std::int64_t elem_bytes) {
    const std::int64_t used = axis.last - axis.first;
    const std::int64_t rest = axis.extent - used;
    if (rest == 0) return;
    const CopyDim slots{slots_, 0, slot_bytes};
    const CopyDim half{halves, 0, axis.extent * dst.cut};
    if (dst.cut > dst.other) {
      writer_.constant(storage, nest_of(0, used * dst.cut, rest * other * elem_bytes, {slots, half}));
    } else {
      writer_.constant(storage, nest_of(0, used * dst.cut, rest * elem_bytes, {slots, {other, 0, dst.other}, half}));
    }
  }

  /// One tensor for all experts of a layer: `gate_up_proj` (gate first) and `down_proj`. Its experts are found by position, so that slots
  /// must hold consecutive ones, and the layer has no map that a rebalance could change.
  void write_joint(const MoeLayer& layer) {
    const ExpertTensors* both = layer.find(Projection::kGateUp, "weight");
    const ExpertTensors* down = layer.find(Projection::kDown, "weight");
    if (both == nullptr || down == nullptr || layer.tensors.size() != 2) {
      return refuse(layer.prefix, "expected gate_up_proj and down_proj, and nothing else, where one tensor has all experts");
    }
    if (model_.round_robin || map_.experts() != model_.experts || first_expert() < 0) {
      return refuse(both->tensor->name, "one tensor has all experts: a rank's slots must hold consecutive ones");
    }
    write_joint(*both, layer.prefix + "w13_weight", 2);
    write_joint(*down, layer.prefix + "w2_weight", 1);
  }

  /// The expert of slot 0 when slot s holds that expert + s; -1 otherwise.
  std::int64_t first_expert() const {
    std::int64_t first = -1;
    std::int64_t found = 0;
    for (std::int32_t e = 0; e < map_.experts(); ++e) {
      const auto slots = map_.slots_of(e);
      if (slots.empty()) continue;
      if (first < 0) first = e;
      if (slots.size() != 1 || slots[0] != e - first) return -1;
      ++found;
    }
    return found == slots_ ? first : -1;
  }

  void write_joint(const ExpertTensors& part, const std::string& param, std::int64_t halves) {
    const Shape& shape = part.tensor->shape;
    const std::int64_t wide = halves * model_.intermediate;
    const std::int64_t rows = halves == 2 ? wide : model_.hidden;
    const std::int64_t columns = halves == 2 ? model_.hidden : wide;
    const bool straight = shape == Shape{model_.experts, rows, columns};
    if (!straight && shape != Shape{model_.experts, columns, rows}) {
      return refuse(part.tensor->name, fmt::format("shape {}, expected {} or the same turned", to_string(shape),
                                                   to_string(Shape{model_.experts, rows, columns})));
    }
    const std::size_t from = straight == (halves == 2) ? 0 : 1;
    const std::size_t to = (halves == 2) != model_.transposed ? 0 : 1;
    const MoeAxis axis = axis_of(part, model_.intermediate);
    if (!writer_.status().ok()) return;
    TensorRule rule;
    const Dtype dtype = writer_.keep(rule, part.tensor->dtype);
    const Shape slot = slot_shape(axis, halves, to, model_.hidden);
    const std::uint32_t storage = writer_.storage(param, dtype, {slots_, slot[0], slot[1]});
    const std::int64_t elem_bytes = dtype_bytes(dtype);
    const auto src = packed_strides(shape, elem_bytes);
    const auto dst = packed_strides(slot, elem_bytes);
    const std::int64_t slot_bytes = slot[0] * slot[1] * elem_bytes;
    describe(rule, part, param);
    const std::int64_t first = first_expert();
    for (std::int64_t u = 0; u < halves; ++u) {
      MoeAxis::Piece piece = axis.pieces().front();
      piece.lo += u * model_.intermediate;
      piece.hi += u * model_.intermediate;
      piece.at += u * axis.extent;
      Box box = Box::whole(shape);
      box.lo[0] = first;
      box.hi[0] = first + slots_;
      box.lo[from + 1] = piece.lo;
      box.hi[from + 1] = piece.hi;
      StridedCopy copy = piece_copy(piece, {src[from + 1], src[2 - from]}, {dst[to], dst[1 - to]}, model_.hidden, elem_bytes,
                                    {{slots_, src[0], slot_bytes}});
      copy.src_offset += first * src[0];
      rule.placements.push_back({.storage = storage, .box = std::move(box), .copy = std::move(copy)});
    }
    writer_.named(part.tensor->name, rule);
    pad(storage, axis, halves, {dst[to], dst[1 - to]}, model_.hidden, slot_bytes, elem_bytes);
  }

  LayoutWriter& writer_;
  const MoeModel& model_;
  const MoeDivision& division_;
  ExpertMap map_;
  std::int64_t slots_;
  std::uint32_t map_index_ = 0;
  std::vector<MoeLayer> layers_;
  std::unordered_map<std::string, std::size_t> by_prefix_;
  std::unordered_map<std::string, std::size_t> by_key_;  // prefix and suffix -> place in the layer's tensors
};

/// Which experts live on this rank. Linear: the first ranks get one more where it does not divide; round robin: turn by turn.
Result<ExpertMap> place_experts(std::int32_t experts, const ModelRequest& request, bool round_robin) {
  const std::int32_t ep = request.parallel.ep;
  if (experts > ExpertMap::kPhysicalMax) {
    return Status(Code::kInvalidArgument,
                  fmt::format("layout of fused_moe: {} experts, a layer has at most {}", experts, ExpertMap::kPhysicalMax));
  }
  if (request.redundant_experts != 0) {
    if (!round_robin) return ExpertMap::initial(experts, request.redundant_experts, ep == 1 ? 0 : request.rank, ep);
    return Status(Code::kUnsupported,
                  fmt::format("layout of fused_moe: {} redundant experts placed round_robin", request.redundant_experts));
  }
  const std::int32_t rank = ep == 1 ? 0 : request.rank;
  const std::int32_t base = experts / ep;
  const std::int32_t more = experts % ep;
  std::vector<std::int32_t> slots;
  if (round_robin) {
    for (std::int32_t e = rank; e < experts; e += ep) slots.push_back(e);
  } else {
    const std::int32_t first = rank * base + std::min(rank, more);
    for (std::int32_t e = first; e < first + base + (rank < more ? 1 : 0); ++e) slots.push_back(e);
  }
  if (slots.empty()) {
    return Status(Code::kInvalidArgument, fmt::format("layout of fused_moe: no expert of {} for rank {} of {}", experts, rank, ep));
  }
  // One physical slot an expert, numbered as the experts are.
  std::vector<std::int32_t> physical(static_cast<std::size_t>(experts));
  std::iota(physical.begin(), physical.end(), 0);
  return ExpertMap::from_physical(experts, std::move(physical), std::move(slots));
}

Status check_request(const ModelRequest& request, std::span<const CheckpointTensor> tensors) {
  const ParallelLayout& p = request.parallel;
  if (p.ep > 1 && p.ep % p.tp != 0) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("layout {} of fused_moe: experts are divided over all ranks, and {} is no multiple of {}", p.to_string(), p.ep, p.tp));
  }
  if (tensors.empty()) return Status(Code::kInvalidArgument, "layout of fused_moe: the checkpoint has no tensors");
  return ok_status();
}

MoeModel read_moe_model(ConfigReader& config, std::span<const std::string> words) {
  const auto has = [&](std::string_view word) { return std::find(words.begin(), words.end(), word) != words.end(); };
  MoeModel model;
  model.hidden = config.size({"hidden_size"});
  model.intermediate = config.size({"moe_intermediate_size", "intermediate_size"});
  model.experts = config.size({"n_routed_experts", "num_experts", "num_local_experts"});
  model.block = config.weight_block();
  model.round_robin = has("round_robin");
  model.transposed = has("transposed");
  model.global_scales = has("global_scales");
  return model;
}

}  // namespace

Result<ModelLayout> build_fused_moe(const ModelRequest& request, const JsonValue& config, std::span<const CheckpointTensor> tensors) {
  const Result<std::vector<std::string>> words = variant_words("fused_moe", request.variant, kVariants);
  if (!words.ok()) return words.status();
  const auto has = [&](std::string_view word) {
    return std::find(words.value().begin(), words.value().end(), word) != words.value().end();
  };
  if (has("plain") && words.value().size() > (has("open") ? 2U : 1U))
    return Status(Code::kUnsupported, fmt::format("variant {} of fused_moe: plain stands alone, or beside open", request.variant));
  HEADRACE_RETURN_IF_ERROR(check_request(request, tensors));

  ConfigReader reader(config, "fused_moe");
  const MoeModel model = read_moe_model(reader, words.value());
  DenseModel dense = read_dense_model(reader, tensors);
  dense.open = has("open");
  HEADRACE_RETURN_IF_ERROR(reader.status());
  Result<ExpertMap> map = place_experts(static_cast<std::int32_t>(model.experts), request, model.round_robin);
  if (!map.ok()) return map.status();

  LayoutWriter writer("fused_moe", request);
  // Experts that are divided over ranks are whole on each.
  const ParallelLayout& parallel = request.parallel;
  MoeDivision division{model.intermediate, 0, parallel.ep > 1 ? 1 : parallel.tp, parallel.ep > 1 ? 0 : request.rank};
  const std::int64_t local = writer.divide(model.intermediate, division.tp, "moe_intermediate_size");
  division.padded = has("padded") ? (local + kPaddedTo - 1) / kPaddedTo * kPaddedTo : local;

  MoeWriter moe(writer, model, division, std::move(map).value());
  std::vector<const CheckpointTensor*> others;
  std::unordered_set<std::string_view> names;
  for (const CheckpointTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      writer.fail(Status(Code::kInvalidArgument, fmt::format("layout of fused_moe: {} is there twice", tensor.name)));
    std::optional<MoeName> name = moe_name(tensor.name);
    if (!name) {
      others.push_back(&tensor);
    } else if (const LayerOwner owner = layer_owner(dense.naming, tensor.name); owner == LayerOwner::kModel) {
      moe.collect(tensor, std::move(*name));
    } else if (owner == LayerOwner::kNobody) {
      writer.fail(Status(Code::kInvalidArgument,
                         fmt::format("layout of fused_moe: {}: config.json has {} layers", tensor.name, dense.naming.layers)));
    }
  }
  if (moe.empty()) writer.fail(Status(Code::kInvalidArgument, "layout of fused_moe: the checkpoint has no tensor of an expert"));
  if (writer.status().ok()) write_dense_tensors(writer, dense, others, parallel.tp, request.rank % parallel.tp);
  if (writer.status().ok()) moe.write();
  writer.layout().scan = dense_scan(dense.naming);
  return std::move(writer).finish();
}

}  // namespace headrace
