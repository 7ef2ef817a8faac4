#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>

#include "receiver/weight_index.h"
#include "tests/oracle/fused_experts.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/expected_tensors.h"
#include "tests/receiver/family_matrix.h"

namespace headrace::testing {
namespace {

struct Trail {
  std::string variant = "plain";
  ParallelLayout parallel{};
  std::int32_t rank = 0;
  std::int32_t redundant = 0;
  std::optional<Dtype> dtype{};
};

Result<ModelLayout> build(const SmallCheckpoint& checkpoint, const Trail& trail) {
  ModelRequest request;
  request.family = "fused_moe";
  request.variant = trail.variant;
  request.parallel = trail.parallel;
  request.rank = trail.rank;
  request.redundant_experts = trail.redundant;
  request.dtype = trail.dtype;
  const JsonValue config = json(checkpoint.config);
  return build_model(request, &config, checkpoint.tensors);
}

bool has_word(const std::string& variant, const std::string& word) {
  return ("+" + variant + "+").find("+" + word + "+") != std::string::npos;
}

/// What of the parameters of one layer's experts the formulas give.
class ExpertOracle {
 public:
  ExpertOracle(const MoeSizes& sizes, const Trail& trail) : s_(sizes), trail_(trail) {
    share_.tp = trail.parallel.ep > 1 ? 1 : trail.parallel.tp;
    share_.rank = trail.parallel.ep > 1 ? 0 : trail.rank;
    share_.padded = sizes.intermediate / share_.tp;
    while (has_word(trail.variant, "padded") && share_.padded % 256 != 0) ++share_.padded;
    const std::int64_t ep_rank = trail.parallel.ep > 1 ? trail.rank : 0;
    share_.slots = has_word(trail.variant, "round_robin") ? oracle::round_robin_experts(s_.experts, trail.parallel.ep, ep_rank)
                                                          : oracle::linear_experts(s_.experts, trail.parallel.ep, ep_rank);
  }

  /// Entries of `block` intermediate elements and `others` along the hidden size, of gate and up (or of down).
  Bytes matrix(const std::string& leaf, Dtype dtype, bool down, std::int64_t block, bool scale, std::int64_t others) const {
    const std::int64_t count = (s_.intermediate + block - 1) / block;
    const Shape shape = down ? Shape{others, count} : Shape{count, others};
    oracle::ExpertShare share = share_;
    share.rows = down == has_word(trail_.variant, "transposed");
    share.halves = down ? 1 : 2;
    return oracle::fused_experts({s_.intermediate, block, scale, others, dtype_bytes(dtype), !down}, share,
                                 [&](std::int64_t expert, std::int64_t half) { return tensor(expert, half, down, leaf, dtype, shape); });
  }
  /// [slots, 2] or [slots] of single values.
  Bytes values(const std::string& leaf, bool down, bool all_experts) const {
    Bytes result;
    for (const std::int64_t expert : all_experts ? oracle::linear_experts(s_.experts, 1, 0) : share_.slots) {
      for (std::int64_t half = 0; half < (down ? 1 : 2); ++half) {
        const Bytes value = tensor(expert, half, down, leaf, Dtype::kF32, {});
        result.insert(result.end(), value.begin(), value.end());
      }
    }
    return result;
  }

 private:
  Bytes tensor(std::int64_t expert, std::int64_t half, bool down, const std::string& leaf, Dtype dtype, const Shape& shape) const {
    const bool mixtral = s_.model_type == "mixtral";
    const std::string projection = mixtral ? (down        ? "w2"
                                              : half == 0 ? "w1"
                                                          : "w3")
                                           : (down        ? "down_proj"
                                              : half == 0 ? "gate_proj"
                                                          : "up_proj");
    const std::string name = std::string("model.layers.0.") + (mixtral ? "block_sparse_moe" : "mlp") + ".experts." +
                             std::to_string(expert) + "." + projection + "." + leaf;
    return plain_bytes(seeded_tensor(name, dtype, shape));
  }

