#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "receiver/models/family.h"
#include "tests/oracle/deepseek_dense.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/layout_judge.h"

namespace headrace {
namespace {

using oracle::DenseBytes;
using oracle::DenseForm;
using oracle::DenseModel;
using oracle::DenseScales;

/// One layer of a model of these sizes, with everything that V4.1 (blocks of 32) or V4 (others) has in its first layer.
std::string config_of(const DenseModel& m, int experts, std::int64_t moe_intermediate) {
  const bool v41 = m.block == 32;
  const auto number = [](const std::string& key, std::int64_t value) { return ",\"" + key + "\":" + std::to_string(value); };
  std::string text = R"({"num_hidden_layers":1,"num_experts_per_tok":1,"num_hash_layers":0)";
  text += number("hidden_size", m.hidden) + number("moe_intermediate_size", moe_intermediate) + number("n_routed_experts", experts);
  text += number("n_shared_experts", m.shared / moe_intermediate) + number("num_attention_heads", m.heads) + number("head_dim", m.head_dim);
  text += number("q_lora_rank", m.q_lora) + number("o_lora_rank", m.o_lora) + number("o_groups", m.o_groups);
  text +=
      number("index_n_heads", m.indexer / 32) + number("index_head_dim", 32) + number("hc_mult", m.hc_mult) + number("vocab_size", m.vocab);
  text += R"(,"compress_ratios":[4],"kv_source_layer_ids":[0],"index_source_layer_ids":[0])";
  if (m.engram > 0) text += R"(,"engram_layer_ids":[0],"engram_max_ngram_size":2,"engram_n_heads":1)" + number("engram_head_dim", m.engram);
  const std::string block = std::to_string(m.block);
  const std::string quantization = R"("quantization_config":{"weight_block_size":[)" + block + "," + block + R"(],"expert_dtype":"fp4"})";
  if (v41) return R"({"model_type":"deepseek_v41","text_config":)" + text + "}," + quantization + "}";
  return text + R"(,"model_type":"deepseek_v4",)" + quantization + "}";
}

std::string variant_of(const DenseForm& form) {
  std::string variant = "plain";
  if (form.scales == DenseScales::kRows) variant += "+row_scales";
  if (form.scales == DenseScales::kSwizzled) variant += "+swizzled_scales";
  if (form.mega_attention) variant += "+mega_attention";
  if (form.grouped_wo_a) variant += "+grouped_wo_a";
  return variant;
}

Result<ModelLayout> build(const std::string& config, const std::string& variant, ParallelLayout parallel, std::int32_t rank) {
  ModelRequest request;
  request.family = "deepseek_v4";
  request.variant = variant;
  request.parallel = parallel;
  request.rank = rank;
  return build_deepseek_v4(request, testing::json(config));
}

/// Bytes of the checkpoint, made once.
class Checkpoint {
 public:
  void add(const ModelLayout& layout) {
    for (const NamedRule& named : layout.named) {
      if (tensors_.contains(named.name)) continue;
      const std::vector<std::byte> bytes = testing::seeded_tensor(named.name, named.rule.dtypes.front(), named.rule.shape);
      DenseBytes& copy = tensors_[named.name];
      copy.resize(bytes.size());
      std::memcpy(copy.data(), bytes.data(), bytes.size());
    }
  }
  const DenseBytes& operator()(const std::string& name) const { return tensors_.at(name); }

 private:
  std::map<std::string, DenseBytes> tensors_;
};

/// First byte that differs, for people.
std::string difference(const DenseBytes& expected, const std::vector<std::byte>& actual) {
  if (expected.size() != actual.size()) return std::to_string(actual.size()) + " bytes, expected " + std::to_string(expected.size());
  if (std::memcmp(expected.data(), actual.data(), actual.size()) == 0) return {};
  std::size_t i = 0;
  while (expected[i] == static_cast<std::uint8_t>(actual[i])) ++i;
  return "byte " + std::to_string(i) + " of " + std::to_string(actual.size());
}

/// Which elements of the tensor any rank has taken; each may be taken by one of them.
class Taken {
 public:
  void add(const NamedRule& named) {
    std::vector<bool>& taken = taken_[named.name];
    const Shape& shape = named.rule.shape;
    const std::int64_t columns = shape.size() == 1 ? 1 : shape[1];
    taken.resize(static_cast<std::size_t>(shape[0] * columns));
    for (const Placement& placement : named.rule.placements) {
      const Box& box = placement.box;
      for (std::int64_t r = box.lo[0]; r < box.hi[0]; ++r) {
        for (std::int64_t c = shape.size() == 1 ? 0 : box.lo[1]; c < (shape.size() == 1 ? 1 : box.hi[1]); ++c) {
          const auto index = static_cast<std::size_t>(r * columns + c);
          EXPECT_FALSE(taken.at(index)) << named.name << " element " << r << "," << c << " is on two ranks";
          taken.at(index) = true;
        }
      }
    }
  }
  void expect_all(const std::string& name) const {
    const std::vector<bool>& taken = taken_.at(name);
    EXPECT_EQ(std::count(taken.begin(), taken.end(), true), std::ssize(taken)) << name;
  }

