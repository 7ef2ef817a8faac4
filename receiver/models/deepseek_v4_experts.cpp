#include "receiver/models/deepseek_v4_experts.h"

#include <fmt/format.h>

#include <bit>
#include <span>
#include <utility>

namespace headrace {
namespace {

/// Rows of a scale matrix by one part of their number: `count` steps of `rows` source rows, `words` 32-bit words apart.
struct RowSteps {
  std::int64_t count = 0;
  std::int64_t rows = 0;
  std::int64_t words = 0;
};

/// A scale matrix as the kernel has it: 4 groups of a row to a 32-bit word, words column by column, `height` to a column.
struct ScaleNest {
  std::vector<RowSteps> rows;   // from the most significant part of the row's number to the least
  std::int64_t first_word = 0;  // of row 0
  std::int64_t height = 0;
  std::int64_t groups = 0;         // of one row
  std::int64_t row_block = 1;      // rows that share a scale in the source; a power of two
  std::int64_t groups_shared = 1;  // groups of a row that share one: 1, 2 or 4

  StridedCopy copy() const {
    const std::int64_t row_bytes = groups / groups_shared;  // of the source
    std::vector<CopyDim> dims;
    for (const RowSteps& step : rows) {
      // Steps inside one block of rows read the same source row again.
      const std::int64_t inside = step.rows >= row_block ? 1 : std::min(step.count, row_block / step.rows);
      const std::int64_t outside = step.count / inside;
      if (outside > 1) dims.push_back({outside, step.rows * inside / row_block * row_bytes, 4 * step.words * inside});
      if (inside > 1) dims.push_back({inside, 0, 4 * step.words});
    }
    dims.push_back({groups / 4, 4 / groups_shared, 4 * height});
    if (groups_shared == 1) return StridedCopy::make(0, 4 * first_word, 4, dims);
    if (groups_shared < 4) dims.push_back({4 / groups_shared, 1, groups_shared});
    dims.push_back({groups_shared, 0, 1});
    return StridedCopy::make(0, 4 * first_word, 1, dims);
  }
};

// Gate rows (u = 0) and up rows (u = 1) of L1 alternate by 8. The kernel permutes rows within each 128: 4 x 32 becomes 32 x 4.
std::vector<RowSteps> l1_kernel_rows(std::int64_t half) {
  return {{half / 64, 64, 128}, {4, 16, 1}, {2, 8, 64}, {8, 1, 4}};
}
std::vector<RowSteps> l1_plain_rows(std::int64_t half) {
  return {{half / 8, 8, 16}, {8, 1, 1}};
}
std::vector<RowSteps> l2_kernel_rows(std::int64_t rows) {
  return {{rows / 128, 128, 128}, {4, 32, 1}, {32, 1, 4}};
}
std::vector<RowSteps> l2_plain_rows(std::int64_t rows) {
  return {{rows, 1, 1}};
}

/// Rows of gate or up, in turns of 8 with the other's.
StridedCopy l1_weight(std::int64_t half, std::int64_t row_bytes, std::int64_t u) {
  return nest_of(0, 8 * u * row_bytes, 8 * row_bytes, {{half / 8, 8 * row_bytes, 16 * row_bytes}});
}

/// Words of scales, `groups` columns a row: strides of the MN-major view of one matrix, or of `slots` of them.
std::vector<std::int64_t> mn_major(std::int64_t rows, std::int64_t groups) {
  return {rows * (groups / 4), 1, rows};
}

class ExpertWriter {
 public:
  ExpertWriter(const DeepseekV4Parts& parts, const std::string& block, std::uint32_t map, DeepseekV4ExpertFormat format,
               const DeepseekV4ExpertForm& form)
      : parts_(parts),
        writer_(parts.writer()),
        prefix_(block + "ffn.experts."),
        map_(map),
        format_(format),
        two_scales_(form.two_scales),
        slots_(writer_.layout().experts[map].local_slots()),
        group_(format == DeepseekV4ExpertFormat::kNvfp4 ? 16 : 32),
        H(parts.config().hidden),
        I(parts.config().intermediate),
        P(form.padded) {}