  const MoeSizes& s_;
  const Trail& trail_;
  oracle::ExpertShare share_;
};

/// Parameters of the first layer's experts by what follows "experts.".
std::map<std::string, Bytes> expected_experts(const MoeSizes& s, const Trail& trail) {
  const ExpertOracle x(s, trail);
  const auto up = [&](std::int64_t n) { return (n + s.block - 1) / s.block; };
  std::map<std::string, Bytes> all;
  for (const bool down : {false, true}) {
    const std::string p = down ? "w2_" : "w13_";
    if (s.form == "bf16") all[p + "weight"] = x.matrix("weight", Dtype::kBF16, down, 1, false, s.hidden);
    if (s.form == "fp8") {
      all[p + "weight"] = x.matrix("weight", Dtype::kF8E4M3, down, 1, false, s.hidden);
      all[p + "weight_scale_inv"] = x.matrix("weight_scale_inv", Dtype::kF32, down, s.block, true, up(s.hidden));
    }
    if (s.form == "mxfp4") {
      all[p + "weight"] = x.matrix("weight", Dtype::kU8, down, down ? 2 : 1, false, down ? s.hidden : s.hidden / 2);
      all[p + "weight_scale"] = x.matrix("weight_scale", Dtype::kU8, down, down ? 32 : 1, true, down ? s.hidden : s.hidden / 32);
    }
    if (s.form == "nvfp4") {
      all[p + "weight"] = x.matrix("weight", Dtype::kU8, down, down ? 2 : 1, false, down ? s.hidden : s.hidden / 2);
      all[p + "weight_scale"] = x.matrix("weight_scale", Dtype::kF8E4M3, down, down ? 16 : 1, true, down ? s.hidden : s.hidden / 16);
      all[p + "weight_scale_2"] = x.values("weight_scale_2", down, false);
      all[p + "input_scale"] = x.values("input_scale", down, has_word(trail.variant, "global_scales"));
    }
  }
  return all;
}

void expect_experts(const MoeSizes& sizes, const Trail& trail) {
  const std::string what = sizes.model_type + " " + sizes.form + " H " + std::to_string(sizes.hidden) + " I " +
                           std::to_string(sizes.intermediate) + " E " + std::to_string(sizes.experts) + " " + trail.variant + " " +
                           trail.parallel.to_string() + " rank " + std::to_string(trail.rank);
  const auto layout = build(moe_checkpoint(sizes), trail);
  ASSERT_TRUE(layout.ok()) << what << ": " << layout.status().to_string();
  const JudgedRank judged = judge_layout(layout.value());
  EXPECT_EQ(judged.defects, std::vector<std::string>{}) << what;
  const std::string prefix = sizes.model_type == "mixtral" ? "model.layers.0.block_sparse_moe.experts." : "model.layers.0.mlp.experts.";
  std::size_t experts = 0;
  for (const auto& [name, bytes] : judged.storages) experts += name.starts_with(prefix) ? 1U : 0U;
  const auto expected = expected_experts(sizes, trail);
  EXPECT_EQ(experts, expected.size()) << what;
  for (const auto& [name, bytes] : expected) {
    const auto found = judged.storages.find(prefix + name);
    ASSERT_NE(found, judged.storages.end()) << what << " " << name;
    EXPECT_TRUE(plain_bytes(found->second) == bytes) << what << " " << name;
  }
}

void expect_on_every_rank(const MoeSizes& sizes, const std::string& variant, const ParallelLayout& parallel) {
  for (std::int32_t rank = 0; rank < parallel.ranks(); ++rank) expect_experts(sizes, {variant, parallel, rank});
}

TEST(FusedMoe, PlacesExpertBytesAsTheFormulasSay) {
  for (const std::string type : {"qwen3_moe", "mixtral"}) {
    for (const std::int64_t intermediate : {4, 8, 12}) {
      for (const std::int32_t tp : {1, 2, 4}) {
        for (const std::string variant : {"plain", "transposed", "padded", "transposed+padded"}) {
          expect_on_every_rank({.model_type = type, .experts = 3, .intermediate = intermediate}, variant, {.tp = tp, .ep = 1});
        }
      }
    }
  }
}

TEST(FusedMoe, DividesExpertsOverRanksInBothOrders) {
  for (const std::int64_t experts : {4, 5, 7}) {
    for (const std::int32_t ep : {1, 2, 3, 4}) {
      for (const std::string variant : {"plain", "round_robin", "round_robin+transposed"}) {
        expect_on_every_rank({.experts = experts, .intermediate = 4}, variant, {.tp = 1, .ep = ep});
      }
    }
  }
  expect_on_every_rank({.experts = 6, .intermediate = 4}, "plain", {.tp = 2, .ep = 2});
  expect_on_every_rank({.experts = 6, .intermediate = 4}, "round_robin", {.tp = 2, .ep = 4});
}

TEST(FusedMoe, KeepsFloatsInTheDtypeThatIsAskedForAndScalesAsTheyAre) {
  const std::vector<Dtype> others{Dtype::kF32, Dtype::kBF16};
  for (const char* form : {"bf16", "joint", "fp8"}) {
    const bool quantised = std::string(form) == "fp8";
    const MoeSizes sizes{.form = form};
    const ModelLayout layout = build(moe_checkpoint(sizes), {.parallel = {.tp = 2}, .dtype = Dtype::kF16}).value_or_throw();
    std::size_t weights = 0;
    const auto expect_rule = [&](const std::string& name, const TensorRule& rule) {
      const bool expert = name.find("experts.") != std::string::npos;
      const bool kept = quantised && expert;
      EXPECT_EQ(rule.dtypes.front() == Dtype::kF16, !kept) << form << " " << name;
      EXPECT_EQ(rule.casts, kept ? std::vector<Dtype>{} : others) << form << " " << name;
      const Dtype stored = layout.storages.at(rule.placements.at(0).storage).dtype;
      EXPECT_EQ(stored, rule.dtypes.front()) << form << " " << name;
      if (expert) ++weights;
    };
    for (const ExpertRule& expert : layout.expert_rules) expect_rule(expert.prefix + expert.suffix, expert.rule);
    for (const NamedRule& named : layout.named) expect_rule(named.name, named.rule);
    EXPECT_GE(weights, 2U) << form;
  }
}

TEST(FusedMoe, RepeatsBlockScalesWhereARankEndsInsideABlock) {
  for (const std::int64_t intermediate : {8, 12, 24, 36, 40}) {
    for (const std::int32_t tp : {1, 2, 4}) {
      for (const std::string variant : {"plain", "transposed", "padded"}) {
        expect_on_every_rank({.intermediate = intermediate, .form = "fp8", .block = 8}, variant, {.tp = tp, .ep = 1});
      }
    }
  }
  expect_on_every_rank({.hidden = 20, .intermediate = 9, .form = "fp8", .block = 8}, "plain", {.tp = 1, .ep = 2});
}

TEST(FusedMoe, PlacesPackedWeightsAndTheirScales) {
  for (const std::string form : {"mxfp4", "nvfp4"}) {
    for (const std::int64_t intermediate : {32, 64, 96}) {
      for (const std::int32_t tp : {1, 2, 4}) {
        for (const std::string variant : {"plain", "padded", "transposed"}) {
          expect_on_every_rank({.experts = 2, .hidden = 64, .intermediate = intermediate, .form = form}, variant, {.tp = tp, .ep = 1});
        }
      }
      expect_on_every_rank({.experts = 5, .hidden = 64, .intermediate = intermediate, .form = form}, "plain", {.tp = 1, .ep = 2});
      expect_on_every_rank({.experts = 5, .hidden = 64, .intermediate = intermediate, .form = form}, "global_scales", {.tp = 1, .ep = 2});
    }
  }
}

TEST(FusedMoe, PlacesATrueLayerOfQwen3) {
  expect_experts({.experts = 128, .hidden = 2048, .intermediate = 768, .dense = false}, {"plain", {.tp = 1, .ep = 8}, 3});
  expect_experts({.experts = 8, .hidden = 2048, .intermediate = 768, .form = "fp8", .block = 128, .dense = false},
                 {"plain", {.tp = 4, .ep = 1}, 3});
}

TEST(FusedMoe, PlacesATrueLayerOfMixtral) {
  expect_experts({.model_type = "mixtral", .experts = 8, .hidden = 4096, .intermediate = 14336, .dense = false},
                 {"plain", {.tp = 1, .ep = 8}, 5});
}

/// One parameter of a layer whose checkpoint has one tensor for the 5 experts of width 8 (hidden size 6).
Bytes expected_joint(const std::string& form, const std::string& variant, const ParallelLayout& parallel, std::int32_t rank, bool down) {
  const std::int64_t tp = parallel.ep > 1 ? 1 : parallel.tp;
  oracle::ExpertShare share;
  share.tp = tp;
  share.rank = parallel.ep > 1 ? 0 : rank;
  share.padded = variant == "padded" ? 256 : 8 / tp;
  share.slots = oracle::linear_experts(5, parallel.ep, parallel.ep > 1 ? rank : 0);
  share.rows = down == (variant == "transposed");
  share.halves = down ? 1 : 2;
  const std::int64_t wide = down ? 8 : 16;
  const bool by_rows = down == (form == "joint_turned");
  const std::string name = std::string("model.layers.0.mlp.experts.") + (down ? "down_proj" : "gate_up_proj");
  const Bytes whole = plain_bytes(seeded_tensor(name, Dtype::kBF16, by_rows ? Shape{5, wide, 6} : Shape{5, 6, wide}));
  return oracle::fused_experts({8, 1, false, 6, 2, by_rows}, share, [&](std::int64_t e, std::int64_t half) {
    const auto bytes = static_cast<std::size_t>(wide * 12);
    const auto expert = std::span(whole).subspan(static_cast<std::size_t>(e) * bytes, bytes);
    std::vector<std::int64_t> numbers;
    for (std::int64_t i = 0; i < 8; ++i) numbers.push_back(half * 8 + i);
    return by_rows ? oracle::gather_rows(expert, 12, numbers) : oracle::gather_columns(expert, wide * 2, 2, numbers);
  });
}

TEST(FusedMoe, TakesOneTensorForAllExperts) {
  for (const std::string form : {"joint", "joint_turned"}) {
    for (const std::string variant : {"plain", "transposed", "padded"}) {
      for (const ParallelLayout parallel : {ParallelLayout{1, 1}, ParallelLayout{2, 1}, ParallelLayout{1, 3}}) {
        for (std::int32_t rank = 0; rank < parallel.ranks(); ++rank) {
          const SmallCheckpoint checkpoint = moe_checkpoint({.experts = 5, .hidden = 6, .intermediate = 8, .form = form, .dense = false});
          const ModelLayout layout = build(checkpoint, {variant, parallel, rank}).value_or_throw();
          const JudgedRank judged = judge_layout(layout);
          EXPECT_EQ(judged.defects, std::vector<std::string>{});
          EXPECT_TRUE(layout.experts.empty());
          for (const bool down : {false, true}) {
            const std::string param = std::string("model.layers.0.mlp.experts.") + (down ? "w2_weight" : "w13_weight");
            EXPECT_TRUE(plain_bytes(judged.storages.at(param)) == expected_joint(form, variant, parallel, rank, down))
                << form << " " << variant << " " << parallel.to_string() << " rank " << rank << " " << param;
          }
        }
      }
    }
  }
}

TEST(FusedMoe, HoldsRedundantExpertsInTheSlotsOfTheInitialMap) {
  const ModelLayout layout = build(moe_checkpoint({}), {"plain", {.tp = 1, .ep = 3}, 2, 2}).value_or_throw();
  EXPECT_EQ(judge_layout(layout).defects, std::vector<std::string>{});
  ASSERT_EQ(layout.experts.size(), 1U);
  EXPECT_EQ(layout.experts[0].slots_of(0).size() + layout.experts[0].slots_of(1).size(), 2U) << "physical 4 and 5 hold experts 0 and 1";
}

TEST(FusedMoe, KnowsTheNamesOfItsExperts) {
  const WeightIndex index(build(moe_checkpoint({}), {"plain", {.tp = 1, .ep = 2}, 1}).value_or_throw());
  EXPECT_EQ(index.resolve("model.layers.0.mlp.experts.3.up_proj.weight").kind, Resolution::Kind::kPlaced);
  EXPECT_EQ(index.resolve("model.layers.0.mlp.experts.0.up_proj.weight").kind, Resolution::Kind::kNotLocal);
  EXPECT_EQ(index.resolve("model.layers.0.mlp.experts.4.up_proj.weight").kind, Resolution::Kind::kUnknown);
  EXPECT_EQ(index.resolve("model.layers.1.mlp.experts.0.up_proj.weight").kind, Resolution::Kind::kUnknown);
  EXPECT_EQ(index.resolve("model.layers.0.mlp.gate.weight").kind, Resolution::Kind::kPlaced);
}

void expect_refused(const SmallCheckpoint& checkpoint, const Trail& trail, const std::string& text) {
  const auto layout = build(checkpoint, trail);
  ASSERT_FALSE(layout.ok()) << text;
  EXPECT_NE(layout.status().message().find(text), std::string::npos) << layout.status().message();
}

TEST(FusedMoe, RefusesWhatDoesNotDivide) {
  expect_refused(moe_checkpoint({.intermediate = 6}), {"plain", {.tp = 4, .ep = 1}},
                 "moe_intermediate_size 6 does not divide by 4: rest 2");
  expect_refused(moe_checkpoint({.hidden = 64, .intermediate = 66, .form = "mxfp4"}), {"plain", {.tp = 2, .ep = 1}},
                 "33 does not divide by 2");
  expect_refused(moe_checkpoint({}), {"plain", {.tp = 4, .ep = 2}}, "2 is no multiple of 4");
  expect_refused(moe_checkpoint({.experts = 2}), {"plain", {.tp = 1, .ep = 4}, 3}, "no expert of 2 for rank 3 of 4");
  expect_refused(moe_checkpoint({}), {"plain", {.tp = 1, .ep = 4}, 0, 2}, "6 physical experts do not divide by 4");
  expect_refused(moe_checkpoint({}), {"round_robin", {.tp = 1, .ep = 3}, 0, 2}, "2 redundant experts placed round_robin");
  expect_refused(moe_checkpoint({.form = "joint"}), {"round_robin", {.tp = 1, .ep = 2}}, "consecutive");
  expect_refused(moe_checkpoint({}), {"plain+padded", {}}, "plain stands alone");
  expect_refused(moe_checkpoint({}), {"megamoe", {}}, "variant megamoe of fused_moe: the family has plain, round_robin");
}

TEST(FusedMoe, TakesNamesThatItDoesNotKnowAsTheyAreWhereItIsOpen) {
  SmallCheckpoint checkpoint = moe_checkpoint({});
  CheckpointTensor odd = checkpoint.tensors.front();
  odd.name = "model.layers.0.enorm.weight";
  odd.shape = {16};
  checkpoint.tensors.push_back(odd);
  expect_refused(checkpoint, {}, "model.layers.0.enorm.weight: no rule for this name");
  const ModelLayout plain = build(moe_checkpoint({}), {}).value_or_throw();
  const ModelLayout open = build(checkpoint, {"plain+open", {}}).value_or_throw();
  ASSERT_EQ(open.storages.size(), plain.storages.size() + 1);
  EXPECT_TRUE(std::any_of(open.storages.begin(), open.storages.end(),
                          [](const StorageSpec& spec) { return spec.name == "model.layers.0.enorm.weight" && spec.shape == Shape{16}; }));
  EXPECT_EQ(judge_layout(open).defects, std::vector<std::string>{});
}

TEST(FusedMoe, RefusesExpertsThatAreNotAllThereOrNotAlike) {
  SmallCheckpoint checkpoint = moe_checkpoint({});
  std::erase_if(checkpoint.tensors, [](const CheckpointTensor& t) { return t.name.ends_with("experts.2.up_proj.weight"); });
  expect_refused(checkpoint, {}, "experts.*.up_proj.weight: expert 2 of 4 is missing");
  checkpoint = moe_checkpoint({});
  for (CheckpointTensor& t : checkpoint.tensors)
    if (t.name.ends_with("experts.3.down_proj.weight")) t.shape = {8, 16};
  expect_refused(checkpoint, {}, "experts.3.down_proj.weight: BF16 [8,16], model.layers.0.mlp.experts.0.down_proj.weight is BF16 [16,8]");
  checkpoint = moe_checkpoint({});
  std::erase_if(checkpoint.tensors, [](const CheckpointTensor& t) { return t.name.ends_with(".up_proj.weight"); });
  expect_refused(checkpoint, {}, "gate, up and down projection do not all have it");
  checkpoint = moe_checkpoint({.intermediate = 12});
  checkpoint.config = moe_checkpoint({.intermediate = 8}).config;
  expect_refused(checkpoint, {}, "shape [12,16], config.json has intermediate size 8");
  checkpoint = moe_checkpoint({.experts = 5});
  checkpoint.config = moe_checkpoint({}).config;
  expect_refused(checkpoint, {}, "config.json has 4 experts");
  checkpoint.config.replace(checkpoint.config.find("experts\":4"), 10, "experts\":16777216");
  expect_refused(checkpoint, {}, "16777216 experts, a layer has at most 262144");
  checkpoint = moe_checkpoint({.layers = 2, .dense = false});
  checkpoint.config = moe_checkpoint({}).config;
  expect_refused(checkpoint, {}, "model.layers.1.mlp.experts.0.gate_proj.weight: config.json has 1 layers");
  checkpoint = moe_checkpoint({});
  std::erase_if(checkpoint.tensors, [](const CheckpointTensor& t) { return t.name.find(".experts.") != std::string::npos; });
  expect_refused(checkpoint, {}, "no tensor of an expert");
}

}  // namespace
}  // namespace headrace::testing