 private:
  std::map<std::string, std::vector<bool>> taken_;
};

const std::vector<std::string> kDivided{"embed.weight",
                                        "head.weight",
                                        "layers.0.attn.wq_b.weight",
                                        "layers.0.attn.wq_b.scale",
                                        "layers.0.attn.wo_a.weight",
                                        "layers.0.attn.wo_a.scale",
                                        "layers.0.attn.wo_b.weight",
                                        "layers.0.attn.wo_b.scale",
                                        "layers.0.attn.attn_sink",
                                        "layers.0.ffn.shared_experts.w1.weight",
                                        "layers.0.ffn.shared_experts.w1.scale",
                                        "layers.0.ffn.shared_experts.w2.weight",
                                        "layers.0.ffn.shared_experts.w2.scale",
                                        "layers.0.ffn.shared_experts.w3.weight",
                                        "layers.0.ffn.shared_experts.w3.scale"};

/// Compares every dense storage of one rank. What no form touches holds its tensor as it is.
void expect_rank(const ModelLayout& layout, const DenseModel& model, const DenseForm& form, const Checkpoint& checkpoint) {
  const testing::JudgedRank judged = testing::judge_layout(layout);
  for (const std::string& defect : judged.defects) ADD_FAILURE() << defect;
  std::map<std::string, DenseBytes> expected =
      dense_storages(model, form, 0, model.block == 32 ? "weight_scale" : "weight_scale_inv", checkpoint);
  for (const auto& [name, bytes] : expected) {
    const auto found = judged.storages.find(name);
    ASSERT_NE(found, judged.storages.end()) << name;
    EXPECT_EQ(difference(bytes, found->second), "") << name;
  }
  for (const NamedRule& named : layout.named) {
    const StorageSpec& spec = layout.storages[named.rule.placements.empty() ? 0 : named.rule.placements.front().storage];
    if (expected.contains(spec.name) || !named.rule.shard.empty()) continue;
    EXPECT_EQ(difference(checkpoint(named.name), judged.storages.at(spec.name)), "") << named.name;
  }
}

/// All ranks of an engine, `tp` of which divide the dense tensors.
void expect_engine(const DenseModel& model, DenseForm form, std::int32_t ep, int experts) {
  const ParallelLayout parallel{.tp = static_cast<std::int32_t>(form.tp), .ep = ep};
  SCOPED_TRACE(variant_of(form) + " " + parallel.to_string());
  const std::string config = config_of(model, experts, 128);
  Checkpoint checkpoint;
  Taken taken;
  for (std::int32_t rank = 0; rank < parallel.ranks(); ++rank) {
    const Result<ModelLayout> layout = build(config, variant_of(form), parallel, rank);
    ASSERT_TRUE(layout.ok()) << layout.status().to_string();
    checkpoint.add(layout.value());
    form.rank = rank % form.tp;
    expect_rank(layout.value(), model, form, checkpoint);
    if (rank >= form.tp) continue;
    for (const NamedRule& named : layout.value().named) {
      if (std::find(kDivided.begin(), kDivided.end(), named.name) != kDivided.end()) taken.add(named);
    }
  }
  for (const std::string& name : kDivided) taken.expect_all(name);
}

/// Small, with every count different, and no size that a tile, a word or a rank divides by chance.
DenseModel small_v41() {
  return {.hidden = 256,
          .shared = 384,
          .heads = 16,
          .head_dim = 64,
          .q_lora = 96,
          .o_lora = 32,
          .o_groups = 8,
          .vocab = 83,
          .block = 32,
          .indexer = 64,
          .engram = 160,
          .hc_mult = 2};
}
DenseModel small_v4() {
  DenseModel model = small_v41();
  model.block = 128;
  model.heads = 8;
  model.head_dim = 128;
  model.q_lora = 256;
  model.o_lora = 128;
  model.indexer = 128;
  model.engram = 0;
  return model;
}

TEST(DeepseekTensorParallel, GivesEachRankItsPartOfV41) {
  for (const std::int64_t tp : {1, 2, 4, 8}) expect_engine(small_v41(), {.tp = tp}, 1, 2);
}

TEST(DeepseekTensorParallel, GivesEachRankItsPartOfV4) {
  for (const std::int64_t tp : {1, 2, 4, 8}) expect_engine(small_v4(), {.tp = tp}, 1, 2);
}

TEST(DeepseekTensorParallel, PadsSharedExpertsUntilTheyDivide) {
  // 5 and 7 blocks over 8 ranks: the last ones have padding only.
  for (const std::int64_t shared : {128, 256, 640}) {
    DenseModel model = small_v41();
    model.shared = shared;
    for (const DenseScales scales : {DenseScales::kBlocks, DenseScales::kRows, DenseScales::kSwizzled}) {
      expect_engine(model, {.tp = 8, .scales = scales}, 1, 1);
    }
  }
}

TEST(DeepseekTensorParallel, GoesTogetherWithExpertParallelism) {
  expect_engine(small_v41(), {.tp = 4}, 4, 8);
  expect_engine(small_v41(), {.tp = 2}, 8, 8);
  expect_engine(small_v4(), {.tp = 2}, 4, 8);
  expect_engine(small_v41(), {.tp = 2, .scales = DenseScales::kSwizzled, .mega_attention = false}, 4, 4);
}

TEST(DeepseekTensorParallel, KeepsScalesByRowAndInTiles) {
  for (const DenseScales scales : {DenseScales::kRows, DenseScales::kSwizzled}) {
    for (const bool grouped : {false, true}) {
      for (const std::int64_t tp : {1, 2, 4, 8}) {
        DenseModel model = small_v41();
        model.heads = 32;  // wo_a has columns for whole words of scales
        expect_engine(model, {.tp = tp, .scales = scales, .grouped_wo_a = grouped}, 1, 1);
      }
    }
  }
}

// --- What is refused ---

std::string refusal(const DenseModel& model, const std::string& variant, ParallelLayout parallel) {
  const Result<ModelLayout> layout = build(config_of(model, 8, 128), variant, parallel, 0);
  return layout.ok() ? "nothing" : std::string(layout.status().message());
}

TEST(DeepseekTensorParallel, RefusesWhatDoesNotDivideByNameAndNumbers) {
  const auto expect = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nexpected: " << part;
  };
  DenseModel model = small_v41();
  expect(refusal(model, "plain", {.tp = 16, .ep = 1}), "o_groups 8 does not divide by 16: rest 8");
  expect(refusal(model, "plain", {.tp = 3, .ep = 1}), "num_attention_heads 16 does not divide by 3: rest 1");
  expect(refusal(model, "plain", {.tp = 4, .ep = 2}), "2 expert ranks are no multiple of 4 ranks");
  model.o_groups = 4;
  model.o_lora = 40;
  expect(refusal(model, "plain", {.tp = 4, .ep = 1}), "layers.0.attn.wo_a rows on one of 4 ranks 40 does not divide by 32: rest 8");
  model = small_v41();
  model.head_dim = 16;
  expect(refusal(model, "plain", {.tp = 16, .ep = 1}), "o_groups");
  model.heads = 8;
  model.o_groups = 4;
  expect(refusal(model, "plain", {.tp = 8, .ep = 1}), "o_groups 4 does not divide by 8: rest 4");
  model = small_v41();
  model.heads = 144;
  expect(refusal(model, "plain", {.tp = 1, .ep = 1}), "144 heads on one of 1 ranks, the kernels take 128");
}

TEST(MegaAttention, RefusesWhatItsTurnsDoNotDivide) {
  const auto expect = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nexpected: " << part;
  };
  for (const std::string word : {"row_scales", "swizzled_scales", "mega_attention", "grouped_wo_a"}) {
    expect(refusal(small_v4(), "plain+" + word, {.tp = 1, .ep = 1}),
           word + " needs scales of 32 rows and columns, the model has them for 128");
  }
  expect(refusal(small_v41(), "plain+row_scales+swizzled_scales", {.tp = 1, .ep = 1}), "row_scales and swizzled_scales exclude each other");
  expect(refusal(small_v41(), "plain+mega_attention+swizzled_scales", {.tp = 1, .ep = 1}),
         "layers.0.attn.wq_b blocks of columns 3 does not divide by 4: rest 3");
  DenseModel model = small_v41();
  model.heads = 20;
  expect(refusal(model, "plain+mega_attention", {.tp = 1, .ep = 1}), "num_attention_heads 20 does not divide by 8: rest 4");
  model = small_v41();
  model.heads = 8;
  model.head_dim = 32;
  expect(refusal(model, "plain+grouped_wo_a", {.tp = 1, .ep = 1}), "layers.0.attn.wo_a blocks of columns 1 does not divide by 4: rest 1");
}

