#include "receiver/models/deepseek_v4_experts.h"

#include <utility>

namespace headrace {
namespace {

class ExpertWriter {
 public:
  ExpertWriter(const DeepseekV4Parts& parts, const std::string& block, std::uint32_t map, const DeepseekV4ExpertForm& form)
      : parts_(parts),
        writer_(parts.writer()),
        prefix_(block + "ffn.experts."),
        map_(map),
        slots_(writer_.layout().experts[map].local_slots()),
        H(parts.config().hidden),
        I(parts.config().intermediate),
        P(form.padded) {}

  void write() {
    writer_.divide(I, 128, "moe_intermediate_size");
    writer_.divide(H, 128, "hidden_size");
    writer_.divide(P, 128, "padded moe_intermediate_size");
    if (!writer_.status().ok()) return;
    const std::uint32_t w13 = parts_.storage(prefix_ + "w13_weight", Dtype::kI8, {slots_, 2 * P, H / 2});
    const std::uint32_t w13_scale =
        parts_.storage(prefix_ + "w13_weight_scale", Dtype::kI32, {slots_, 2 * P, H / 128}, {2 * P * (H / 128), 1, 2 * P});
    const std::uint32_t w2 = parts_.storage(prefix_ + "w2_weight", Dtype::kI8, {slots_, H, P / 2});
    const std::uint32_t w2_scale = parts_.storage(prefix_ + "w2_weight_scale", Dtype::kI32, {slots_, H, P / 128}, {H * (P / 128), 1, H});
    for (const std::int64_t u : {0, 1}) {
      const std::string shard = u == 0 ? "w1" : "w3";
      weight(shard, {I, H / 2}, w13, P * H, l1_weight(u));
      scale(shard, {I, H / 32}, w13_scale, (H / 128) * 8 * P, l1_scale(u));
    }
    weight("w2", {H, I / 2}, w2, H * (P / 2), l2_weight());
    scale("w2", {H, I / 32}, w2_scale, (P / 128) * 4 * H, l2_scale());
    if (P != I) padding(w13, w13_scale, w2, w2_scale);
  }

 private:
  void rule(const std::string& shard, const std::string& leaf, std::vector<Dtype> dtypes, Shape shape, std::uint32_t dst,
            std::int64_t slot_stride, StridedCopy copy) {
    TensorRule rule = parts_.rule(dst, shard, std::move(dtypes), std::move(shape));
    rule.placements.push_back({.storage = dst, .box = Box::whole(rule.shape), .copy = std::move(copy), .slot_stride = slot_stride});
    writer_.expert(map_, prefix_, shard + leaf, std::move(rule));
  }
  void weight(const std::string& shard, Shape shape, std::uint32_t dst, std::int64_t slot_stride, StridedCopy copy) {
    rule(shard, ".weight", {Dtype::kI8, Dtype::kU8}, std::move(shape), dst, slot_stride, std::move(copy));
  }
  void scale(const std::string& shard, Shape shape, std::uint32_t dst, std::int64_t slot_stride, StridedCopy copy) {
    rule(shard, ".scale", {Dtype::kF8E8M0, Dtype::kU8}, std::move(shape), dst, slot_stride, std::move(copy));
  }

  // The kernel's layout, u = 0 for w1 (gate) and 1 for w3 (up). Gate and up alternate by 8 rows; scales are 4 groups to a 32-bit word,
  // words column by column, rows permuted inside blocks of 128 (4 x 32 becomes 32 x 4).
  StridedCopy l1_weight(std::int64_t u) const {
    const std::int64_t row = H / 2;
    return nest_of(0, 8 * u * row, 8 * row, {{I / 8, 8 * row, 16 * row}});
  }
  StridedCopy l1_scale(std::int64_t u) const {
    const std::int64_t R = H / 32;
    return nest_of(0, 128 * u, 4, {{I / 64, 64 * R, 512}, {4, 16 * R, 4}, {2, 8 * R, 256}, {8, R, 16}, {H / 128, 4, 8 * P}});
  }
  StridedCopy l2_weight() const { return nest_of(0, 0, I / 2, {{H, I / 2, P / 2}}); }
  StridedCopy l2_scale() const {
    const std::int64_t R = I / 32;
    return nest_of(0, 0, 4, {{H / 128, 128 * R, 512}, {4, 32 * R, 4}, {32, R, 16}, {I / 128, 4, 4 * H}});
  }

  /// Zeros behind the last row of both halves of L1 (8 divides I, so the pads of gate and up lie together) and the last column of L2.
  void padding(std::uint32_t w13, std::uint32_t w13_scale, std::uint32_t w2, std::uint32_t w2_scale) {
    writer_.constant(w13, nest_of(0, I * H, (P - I) * H, {{slots_, 0, P * H}}));
    writer_.constant(w13_scale, nest_of(0, 8 * I, 8 * (P - I), {{slots_, 0, (H / 128) * 8 * P}, {H / 128, 0, 8 * P}}));
    writer_.constant(w2, nest_of(0, I / 2, (P - I) / 2, {{slots_, 0, H * (P / 2)}, {H, 0, P / 2}}));
    writer_.constant(w2_scale, nest_of(0, (I / 128) * 4 * H, (P - I) / 128 * 4 * H, {{slots_, 0, (P / 128) * 4 * H}}));
  }

  const DeepseekV4Parts& parts_;
  LayoutWriter& writer_;
  std::string prefix_;
  std::uint32_t map_;
  std::int64_t slots_;
  std::int64_t H;
  std::int64_t I;
  std::int64_t P;
};

}  // namespace

void write_deepseek_v4_experts(const DeepseekV4Parts& parts, const std::string& block, std::uint32_t map,
                               const DeepseekV4ExpertForm& form) {
  ExpertWriter(parts, block, map, form).write();
}

}  // namespace headrace
