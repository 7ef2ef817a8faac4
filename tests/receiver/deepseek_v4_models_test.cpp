#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "receiver/host_storage.h"
#include "receiver/models/family.h"
#include "receiver/weight_index.h"
#include "tests/oracle/deepseek_experts.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/layout_judge.h"
#include "tests/receiver/vllm_scan_reference.h"

/// The models beside the text model: the draft and the image parts, and the names that each engine's loaders give them.
namespace headrace {
namespace {

using testing::LoaderAnswer;
using testing::VllmLoader;

#ifdef HEADRACE_SANITIZED
constexpr std::size_t kEvery = 97;
#else
constexpr std::size_t kEvery = 3;  // the reference scans over a thousand entries a name
#endif

using Scopes = std::vector<std::string>;

Result<ModelLayout> build(const std::string& config, const Scopes& scopes, const std::string& variant = "plain", std::int32_t ep = 1,
                          std::int32_t rank = 0) {
  ModelRequest request;
  request.variant = variant;
  request.scopes = scopes;
  request.parallel.ep = ep;
  request.rank = rank;
  return build_deepseek_v4(request, testing::json(config));
}

std::set<std::string> storages_of(const ModelLayout& layout, const std::string& owner) {
  std::set<std::string> names;
  for (const StorageSpec& storage : layout.storages) {
    if (storage.owners == Scopes{owner} && storage.alias_of.empty()) names.insert(storage.name);
  }
  return names;
}

std::set<std::string> as_set(const std::vector<std::string>& list, const std::string& root = "") {
  std::set<std::string> names;
  for (const std::string& name : list) names.insert(root + name);
  return names;
}

/// V4.1 with all its models, a rank of four.
class AllOfV41 : public ::testing::Test {
 protected:
  static constexpr std::int32_t kRank = 1;
  static void SetUpTestSuite() {
    layout_ = new ModelLayout(build(testing::v41_full_config(), {"target", "draft", "vision"}, "plain", 4, kRank).value_or_throw());
    index_ = new WeightIndex(*layout_);
  }
  static void TearDownTestSuite() {
    delete index_;
    delete layout_;
  }
  static ModelLayout* layout_;
  static WeightIndex* index_;
};
ModelLayout* AllOfV41::layout_ = nullptr;
WeightIndex* AllOfV41::index_ = nullptr;

TEST_F(AllOfV41, HasARuleForEveryTensorOfTheCheckpointButTheTables) {
  std::map<std::string, const TensorRule*> rules;
  for (const NamedRule& rule : layout_->named) EXPECT_TRUE(rules.emplace(rule.name, &rule.rule).second) << rule.name;
  for (const ExpertRule& rule : layout_->expert_rules) {
    const std::int32_t experts = layout_->experts.at(rule.map).experts();
    for (int e = 0; e < experts; ++e) rules.emplace(rule.prefix + std::to_string(e) + "." + rule.suffix, &rule.rule);
  }
  EXPECT_EQ(rules.size(), 96085U - 4);
  for (const testing::InventoryTensor& tensor : testing::v41_inventory()) {
    const auto found = rules.find(tensor.name);
    ASSERT_EQ(found == rules.end(), tensor.name.find("engram.embed.") != std::string::npos) << tensor.name;
    if (found == rules.end()) continue;
    const TensorRule& rule = *found->second;
    EXPECT_EQ(rule.shape, tensor.shape) << tensor.name;
    EXPECT_EQ(rule.dtypes.front(), tensor.dtype) << tensor.name;
    const bool image = tensor.name.starts_with("vision.") || tensor.name.starts_with("aligner.") || tensor.name.starts_with("image_");
    EXPECT_EQ(rule.scope, tensor.name.starts_with("mtp.") ? "draft" : image ? "vision" : "target") << tensor.name;
  }
}

TEST_F(AllOfV41, NamesStoragesAsEachModelOfTheEngineDoes) {
  EXPECT_EQ(storages_of(*layout_, "draft"), as_set(testing::v41_draft_params()));
  EXPECT_EQ(storages_of(*layout_, "draft").size(), 97U);
  EXPECT_EQ(storages_of(*layout_, "vision"), as_set(testing::v41_vision_params()));
  EXPECT_EQ(storages_of(*layout_, "vision").size(), 266U);
  std::set<std::string> text = as_set(testing::v41_runtime_params(), "language_model.");
  for (const std::string& table : testing::v41_table_params()) text.erase("language_model." + table);
  EXPECT_EQ(storages_of(*layout_, "target"), text);
}

TEST_F(AllOfV41, SharesTheTargetsEmbeddingAndHeadWithTheDraft) {
  std::map<std::string, std::string> aliases;
  for (const StorageSpec& storage : layout_->storages) {
    if (!storage.alias_of.empty()) aliases[storage.name] = storage.alias_of;
  }
  const std::map<std::string, std::string> expected{{"draft.model.embed_tokens.weight", "language_model.model.embed_tokens.weight"},
                                                    {"draft.lm_head.weight", "language_model.lm_head.weight"}};
  EXPECT_EQ(aliases, expected);
}

TEST_F(AllOfV41, GivesTheDraftExpertMapsOfItsOwn) {
  ASSERT_EQ(layout_->experts.size(), 43U);
  for (std::size_t m = 0; m < 43; ++m) {
    EXPECT_EQ(layout_->experts[m].experts(), m < 40 ? 384 : 128) << m;
    EXPECT_EQ(layout_->experts[m].local_slots(), m < 40 ? 96 : 32) << m;
  }
  EXPECT_EQ(index_->resolve("mtp.1.ffn.experts.32.w1.weight").kind, Resolution::Kind::kPlaced);
  EXPECT_EQ(index_->resolve("mtp.1.ffn.experts.64.w1.weight").kind, Resolution::Kind::kNotLocal);
  EXPECT_EQ(index_->resolve("mtp.1.ffn.experts.128.w1.weight").kind, Resolution::Kind::kUnknown);
  EXPECT_EQ(index_->resolve("layers.1.ffn.experts.128.w1.weight").kind, Resolution::Kind::kPlaced);
}

TEST_F(AllOfV41, AnswersForEachScopeAlone) {
  const Scopes draft{"draft"};
  EXPECT_EQ(index_->needed(draft).size(), 2401U - 2304 + 2304 / 4);
  EXPECT_EQ(index_->needed(Scopes{"vision"}).size(), 266U);
  EXPECT_EQ(index_->needed(Scopes{"target"}).size(), 1254U + 23040);
  EXPECT_EQ(index_->scopes(), (Scopes{"target", "vision", "draft"}));
}

/// Both loaders see every name; the index must say what they do.
void expect_agreement(const WeightIndex& index, const std::vector<const VllmLoader*>& loaders, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    LoaderAnswer wanted = loaders.front()->load(name);
    if (wanted.kind == LoaderAnswer::Kind::kDropped && loaders.size() > 1) wanted = loaders[1]->load(name);
    const Resolution found = index.resolve(name);
    switch (wanted.kind) {
      case LoaderAnswer::Kind::kDropped: ASSERT_EQ(found.kind, Resolution::Kind::kDropped) << name; break;
      case LoaderAnswer::Kind::kRefused: ASSERT_EQ(found.kind, Resolution::Kind::kUnknown) << name; break;
      case LoaderAnswer::Kind::kLoaded:
        if (wanted.param.find("engram.embed") != std::string::npos) {
          ASSERT_EQ(found.kind, Resolution::Kind::kDropped) << name;
          break;
        }
        ASSERT_TRUE(found.kind == Resolution::Kind::kPlaced || found.kind == Resolution::Kind::kNotLocal) << name << " " << wanted.param;
        ASSERT_EQ(index.rule(found.rule).param, wanted.param) << name;
        ASSERT_EQ(index.rule(found.rule).shard, wanted.shard) << name;
        ASSERT_EQ(found.expert, wanted.expert) << name;
    }
    const ScanAnswer scanned = index.layout().scan(name);
    ASSERT_EQ(scanned.kind == ScanAnswer::Kind::kParam,
              found.kind == Resolution::Kind::kPlaced || found.kind == Resolution::Kind::kNotLocal)
        << name;
  }
}

std::vector<std::string> some_names() {
  std::vector<std::string> names;
  const std::vector<testing::InventoryTensor> inventory = testing::v41_inventory();
  for (std::size_t i = 0; i < inventory.size(); ++i) {
    const bool expert = inventory[i].name.find(".experts.") != std::string::npos;
    if (!expert || i % (16 * kEvery) == 0) names.push_back(inventory[i].name);
  }
  return names;
}

const std::vector<std::string>& odd_names() {
  static const std::vector<std::string> kNames{
      "",
      "mtp.",
      "mtp.0",
      "mtp.0.",
      "mtp..attn.wq_a.weight",
      "mtp.x.attn.wq_a.weight",
      "mtp.00.attn.wq_a.weight",
      "mtp.3.attn.wq_a.weight",
      "mtp.0.attn.wq_a.weight_scale",
      "mtp.1.main_proj.weight",
      "mtp.1.main_proj.scale",
      "mtp.2.main_norm.scale",
      "mtp.0.norm.weight",
      "mtp.0.markov_head.embed.weight",
      "mtp.0.markov_head.markov_w1.weight",
      "mtp.0.ffn.gate.bias",
      "mtp.0.ffn.gate.bias_vl",
      "mtp.0.ffn.experts.128.w1.weight",
      "mtp.0.ffn.experts.07.w1.weight",
      "mtp.0.ffn.experts.7.w4.weight",
      "mtp.0.ffn.experts.7.w1.base_layer.scale",
      "mtp.0.embed.weight",
      "mtp.0.head.weight",
      "mtp.0.layers.1.attn_norm.weight",
      "xmtp.0.attn_norm.weight",
      "draft.model.norm.weight",
      "model.layers.0.attn.wq_a.weight",
      "model.norm.weight",
      "lm_head.weight",
      "language_model.model.norm.weight",
      "language_model.lm_head.weight",
      "language_model.model.layers.3.attn.wkv.weight",
      "language_model.model.layers.3.ffn.experts.7.w2.weight",
      "language_model.layers.3.attn.wkv.weight",
      "head.bias",
      "vision.blocks.0.mlp.w1.weight",
      "vision.blocks.0.mlp.w3.weight",
      "vision.blocks.0.mlp.gate_up_proj.weight",
      "vision.blocks.32.norm1.weight",
      "vision.norm.scale",
      "xvision.norm.weight",
      "aligner.w1.weight",
      "aligner.w3.weight",
      "image_start",
      "image_stop",
      "layers.3.ffn.experts.5.w1.weight.image_",
      "model.layers.3.self_attn.wq_a.weight",
      "model.layers.3.mlp.experts.5.gate_proj.weight",
      "model.layers.3.mlp.experts.5.w1.weight",
      "layers.3.mlp.shared_experts.up_proj.weight",
      "layers.3.ffn.gate.e_score_correction_bias",
      "layers.1.engram.embed.weight",
      "layers.1.engram.embed.scale",
      "layers.1.xengram.embed.scale",
      "layers.3.input_layernorm.weight",
  };
  return kNames;
}

TEST_F(AllOfV41, AgreesWithTheLoadersOfAllModelsOfTheEngine) {
  std::vector<std::string> outer = testing::v41_vision_params();
  for (const std::string& name : testing::v41_runtime_params()) outer.push_back("language_model." + name);
  const VllmLoader target(true, 384, as_set(outer), VllmLoader::Kind::kImages);
  const VllmLoader draft(true, 128, as_set(testing::v41_draft_params()), VllmLoader::Kind::kDraft);
  expect_agreement(*index_, {&target, &draft}, some_names());
  expect_agreement(*index_, {&target, &draft}, odd_names());
}

TEST(DeepseekV4Models, AgreesWithTheTextModelsAndTheDraftsLoadersWhereThereAreNoImages) {
  const WeightIndex index(build(testing::v41_config(), {"target", "draft"}, "plain", 4).value_or_throw());
  const VllmLoader target(true, 384, as_set(testing::v41_runtime_params()));
  const VllmLoader draft(true, 128, as_set(testing::v41_draft_params()), VllmLoader::Kind::kDraft);
  expect_agreement(index, {&target, &draft}, some_names());
  expect_agreement(index, {&target, &draft}, odd_names());
}

/// The engine's own parameters of SGLang's text model, spelled from vLLM's by hand.
std::vector<std::string> sglang_params() {
  std::vector<std::string> params;
  const auto swap = [](std::string& name, const std::string& from, const std::string& to) {
    const std::size_t at = name.find(from);
    if (at != std::string::npos) name.replace(at, from.size(), to);
  };
  for (std::string name : testing::v41_runtime_params()) {
    swap(name, ".ffn.gate.bias_vl", ".mlp.gate.e_score_correction_bias_vl");
    swap(name, ".attn.", ".self_attn.");
    swap(name, ".ffn.", ".mlp.");
    swap(name, ".attn_norm.", ".input_layernorm.");
    swap(name, ".ffn_norm.", ".post_attention_layernorm.");
    if (name.ends_with("weight_scale")) name += "_inv";
    swap(name, "engram.embed_tokens.weight_scale_inv", "engram.embed.scale");
    swap(name, "engram.embed_tokens.weight", "engram.embed.weight");
    params.push_back(name);
  }
  return params;
}

TEST(DeepseekV4Models, AgreesWithSglangsLoader) {
  const ModelLayout layout = build(testing::v41_config(), {"target"}, "sglang", 4).value_or_throw();
  std::set<std::string> loaded;
  for (const NamedRule& rule : layout.named) loaded.insert(rule.rule.param);
  for (const ExpertRule& rule : layout.expert_rules) loaded.insert(rule.rule.param);
  std::set<std::string> expected = as_set(sglang_params());
  std::erase_if(expected, [](const std::string& name) { return name.find("engram.embed.") != std::string::npos; });
  EXPECT_EQ(loaded, expected);
  const WeightIndex index(layout);
  const VllmLoader loader(true, 384, as_set(sglang_params()), VllmLoader::Kind::kSglang);
  expect_agreement(index, {&loader}, some_names());
  expect_agreement(index, {&loader}, odd_names());
}

TEST(DeepseekV4Models, AgreesWithTheLoaderWhereSharedExpertsAreFused) {
  const WeightIndex index(build(testing::v41_config(), {"target"}, "plain+fused_shared", 4).value_or_throw());
  const VllmLoader loader(true, 384, as_set(testing::v41_runtime_params()));
  expect_agreement(index, {&loader}, some_names());
}

// --- Bytes ---

std::string tiny() {
  std::string config = testing::v41_tiny_config(128, 256, 4);
  const std::string from = "\"num_hidden_layers\":1";
  config.replace(
      config.find(from), from.size(),
      from + R"(,"num_nextn_predict_layers":2,"dspark_target_layer_ids":[0],"dspark_markov_rank":4,"dspark_n_routed_experts":2)");
  const std::string text = "\"text_config\"";
  return config.replace(
      config.find(text), text.size(),
      R"("vision_config":{"num_hidden_layers":2,"hidden_size":8,"intermediate_size":12,"patch_size":2,"downsample_ratio":3},)" + text);
}

std::vector<std::uint8_t> tensor(const std::string& name, Dtype dtype, const Shape& shape) {
  const std::vector<std::byte> bytes = testing::seeded_tensor(name, dtype, shape);
  std::vector<std::uint8_t> out(bytes.size());
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

TEST(DeepseekV4Models, BringsEveryByteOfDraftAndImagesToItsPlace) {
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    const ModelLayout layout = build(tiny(), {"target", "draft", "vision"}, "plain", 2, rank).value_or_throw();
    const testing::JudgedRank judged = testing::judge_layout(layout);
    for (const std::string& defect : judged.defects) ADD_FAILURE() << defect;
    const auto expect = [&](const std::string& storage, const std::vector<std::uint8_t>& bytes) {
      const auto found = judged.storages.find(storage);
      ASSERT_NE(found, judged.storages.end()) << storage;
      ASSERT_EQ(found->second.size(), bytes.size()) << storage;
      EXPECT_EQ(std::memcmp(found->second.data(), bytes.data(), bytes.size()), 0) << storage;
    };
    expect("draft.model.main_proj.weight", tensor("mtp.0.main_proj.weight", Dtype::kF8E4M3, {128, 128}));
    expect("draft.model.main_proj.weight_scale", tensor("mtp.0.main_proj.scale", Dtype::kF8E8M0, {4, 4}));
    expect("draft.model.norm.weight", tensor("mtp.1.norm.weight", Dtype::kBF16, {128}));
    expect("draft.model.markov_head.markov_w2.weight", tensor("mtp.1.markov_head.head.weight", Dtype::kBF16, {64, 4}));
    expect("draft.model.confidence_head.proj.weight", tensor("mtp.1.confidence_head.proj.weight", Dtype::kBF16, {1, 132}));
    expect("draft.model.embed_tokens.weight", tensor("embed.weight", Dtype::kBF16, {64, 128}));
    expect("draft.lm_head.weight", tensor("head.weight", Dtype::kBF16, {64, 128}));
    const std::string e = "mtp.1.ffn.experts." + std::to_string(rank) + ".";
    const oracle::ExpertWidths widths{128, 256, 256};
    expect("draft.model.layers.1.ffn.experts.w13_weight",
           oracle::expert_l1_weight(widths, 4, tensor(e + "w1.weight", Dtype::kI8, {256, 64}),
                                    tensor(e + "w3.weight", Dtype::kI8, {256, 64})));
    expect("draft.model.layers.1.ffn.experts.w2_weight_scale",
           oracle::expert_l2_scale(widths, 32, true, tensor(e + "w2.scale", Dtype::kF8E8M0, {128, 8})));
    expect("vision.blocks.1.attn.wqkv.weight", tensor("vision.blocks.1.attn.wqkv.weight", Dtype::kBF16, {24, 8}));
    expect("vision.patch_embed.proj.weight", tensor("vision.patch_embed.proj.weight", Dtype::kBF16, {8, 12}));
    expect("aligner.w1.weight", tensor("aligner.w1.weight", Dtype::kBF16, {128, 72}));
    expect("image_newline", tensor("image_newline", Dtype::kBF16, {128}));
    expect("language_model.model.norm.weight", tensor("norm.weight", Dtype::kBF16, {128}));
  }
}

TEST(DeepseekV4Models, FusesTheDraftsSharedExpertsToo) {
  const ModelLayout layout = build(tiny(), {"target", "draft"}, "plain+fused_shared").value_or_throw();
  const testing::JudgedRank judged = testing::judge_layout(layout);
  for (const std::string& defect : judged.defects) ADD_FAILURE() << defect;
  EXPECT_TRUE(judged.storages.contains("draft.model.layers.1.ffn.experts.shared_l1_weight"));
}

TEST(DeepseekV4Models, RefusesScopesThatTheFamilyHasNotOrThatLackTheTarget) {
  const JsonValue config = testing::json(tiny());
  const auto message = [&](const std::string& family, const Scopes& scopes) {
    ModelRequest request;
    request.family = family;
    request.scopes = scopes;
    return build_model(request, &config, {}).status().message();
  };
  EXPECT_NE(message("deepseek_v4", {"target", "tables"}).find("scope tables of deepseek_v4: the family has target, draft, vision"),
            std::string::npos);
  EXPECT_NE(message("deepseek_v4", {"draft"}).find("target is not among them"), std::string::npos);
  EXPECT_NE(message("dense", {"target", "draft"}).find("scope draft of dense: the family has target"), std::string::npos);
}

TEST(DeepseekV4Models, RefusesModelsThatTheConfigDoesNotDescribe) {
  const auto draft = build(testing::v4_flash_config(), {"target", "draft"});
  EXPECT_EQ(draft.status().code(), Code::kUnsupported);
  EXPECT_NE(draft.status().message().find("scope draft"), std::string::npos);
  EXPECT_NE(build(testing::v41_tiny_config(128, 128, 2), {"target", "draft"}).status().message().find("scope draft"), std::string::npos);
  EXPECT_NE(build(testing::v41_config(), {"target", "vision"}).status().message().find("scope vision"), std::string::npos);
  EXPECT_NE(build(testing::v41_config(), {"target", "draft"}, "sglang").status().message().find("scope draft"), std::string::npos);
  EXPECT_NE(build(tiny(), {"target", "draft"}, "plain", 4).status().message().find("2 physical experts do not divide by 4"),
            std::string::npos);
}

}  // namespace
}  // namespace headrace