TEST(MegaAttention, TakesFeaturesOfHeadsInTurnsOnEveryRank) {
  for (const DenseScales scales : {DenseScales::kBlocks, DenseScales::kRows, DenseScales::kSwizzled}) {
    for (const bool grouped : {false, true}) {
      for (const std::int64_t tp : {1, 2, 4, 8}) {
        DenseModel model = small_v41();
        model.q_lora = 128;  // the permuted matrices fill whole tiles
        model.heads = 32;
        model.o_lora = 128;
        expect_engine(model, {.tp = tp, .scales = scales, .mega_attention = true, .grouped_wo_a = grouped}, 1, 1);
      }
    }
  }
}

TEST(MegaAttention, PermutesWhateverSizesDivide) {
  for (const std::int64_t heads : {8, 16, 24, 64}) {
    for (const std::int64_t head_dim : {32, 64, 96}) {
      for (const std::int64_t tp : {1, 4}) {
        DenseModel model = small_v41();
        model.heads = heads;
        model.head_dim = head_dim;
        model.q_lora = 32;
        model.hidden = 128;
        expect_engine(model, {.tp = tp, .mega_attention = true}, 1, 1);
      }
    }
  }
}

// --- True sizes ---

/// One rank of an engine of 8, at the published sizes of one layer. The vocabulary is short and no multiple of 8.
void expect_true_sizes(const DenseModel& model, DenseForm form, std::int64_t moe_intermediate) {
  const Result<ModelLayout> layout = build(config_of(model, 8, moe_intermediate), variant_of(form),
                                           {.tp = static_cast<std::int32_t>(form.tp), .ep = 8}, static_cast<std::int32_t>(form.rank));
  ASSERT_TRUE(layout.ok()) << layout.status().to_string();
  Checkpoint checkpoint;
  checkpoint.add(layout.value());
  expect_rank(layout.value(), model, form, checkpoint);
}