  void write() {
    writer_.divide(I, 128, "moe_intermediate_size");
    writer_.divide(H, 128, "hidden_size");
    writer_.divide(P, 128, "padded moe_intermediate_size");
    if (format_ != DeepseekV4ExpertFormat::kMxfp4 && (P != I || two_scales_)) {
      writer_.fail(Status(Code::kUnsupported, fmt::format("layout of deepseek_v4: {}: the form {} is of fp4 experts, these are {}", prefix_,
                                                          two_scales_ ? "sglang" : "padded", to_string(format_))));
    }
    if (!writer_.status().ok()) return;
    weights();
    if (format_ == DeepseekV4ExpertFormat::kBf16) return;
    l1_scales();
    l2_scales();
    if (format_ == DeepseekV4ExpertFormat::kNvfp4) global_scales();
  }

 private:
  /// Bytes of `count` elements of a weight.
  std::int64_t weight_bytes(std::int64_t count) const { return format_ == DeepseekV4ExpertFormat::kBf16 ? 2 * count : count / 2; }
  /// Columns of a weight tensor of `elements` a row: FP4 has two in a byte.
  std::int64_t columns(std::int64_t elements) const { return format_ == DeepseekV4ExpertFormat::kBf16 ? elements : elements / 2; }
  std::vector<Dtype> weight_dtypes() const {
    switch (format_) {
      case DeepseekV4ExpertFormat::kMxfp4: return {Dtype::kI8, Dtype::kU8};
      case DeepseekV4ExpertFormat::kNvfp4: return {Dtype::kU8, Dtype::kI8};
      case DeepseekV4ExpertFormat::kBf16: return {Dtype::kBF16};
    }
    return {};
  }
  /// Scales live as bytes, four to a word: a numeric conversion would destroy them.
  std::vector<Dtype> scale_dtypes() const {
    return {format_ == DeepseekV4ExpertFormat::kNvfp4 ? Dtype::kF8E4M3 : Dtype::kF8E8M0, Dtype::kU8};
  }
  std::string_view scale_leaf() const { return format_ == DeepseekV4ExpertFormat::kNvfp4 ? "weight_scale" : "scale"; }

  void rule(std::string_view shard, std::string_view leaf, std::vector<Dtype> dtypes, Shape shape, std::vector<Placement> placements) {
    TensorRule rule = parts_.rule(placements.front().storage, shard, std::move(dtypes), std::move(shape));
    for (Placement& placement : placements) placement.box = Box::whole(rule.shape);
    rule.placements = std::move(placements);
    writer_.expert(map_, prefix_, fmt::format("{}.{}", shard, leaf), std::move(rule));
  }
  static Placement placement(std::uint32_t storage, StridedCopy copy, std::int64_t slot_bytes) {
    return {.storage = storage, .box = {}, .copy = std::move(copy), .slot_stride = slot_bytes};
  }

  void weights() {
    const Dtype dtype = weight_dtypes().front();
    const std::uint32_t w13 = parts_.storage(prefix_ + "w13_weight", dtype, {slots_, 2 * P, columns(H)});
    for (const std::int64_t u : {0, 1}) {
      rule(u == 0 ? "w1" : "w3", "weight", weight_dtypes(), {I, columns(H)},
           {placement(w13, l1_weight(I, weight_bytes(H), u), 2 * P * weight_bytes(H))});
    }
    const std::uint32_t w2 = parts_.storage(prefix_ + "w2_weight", dtype, {slots_, H, columns(P)});
    rule("w2", "weight", weight_dtypes(), {H, columns(I)},
         {placement(w2, nest_of(0, 0, weight_bytes(I), {{H, weight_bytes(I), weight_bytes(P)}}), H * weight_bytes(P))});
    if (P == I) return;
    // Zeros behind the last row of both halves of L1 (8 divides I, so the pads of gate and up lie together) and the last column of L2.
    writer_.constant(w13, nest_of(0, I * H, (P - I) * H, {{slots_, 0, P * H}}));
    writer_.constant(w2, nest_of(0, I / 2, (P - I) / 2, {{slots_, 0, H * (P / 2)}, {H, 0, P / 2}}));
  }

  std::uint32_t scale_storage(std::string_view leaf, std::int64_t rows, std::int64_t groups) {
    return parts_.storage(fmt::format("{}{}", prefix_, leaf), Dtype::kI32, {slots_, rows, groups / 4}, mn_major(rows, groups));
  }

