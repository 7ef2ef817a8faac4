#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "receiver/models/family.h"
#include "receiver/weight_index.h"
#include "tests/oracle/deepseek_experts.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/layout_judge.h"

namespace headrace {
namespace {

using testing::replaced;

using oracle::ExpertBytes;
using oracle::ExpertWidths;

/// One small layer and how its experts are asked for.
struct Case {
  std::uint64_t H = 128;
  std::uint64_t I = 128;
  std::int32_t experts = 2;
  std::int32_t redundant = 0;
  std::int32_t ep = 1;
  std::string variant = "plain";
  std::string format = "fp4";  // fp4 | nvfp4 | bf16
  int block = 32;

  bool sglang() const { return variant.starts_with("sglang"); }
  ExpertWidths widths() const { return {H, I, variant.starts_with("padded") ? (I + 511) / 512 * 512 : I}; }
  std::int32_t slots() const { return (experts + redundant) / ep; }
  /// The logical expert in a local slot of a rank.
  std::int32_t expert(std::int32_t rank, std::int32_t slot) const { return (rank * slots() + slot) % experts; }
  std::string name() const {
    return variant + " " + format + " H " + std::to_string(H) + " I " + std::to_string(I) + " experts " + std::to_string(experts) + "+" +
           std::to_string(redundant) + " ep" + std::to_string(ep) + " block " + std::to_string(block);
  }
};

std::string config_of(const Case& c) {
  std::string config = testing::v41_tiny_config(static_cast<int>(c.H), static_cast<int>(c.I), c.experts);
  if (c.format == "bf16") config = replaced(config, "\"fp4\"", "\"bf16\"");
  if (c.format == "nvfp4") config = replaced(config, "\"fp4\"", "\"fp4\",\"moe_quant_algo\":\"NVFP4\"");
  if (c.block == 32) return config;
  const std::string wide = std::to_string(c.block);
  for (const std::string key : {"\"head_dim\":", "\"q_lora_rank\":", "\"o_lora_rank\":"}) {
    const std::string narrow_one = key + "32";
    const std::string wide_one = key + wide;
    config = replaced(std::move(config), narrow_one, wide_one);
  }
  return replaced(config, "[32,32]", "[" + wide + "," + wide + "]");
}

Result<ModelLayout> build(const Case& c, std::int32_t rank) {
  ModelRequest request;
  request.family = "deepseek_v4";
  request.variant = c.variant;
  request.parallel.ep = c.ep;
  request.rank = rank;
  request.redundant_experts = c.redundant;
  return build_deepseek_v4(request, testing::json(config_of(c)));
}

ExpertBytes tensor(const std::string& name, Dtype dtype, const Shape& shape) {
  const std::vector<std::byte> bytes = testing::seeded_tensor(name, dtype, shape);
  ExpertBytes out(bytes.size());
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

/// What the storages of a rank hold, computed from the formulas alone.
class Expected {
 public:
  Expected(const Case& c, std::int32_t rank)
      : c_(c), w_(c.widths()), H_(static_cast<std::int64_t>(c.H)), I_(static_cast<std::int64_t>(c.I)) {
    prefix_ = c.sglang() ? "model.layers.0.mlp.experts." : "model.layers.0.ffn.experts.";
    for (std::int32_t s = 0; s < c.slots(); ++s) slot(c.expert(rank, s));
    if (c.format == "nvfp4") {
      for (std::int32_t e = 0; e < c.experts; ++e) add("w2_input_scale", number(e, "w2.input_scale"));
    }
    if (c.variant.ends_with("+fused_shared")) shared();
  }
  const std::map<std::string, ExpertBytes>& storages() const { return storages_; }

 private:
  void add(const std::string& leaf, const ExpertBytes& bytes) {
    ExpertBytes& storage = storages_[prefix_ + leaf];
    storage.insert(storage.end(), bytes.begin(), bytes.end());
  }
  static std::string name(std::int32_t expert, const std::string& suffix) {
    return "layers.0.ffn.experts." + std::to_string(expert) + "." + suffix;
  }
  static ExpertBytes number(std::int32_t expert, const std::string& suffix) { return tensor(name(expert, suffix), Dtype::kF32, {}); }

  void slot(std::int32_t e) {
    const bool bf16 = c_.format == "bf16";
    const bool nvfp4 = c_.format == "nvfp4";
    const std::uint64_t bits = bf16 ? 16 : 4;
    const std::int64_t packed = bf16 ? 1 : 2;
    const Dtype dtype = bf16 ? Dtype::kBF16 : nvfp4 ? Dtype::kU8 : Dtype::kI8;
    const auto weight = [&](const std::string& w, Shape shape) { return tensor(name(e, w + ".weight"), dtype, shape); };
    add("w13_weight", oracle::expert_l1_weight(w_, bits, weight("w1", {I_, H_ / packed}), weight("w3", {I_, H_ / packed})));
    add("w2_weight", oracle::expert_l2_weight(w_, bits, weight("w2", {H_, I_ / packed})));
    if (bf16) return;
    const std::int64_t group = nvfp4 ? 16 : 32;
    const auto scale = [&](const std::string& w, Shape shape) {
      return tensor(name(e, w + (nvfp4 ? ".weight_scale" : ".scale")), nvfp4 ? Dtype::kF8E4M3 : Dtype::kF8E8M0, shape);
    };
    const ExpertBytes gate = scale("w1", {I_, H_ / group});
    const ExpertBytes up = scale("w3", {I_, H_ / group});
    const ExpertBytes down = scale("w2", {H_, I_ / group});
    const auto size = static_cast<std::uint64_t>(group);
    add(c_.sglang() ? "mega_l1_weights.1" : "w13_weight_scale", oracle::expert_l1_scale(w_, size, true, gate, up));
    add(c_.sglang() ? "mega_l2_weights.1" : "w2_weight_scale", oracle::expert_l2_scale(w_, size, true, down));
    if (c_.sglang()) {
      add("w13_weight_scale_inv", oracle::expert_l1_scale(w_, size, false, gate, up));
      add("w2_weight_scale_inv", oracle::expert_l2_scale(w_, size, false, down));
    }
    if (!nvfp4) return;
    add("w13_weight_scale_2", number(e, "w1.weight_scale_2"));
    add("w13_weight_scale_2", number(e, "w3.weight_scale_2"));
    add("w2_weight_scale_2", number(e, "w2.weight_scale_2"));
  }

  void shared() {
    const auto block = static_cast<std::uint64_t>(c_.block);
    const auto weight = [&](const std::string& w, Shape shape) {
      return tensor("layers.0.ffn.shared_experts." + w + ".weight", Dtype::kF8E4M3, shape);
    };
    const auto scale = [&](const std::string& w, std::int64_t rows, std::int64_t columns) {
      const ExpertBytes coarse =
          tensor("layers.0.ffn.shared_experts." + w + ".scale", Dtype::kF8E8M0, {rows / c_.block, columns / c_.block});
      return oracle::expand_block_scale(static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns), block, coarse);
    };
    add("shared_l1_weight", oracle::expert_l1_weight(w_, 8, weight("w1", {I_, H_}), weight("w3", {I_, H_})));
    add("shared_l2_weight", oracle::expert_l2_weight(w_, 8, weight("w2", {H_, I_})));
    add("shared_l1_weight_scale", oracle::expert_l1_scale(w_, 32, true, scale("w1", I_, H_), scale("w3", I_, H_)));
    add("shared_l2_weight_scale", oracle::expert_l2_scale(w_, 32, true, scale("w2", H_, I_)));
  }

  const Case& c_;
  ExpertWidths w_;
  std::int64_t H_;
  std::int64_t I_;
  std::string prefix_;
  std::map<std::string, ExpertBytes> storages_;
};

/// All bytes of all experts' storages of one rank, and no storage beside those that are expected.
void expect_bytes(const Case& c, std::int32_t rank) {
  const Result<ModelLayout> layout = build(c, rank);
  ASSERT_TRUE(layout.ok()) << c.name() << ": " << layout.status().to_string();
  const testing::JudgedRank judged = testing::judge_layout(layout.value());
  for (const std::string& defect : judged.defects) ADD_FAILURE() << c.name() << " rank " << rank << ": " << defect;
  const Expected expected(c, rank);
  std::size_t compared = 0;
  for (const auto& [name, bytes] : judged.storages) {
    if (name.find(".experts.") == std::string::npos) continue;
    const auto wanted = expected.storages().find(name);
    ASSERT_NE(wanted, expected.storages().end()) << c.name() << ": " << name;
    ASSERT_EQ(bytes.size(), wanted->second.size()) << c.name() << ": " << name;
    EXPECT_EQ(std::memcmp(bytes.data(), wanted->second.data(), bytes.size()), 0) << c.name() << " rank " << rank << ": " << name;
    ++compared;
  }
  EXPECT_EQ(compared, expected.storages().size()) << c.name();
}

/// Every legal division of 2 to 4 experts over 1 to 4 ranks with as few redundant ones as it takes, in every small shape.
void expect_all_small(const std::string& variant, const std::string& format, int block = 32) {
#ifdef HEADRACE_SANITIZED
  const std::vector<std::uint64_t> hidden{256};
  const std::vector<std::uint64_t> intermediate{128, 640};
#else
  const std::vector<std::uint64_t> hidden{128, 256, 384};
  const std::vector<std::uint64_t> intermediate{128, 256, 384, 640};
#endif
  for (const std::uint64_t H : hidden) {
    for (const std::uint64_t I : intermediate) {
      for (std::int32_t experts = 2; experts <= 4; ++experts) {
        for (std::int32_t ep = 1; ep <= 4; ++ep) {
          const Case c{H, I, experts, (ep - experts % ep) % ep, ep, variant, format, block};
          for (std::int32_t rank = 0; rank < ep; ++rank) ASSERT_NO_FATAL_FAILURE(expect_bytes(c, rank));
        }
      }
    }
  }
}

TEST(DeepseekV4Experts, HoldsFp4AsTheKernelReadsThem) {
  expect_all_small("plain", "fp4");
}
TEST(DeepseekV4Experts, HoldsPaddedFp4WithZerosBehindThem) {
  expect_all_small("padded", "fp4");
}
TEST(DeepseekV4Experts, HoldsBothScalesOfSglang) {
  expect_all_small("sglang", "fp4");
}
TEST(DeepseekV4Experts, HoldsNvfp4WithItsGlobalScales) {
  expect_all_small("plain", "nvfp4");
}
TEST(DeepseekV4Experts, HoldsBf16WithoutScales) {
  expect_all_small("plain", "bf16");
}
TEST(DeepseekV4Experts, HoldsFusedSharedExpertsAsOneMoreSlot) {
  expect_all_small("plain+fused_shared", "fp4");
}
TEST(DeepseekV4Experts, RepeatsSharedScalesOf128RowsAndColumns) {
  for (const int block : {64, 128}) {
    for (const std::uint64_t H : {128U, 384U}) {
      for (const std::uint64_t I : {128U, 256U, 640U}) expect_bytes({H, I, 2, 0, 1, "plain+fused_shared", "fp4", block}, 0);
    }
  }
}

TEST(DeepseekV4Experts, WritesAllReplicasOfRedundantExperts) {
  for (const std::int32_t redundant : {2, 4, 6}) {
    for (std::int32_t rank = 0; rank < 2; ++rank) expect_bytes({128, 128, 4, redundant, 2, "plain", "fp4"}, rank);
  }
}

TEST(DeepseekV4Experts, HoldsTheTrueShapesOfV41AndV4) {
#ifndef HEADRACE_SANITIZED
  // Hidden, intermediate and number of experts of V4.1, V4-Flash and V4-Pro; two experts to a rank, the last rank.
  for (const auto& [H, I, experts] : {std::tuple{5120U, 2304U, 384}, std::tuple{4096U, 2048U, 256}, std::tuple{7168U, 3072U, 384}}) {
    for (const std::string variant : {"plain+fused_shared", "padded", "sglang"}) {
      const std::int32_t ep = experts / 2;
      expect_bytes({H, I, experts, 0, ep, variant, "fp4"}, ep - 1);
    }
  }
#endif
}

// --- Global values ---

TEST(DeepseekV4Experts, AsksForInputScalesOfAllExpertsOnEveryRank) {
  const Case c{.experts = 4, .ep = 4, .format = "nvfp4"};
  const WeightIndex index(build(c, 2).value_or_throw());
  for (int e = 0; e < 4; ++e) {
    const std::string expert = "layers.0.ffn.experts." + std::to_string(e) + ".";
    EXPECT_EQ(index.resolve(expert + "w2.input_scale").kind, Resolution::Kind::kPlaced) << e;
    EXPECT_EQ(index.resolve(expert + "w1.input_scale").kind, Resolution::Kind::kDropped) << e;
    EXPECT_EQ(index.resolve(expert + "w3.input_scale").kind, Resolution::Kind::kDropped) << e;
    const Resolution::Kind local = e == 2 ? Resolution::Kind::kPlaced : Resolution::Kind::kNotLocal;
    EXPECT_EQ(index.resolve(expert + "w1.weight_scale_2").kind, local) << e;
    EXPECT_EQ(index.resolve(expert + "w2.weight").kind, local) << e;
  }
}

TEST(DeepseekV4Experts, DeclaresTheActivationScaleAsALaunchConstantAndTheGateAndUpScalesAsAPair) {
  const ModelLayout layout = build({.format = "nvfp4"}, 0).value_or_throw();
  ASSERT_EQ(layout.launch_constants.size(), 1U);
  const LaunchConstant& constant = layout.launch_constants[0];
  EXPECT_EQ(constant.name, "model.layers.0.ffn.experts.l2_activation_scale");
  EXPECT_EQ(constant.dtype, Dtype::kF32);
  EXPECT_TRUE(constant.shape.empty());
  EXPECT_EQ(constant.prefix, "layers.0.ffn.experts.");
  EXPECT_EQ(constant.suffix, "w2.input_scale");
  EXPECT_EQ(layout.experts.at(constant.map).experts(), 2);
  EXPECT_EQ(layout.experts.size(), 1U) << "a map for each MoE layer and no other";
  for (const StorageSpec& storage : layout.storages) EXPECT_NE(storage.name, constant.name) << "a reduction is no storage";
  ASSERT_EQ(layout.paired_values.size(), 1U);
  EXPECT_EQ(layout.paired_values[0].first, "w1.weight_scale_2");
  EXPECT_EQ(layout.paired_values[0].second, "w3.weight_scale_2");
  EXPECT_EQ(layout.paired_values[0].tolerance, 1e-5);
  EXPECT_TRUE(build({.format = "fp4"}, 0).value_or_throw().launch_constants.empty());
}

TEST(DeepseekV4Experts, KeepsLayersThatNvfp4LeavesOutAsMxfp4) {
  const std::string config =
      replaced(config_of({.format = "nvfp4"}), "\"moe_quant_algo\"", "\"ignore\":[\"layers.0.ffn.exp*\"],\"moe_quant_algo\"");
  ModelRequest request;
  const ModelLayout layout = build_deepseek_v4(request, testing::json(config)).value_or_throw();
  EXPECT_TRUE(layout.launch_constants.empty());
  EXPECT_EQ(layout.expert_rules.front().rule.dtypes.front(), Dtype::kI8);
}

// --- What is refused ---

std::string refusal(const Case& c) {
  const Result<ModelLayout> layout = build(c, 0);
  return layout.ok() ? "accepted" : layout.status().message();
}

TEST(DeepseekV4Experts, RefusesWidthsThatDoNotDivideByNameAndNumbers) {
  for (const std::string format : {"fp4", "nvfp4", "bf16"}) {
    EXPECT_NE(refusal({.I = 320, .format = format}).find("moe_intermediate_size 320 does not divide by 128"), std::string::npos) << format;
    EXPECT_NE(refusal({.H = 192, .format = format}).find("hidden_size 192 does not divide by 128"), std::string::npos) << format;
  }
  EXPECT_NE(refusal({.experts = 3, .ep = 2}).find("3 physical experts do not divide by 2"), std::string::npos);
  EXPECT_NE(refusal({.experts = 3, .redundant = 2, .ep = 2}).find("5 physical experts do not divide by 2"), std::string::npos);
}

TEST(DeepseekV4Experts, RefusesFusedSharedExpertsOfAnotherWidthWithBothNumbers) {
  const std::string padded = refusal({.I = 384, .variant = "padded+fused_shared"});
  EXPECT_NE(padded.find("384 wide"), std::string::npos) << padded;
  EXPECT_NE(padded.find("512"), std::string::npos) << padded;
  EXPECT_EQ(refusal({.I = 512, .variant = "padded+fused_shared"}), "accepted");
  const std::string two = replaced(config_of({}), "\"n_shared_experts\":1", "\"n_shared_experts\":2");
  ModelRequest request;
  request.variant = "plain+fused_shared";
  EXPECT_NE(build_deepseek_v4(request, testing::json(two)).status().message().find("256 wide"), std::string::npos);
}

TEST(DeepseekV4Experts, RefusesFormsThatTheFormatHasNot) {
  EXPECT_NE(refusal({.I = 384, .variant = "padded", .format = "bf16"}).find("padded is of fp4 experts, these are bf16"), std::string::npos);
  EXPECT_NE(refusal({.variant = "sglang", .format = "nvfp4"}).find("sglang is of fp4 experts, these are nvfp4"), std::string::npos);
  EXPECT_NE(refusal({.variant = "plain+padded"}).find("one of plain, padded and sglang"), std::string::npos);
  EXPECT_NE(refusal({.variant = "fused_shared"}).find("one of plain, padded and sglang"), std::string::npos);
  EXPECT_NE(refusal({.variant = "sglang+fused_shared"}).find("vLLM only"), std::string::npos);
  EXPECT_NE(refusal({.variant = "mega"}).find("variant mega"), std::string::npos);
}

}  // namespace
}  // namespace headrace