DenseModel true_v41() {
  return {.hidden = 5120,
          .shared = 2304,
          .heads = 64,
          .head_dim = 512,
          .q_lora = 1280,
          .o_lora = 1024,
          .o_groups = 8,
          .vocab = 1001,
          .block = 32,
          .indexer = 4096,
          .engram = 6144,
          .hc_mult = 4};
}

TEST(DeepseekTrueSizes, OfV41WithEveryFormOfItsKernels) {
  DenseForm form{.tp = 8, .rank = 3, .scales = DenseScales::kSwizzled, .mega_attention = true, .grouped_wo_a = true};
  expect_true_sizes(true_v41(), form, 2304);
}

TEST(DeepseekTrueSizes, OfV4Flash) {
  expect_true_sizes({.hidden = 4096,
                     .shared = 2048,
                     .heads = 64,
                     .head_dim = 512,
                     .q_lora = 1024,
                     .o_lora = 1024,
                     .o_groups = 8,
                     .vocab = 1001,
                     .block = 128,
                     .indexer = 8192,
                     .engram = 0,
                     .hc_mult = 4},
                    {.tp = 4, .rank = 2}, 2048);
}

TEST(DeepseekTrueSizes, OfV4Pro) {
  expect_true_sizes({.hidden = 7168,
                     .shared = 3072,
                     .heads = 128,
                     .head_dim = 512,
                     .q_lora = 1536,
                     .o_lora = 1024,
                     .o_groups = 16,
                     .vocab = 1001,
                     .block = 128,
                     .indexer = 8192,
                     .engram = 0,
                     .hc_mult = 4},
                    {.tp = 8, .rank = 7}, 3072);
}

// --- Derived parameters ---

TEST(DeepseekDerived, KeepsThePlaceOfTheFirstLayersSumOverStreams) {
  const DenseModel model = small_v41();
  const std::string name = "model.layers.0.hc_attn_fn_broadcast";
  const Result<ModelLayout> layout = build(config_of(model, 2, 128), "plain+mhc_broadcast", {.tp = 2, .ep = 1}, 1);
  ASSERT_TRUE(layout.ok()) << layout.status().to_string();
  const auto& storages = layout.value().storages;
  const auto found = std::find_if(storages.begin(), storages.end(), [&](const StorageSpec& spec) { return spec.name == name; });
  ASSERT_NE(found, storages.end());
  EXPECT_EQ(found->shape, (Shape{(2 + model.hc_mult) * model.hc_mult, model.hidden}));
  EXPECT_EQ(found->dtype, Dtype::kF32);
  EXPECT_TRUE(found->optional);
  EXPECT_TRUE(testing::judge_layout(layout.value()).defects.empty()) << "nothing writes it, and that is no hole";
  const Result<ModelLayout> plain = build(config_of(model, 2, 128), "plain", {.tp = 2, .ep = 1}, 1);
  EXPECT_EQ(plain.value().storages.size() + 1, storages.size());
}

}  // namespace
}  // namespace headrace