  void l1_scales() {
    const std::int64_t groups = H / group_;
    const std::int64_t slot_bytes = groups * 2 * P;
    std::vector<std::uint32_t> storages;
    if (two_scales_) storages.push_back(scale_storage("w13_weight_scale_inv", 2 * P, groups));
    storages.push_back(scale_storage(two_scales_ ? "mega_l1_weights.1" : "w13_weight_scale", 2 * P, groups));
    for (const std::int64_t u : {0, 1}) {
      std::vector<Placement> placements;
      for (const std::uint32_t storage : storages) {
        const bool kernel = storage == storages.back();
        const ScaleNest nest{.rows = kernel ? l1_kernel_rows(I) : l1_plain_rows(I),
                             .first_word = kernel ? 32 * u : 8 * u,
                             .height = 2 * P,
                             .groups = groups};
        placements.push_back(placement(storage, nest.copy(), slot_bytes));
      }
      rule(u == 0 ? "w1" : "w3", scale_leaf(), scale_dtypes(), {I, groups}, std::move(placements));
    }
    if (P == I) return;
    writer_.constant(storages.front(), nest_of(0, 8 * I, 8 * (P - I), {{slots_, 0, slot_bytes}, {groups / 4, 0, 8 * P}}));
  }

  void l2_scales() {
    const std::int64_t groups = I / group_;
    const std::int64_t padded_groups = P / group_;
    const std::int64_t slot_bytes = padded_groups * H;
    std::vector<Placement> placements;
    if (two_scales_) {
      const ScaleNest nest{.rows = l2_plain_rows(H), .height = H, .groups = groups};
      placements.push_back(placement(scale_storage("w2_weight_scale_inv", H, padded_groups), nest.copy(), slot_bytes));
    }
    const ScaleNest nest{.rows = l2_kernel_rows(H), .height = H, .groups = groups};
    const std::uint32_t kernel = scale_storage(two_scales_ ? "mega_l2_weights.1" : "w2_weight_scale", H, padded_groups);
    placements.push_back(placement(kernel, nest.copy(), slot_bytes));
    rule("w2", scale_leaf(), scale_dtypes(), {H, groups}, std::move(placements));
    if (P == I) return;
    writer_.constant(kernel, nest_of(0, groups * H, (padded_groups - groups) * H, {{slots_, 0, slot_bytes}}));
  }

  /// One number an expert and matrix. The engine multiplies w1 and w3 by one of both, so they must be equal. The scale of the activations
  /// between the two matrices is one for the layer, the greatest of all experts of all ranks, and captured graphs have it by value: no copy
  /// makes it, but every rank has what it comes from.
  void global_scales() {
    const std::uint32_t w13 = parts_.storage(prefix_ + "w13_weight_scale_2", Dtype::kF32, {slots_, 2});
    rule("w1", "weight_scale_2", {Dtype::kF32}, {}, {placement(w13, StridedCopy::flat(0, 0, 4), 8)});
    rule("w3", "weight_scale_2", {Dtype::kF32}, {}, {placement(w13, StridedCopy::flat(0, 4, 4), 8)});
    const std::uint32_t w2 = parts_.storage(prefix_ + "w2_weight_scale_2", Dtype::kF32, {slots_});
    rule("w2", "weight_scale_2", {Dtype::kF32}, {}, {placement(w2, StridedCopy::flat(0, 0, 4), 4)});
    ModelLayout& layout = writer_.layout();
    layout.paired_values.push_back(
        {.map = map_, .prefix = prefix_, .first = "w1.weight_scale_2", .second = "w3.weight_scale_2", .tolerance = 1e-5});

    // Whatever rank an expert lives on, and wherever it moves, every rank has its input scale: a name of its own, not an expert's slot.
    const std::int32_t experts = layout.experts[map_].experts();
    const std::uint32_t input = parts_.storage(prefix_ + "w2_input_scale", Dtype::kF32, {experts});
    for (std::int32_t e = 0; e < experts; ++e) {
      TensorRule scale = parts_.rule(input, "w2", {Dtype::kF32}, {});
      scale.placements.push_back({.storage = input, .box = Box::whole(scale.shape), .copy = StridedCopy::flat(0, 4 * e, 4)});
      writer_.named(fmt::format("{}{}.w2.input_scale", prefix_, e), std::move(scale));
    }
    layout.launch_constants.push_back({.name = parts_.param_of(prefix_ + "l2_activation_scale"),
                                       .dtype = Dtype::kF32,
                                       .shape = {},
                                       .map = map_,
                                       .prefix = prefix_,
                                       .suffix = "w2.input_scale",
                                       .scope = parts_.scope()});
  }

  const DeepseekV4Parts& parts_;
  LayoutWriter& writer_;
  std::string prefix_;
  std::uint32_t map_;
  DeepseekV4ExpertFormat format_;
  bool two_scales_;
  std::int64_t slots_;
  std::int64_t group_;  // columns that share one scale
  std::int64_t H;
  std::int64_t I;
  std::int64_t P;
};

/// One tensor of the shared experts and where it goes. The engine's loader knows it as a part of `param`, whose memory is the fused one.
struct SharedTensor {
  std::string name;   // of the checkpoint
  std::string param;  // the loader's, in checkpoint spelling
  std::string_view shard;
  std::vector<Dtype> dtypes;
  Shape shape;
};

void shared_tensor(const DeepseekV4Parts& parts, SharedTensor tensor, std::uint32_t storage, StridedCopy copy) {
  TensorRule rule = parts.rule(storage, tensor.shard, std::move(tensor.dtypes), std::move(tensor.shape));
  rule.param = parts.param_of(tensor.param);
  rule.placements.push_back({.storage = storage, .box = Box::whole(rule.shape), .copy = std::move(copy)});
  parts.writer().named(std::move(tensor.name), std::move(rule));
}

}  // namespace

void write_deepseek_v4_experts(const DeepseekV4Parts& parts, const std::string& block, std::uint32_t map, DeepseekV4ExpertFormat format,
                               const DeepseekV4ExpertForm& form) {
  ExpertWriter(parts, block, map, format, form).write();
}

void write_deepseek_v4_fused_shared(const DeepseekV4Parts& parts, const std::string& block, std::int64_t padded) {
  const DeepseekV4Config& c = parts.config();
  LayoutWriter& writer = parts.writer();
  const std::int64_t H = c.hidden;
  const std::int64_t width = c.shared_experts * c.intermediate;
  if (width != padded) {
    return writer.fail(
        Status(Code::kInvalidArgument,
               fmt::format("variant fused_shared of deepseek_v4: {}ffn.shared_experts: the shared experts are {} wide, a slot "
                           "of the routed experts {}",
                           block, width, padded)));
  }
  if (!std::has_single_bit(static_cast<std::uint64_t>(c.block)) || c.block < 32 || c.block > 128) {
    return writer.fail(Status(Code::kUnsupported,
                              fmt::format("variant fused_shared of deepseek_v4: weight_block_size {}, expected 32, 64 or 128", c.block)));
  }
  writer.divide(width, 128, "width of the shared experts");
  writer.divide(H, 128, "hidden_size");
  if (!writer.status().ok()) return;
  const std::string shared = block + "ffn.shared_experts.";
  const std::string experts = block + "ffn.experts.shared_";
  const std::vector<Dtype> weight{Dtype::kF8E4M3};
  const std::vector<Dtype> scale{Dtype::kF8E8M0, Dtype::kU8};
  const auto words = [&](std::string_view leaf, std::int64_t rows, std::int64_t columns) {
    return parts.storage(fmt::format("{}{}", experts, leaf), Dtype::kI32, {rows, columns / 128}, {1, rows});
  };

  const std::uint32_t l1 = parts.storage(experts + "l1_weight", Dtype::kF8E4M3, {2 * width, H});
  const std::uint32_t l1_scales = words("l1_weight_scale", 2 * width, H);
  for (const std::int64_t u : {0, 1}) {
    const std::string name = shared + (u == 0 ? "w1" : "w3");
    const std::string_view shard = u == 0 ? "0" : "1";
    shared_tensor(parts, {name + ".weight", shared + "gate_up_proj.weight", shard, weight, {width, H}}, l1, l1_weight(width, H, u));
    const ScaleNest nest{.rows = l1_kernel_rows(width),
                         .first_word = 32 * u,
                         .height = 2 * width,
                         .groups = H / 32,
                         .row_block = c.block,
                         .groups_shared = c.block / 32};
    shared_tensor(parts, {name + ".scale", shared + "gate_up_proj.scale", shard, scale, {width / c.block, H / c.block}}, l1_scales,
                  nest.copy());
  }
  const std::uint32_t l2 = parts.storage(experts + "l2_weight", Dtype::kF8E4M3, {H, width});
  shared_tensor(parts, {shared + "w2.weight", shared + "w2.weight", "", weight, {H, width}}, l2, StridedCopy::flat(0, 0, H * width));
  const ScaleNest nest{.rows = l2_kernel_rows(H), .height = H, .groups = width / 32, .row_block = c.block, .groups_shared = c.block / 32};
  shared_tensor(parts, {shared + "w2.scale", shared + "w2.scale", "", scale, {H / c.block, width / c.block}},
                words("l2_weight_scale", H, width), nest.copy());
}

}  // namespace headrace
