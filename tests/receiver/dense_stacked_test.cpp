#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "receiver/weight_index.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/expected_tensors.h"
#include "tests/receiver/family_matrix.h"

namespace headrace::testing {
namespace {

Result<ModelLayout> build(const SmallCheckpoint& checkpoint, std::int32_t tp, std::int32_t rank, std::optional<Dtype> dtype = {}) {
  ModelRequest request;
  request.family = "dense";
  request.variant = "stacked";
  request.parallel.tp = tp;
  request.rank = rank;
  request.dtype = dtype;
  const JsonValue config = json(checkpoint.config);
  return build_model(request, &config, checkpoint.tensors);
}

std::map<std::string, Bytes> llama_storages(const SmallCheckpoint& checkpoint, const LlamaSizes& s, std::int64_t tp, std::int64_t rank) {
  const Expected x(checkpoint, tp, rank);
  std::map<std::string, Bytes> all;
  all["model.embed_tokens.weight"] = x.vocabulary("model.embed_tokens.weight");
  all["lm_head.weight"] = x.vocabulary(s.tied.value_or(!s.lm_head) ? "model.embed_tokens.weight" : "lm_head.weight");
  all["model.norm.weight"] = x.bytes("model.norm.weight");
  for (std::int64_t l = 0; l < s.layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    const std::string a = layer + "self_attn.";
    for (const char* const leaf : {".weight", ".bias"}) {
      if (std::string_view(leaf) == ".bias" && s.model_type != "qwen2") continue;
      all.emplace(a + "qkv_proj" + leaf, x.heads(a + "q_proj" + leaf, s.heads) + x.heads(a + "k_proj" + leaf, s.kv_heads) +
                                             x.heads(a + "v_proj" + leaf, s.kv_heads));
    }
    all.emplace(a + "o_proj.weight", x.columns(a + "o_proj.weight"));
    all.emplace(layer + "mlp.gate_up_proj.weight", x.part(layer + "mlp.gate_proj.weight") + x.part(layer + "mlp.up_proj.weight"));
    all.emplace(layer + "mlp.down_proj.weight", x.columns(layer + "mlp.down_proj.weight"));
    for (const std::string norm :
         {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"}) {
      if (norm.starts_with("self_attn") && s.model_type != "qwen3") continue;
      all.emplace(layer + norm, x.bytes(layer + norm));
    }
  }
  return all;
}

std::map<std::string, Bytes> bert_storages(const SmallCheckpoint& checkpoint, const BertSizes& s, std::int64_t tp, std::int64_t rank) {
  const Expected x(checkpoint, tp, rank);
  std::map<std::string, Bytes> all;
  for (const std::string e : {"word", "position", "token_type"}) {
    const std::string name = "embeddings." + e + "_embeddings.weight";
    all.emplace(name, x.vocabulary(name));
  }
  for (const char* const leaf : {".weight", ".bias"}) {
    for (const std::string name : {"embeddings.LayerNorm", "pooler.dense"}) all.emplace(name + leaf, x.bytes(name + leaf));
    for (std::int64_t l = 0; l < s.layers; ++l) {
      const std::string layer = "encoder.layer." + std::to_string(l) + ".";
      const std::string self = layer + "attention.self.";
      all.emplace(self + "qkv_proj" + leaf, x.heads(self + "query" + leaf, s.heads) + x.heads(self + "key" + leaf, s.heads) +
                                                x.heads(self + "value" + leaf, s.heads));
      all.emplace(layer + "intermediate.dense" + leaf, x.part(layer + "intermediate.dense" + leaf));
      for (const std::string name : {"attention.output.dense", "output.dense"}) {
        const std::string whole = layer + name + leaf;
        all.emplace(whole, std::string_view(leaf) == ".weight" ? x.columns(whole) : x.bytes(whole));
      }
      for (const std::string name : {"attention.output.LayerNorm", "output.LayerNorm"})
        all.emplace(layer + name + leaf, x.bytes(layer + name + leaf));
    }
  }
  return all;
}

void expect_equal(const ModelLayout& layout, const std::map<std::string, Bytes>& expected, const std::string& what) {
  const JudgedRank judged = judge_layout(layout);
  EXPECT_EQ(judged.defects, std::vector<std::string>{}) << what;
  EXPECT_EQ(judged.storages.size(), expected.size()) << what;
  for (const auto& [name, bytes] : expected) {
    const auto found = judged.storages.find(name);
    ASSERT_NE(found, judged.storages.end()) << what << " " << name;
    EXPECT_TRUE(plain_bytes(found->second) == bytes) << what << " " << name;
  }
}

TEST(DenseStacked, PlacesTheBytesOfDecodersAsTheFormulasSay) {
  for (const std::string type : {"llama", "mistral", "qwen2", "qwen3"}) {
    for (const std::int64_t kv_heads : {1, 2, 4, 8}) {
      for (const std::int64_t vocabulary : {64, 100, 129}) {
        for (const std::int64_t tp : {1, 2, 4, 8}) {
          const LlamaSizes sizes{.model_type = type, .layers = 2, .heads = 8, .kv_heads = kv_heads, .vocabulary = vocabulary};
          const SmallCheckpoint checkpoint = llama_checkpoint(sizes);
          for (std::int64_t rank = 0; rank < tp; ++rank) {
            const auto layout = build(checkpoint, static_cast<std::int32_t>(tp), static_cast<std::int32_t>(rank));
            ASSERT_TRUE(layout.ok()) << layout.status().to_string();
            expect_equal(layout.value(), llama_storages(checkpoint, sizes, tp, rank),
                         type + " kv " + std::to_string(kv_heads) + " tp " + std::to_string(tp) + " rank " + std::to_string(rank));
          }
        }
      }
    }
  }
}

TEST(DenseStacked, PlacesTheBytesOfEncodersAsTheFormulasSay) {
  for (const std::int64_t tp : {1, 2, 4}) {
    const BertSizes sizes{.layers = 2};
    const SmallCheckpoint checkpoint = bert_checkpoint(sizes);
    for (std::int64_t rank = 0; rank < tp; ++rank) {
      const auto layout = build(checkpoint, static_cast<std::int32_t>(tp), static_cast<std::int32_t>(rank));
      ASSERT_TRUE(layout.ok()) << layout.status().to_string();
      expect_equal(layout.value(), bert_storages(checkpoint, sizes, tp, rank), "bert tp " + std::to_string(tp));
    }
  }
}

TEST(DenseStacked, PlacesATrueLayerOfLlama) {
  const LlamaSizes sizes{.hidden = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128, .intermediate = 14336, .vocabulary = 1000};
  const SmallCheckpoint checkpoint = llama_checkpoint(sizes);
  expect_equal(build(checkpoint, 4, 3).value_or_throw(), llama_storages(checkpoint, sizes, 4, 3), "Llama-3.1-8B");
}

TEST(DenseStacked, PlacesAllOfMiniLm) {
  const BertSizes sizes{.layers = 6, .hidden = 384, .heads = 12, .intermediate = 1536, .vocabulary = 30522, .positions = 512};
  SmallCheckpoint checkpoint = bert_checkpoint(sizes);
  // With the published file there, its own headers are read.
  const char* file = std::getenv("HEADRACE_MINILM");
  if (file != nullptr) {
    const Checkpoint published = Checkpoint::open(std::filesystem::path(file).parent_path()).value_or_throw();
    EXPECT_EQ(published.tensors().size(), checkpoint.tensors.size());
    checkpoint.tensors = published.tensors();
  }
  for (const std::int64_t tp : {1, 2}) {
    expect_equal(build(checkpoint, static_cast<std::int32_t>(tp), static_cast<std::int32_t>(tp - 1)).value_or_throw(),
                 bert_storages(checkpoint, sizes, tp, tp - 1), "MiniLM");
  }
}

TEST(DenseStacked, KnowsAnEmbeddingThatIsTheHeadToo) {
  for (const bool lm_head : {false, true}) {
    const LlamaSizes sizes{.tied = true, .lm_head = lm_head};
    const SmallCheckpoint checkpoint = llama_checkpoint(sizes);
    const ModelLayout layout = build(checkpoint, 2, 1).value_or_throw();
    const auto head =
        std::find_if(layout.storages.begin(), layout.storages.end(), [](const auto& s) { return s.name == "lm_head.weight"; });
    ASSERT_NE(head, layout.storages.end());
    EXPECT_EQ(head->alias_of, "model.embed_tokens.weight");
    expect_equal(layout, llama_storages(checkpoint, sizes, 2, 1), "tied");
    EXPECT_EQ(WeightIndex(layout).resolve("lm_head.weight").kind, Resolution::Kind::kDropped);
  }
  // Where the config does not say, the checkpoint does.
  EXPECT_EQ(WeightIndex(build(llama_checkpoint({.tied = {}}), 1, 0).value_or_throw()).resolve("lm_head.weight").kind,
            Resolution::Kind::kPlaced);
  EXPECT_EQ(WeightIndex(build(llama_checkpoint({.tied = {}, .lm_head = false}), 1, 0).value_or_throw()).resolve("lm_head.weight").kind,
            Resolution::Kind::kDropped);
}

TEST(DenseStacked, DropsWhatTheEngineComputes) {
  const WeightIndex index(build(llama_checkpoint({}), 1, 0).value_or_throw());
  EXPECT_EQ(index.resolve("model.layers.0.self_attn.rotary_emb.inv_freq").kind, Resolution::Kind::kDropped);
  EXPECT_EQ(index.resolve("model.layers.1.self_attn.q_proj.weight").kind, Resolution::Kind::kUnknown) << "the model has one layer";
  EXPECT_EQ(index.resolve("model.layers.0.self_attn.q_proj.weight").kind, Resolution::Kind::kPlaced);
  EXPECT_EQ(index.resolve("model.layers.0.self_attn.qkv_proj.weight").kind, Resolution::Kind::kUnknown);
  EXPECT_EQ(WeightIndex(build(bert_checkpoint({}), 1, 0).value_or_throw()).resolve("embeddings.position_ids").kind,
            Resolution::Kind::kDropped);
}

TEST(DenseStacked, KeepsFloatsInTheDtypeThatIsAskedFor) {
  const ModelLayout layout = build(bert_checkpoint({}), 2, 0, Dtype::kBF16).value_or_throw();
  for (const StorageSpec& storage : layout.storages) EXPECT_EQ(storage.dtype, Dtype::kBF16) << storage.name;
  for (const NamedRule& named : layout.named) {
    EXPECT_EQ(named.rule.dtypes, std::vector<Dtype>{Dtype::kBF16}) << named.name;
    EXPECT_EQ(named.rule.casts, (std::vector<Dtype>{Dtype::kF32, Dtype::kF16})) << named.name;
  }
  EXPECT_EQ(judge_layout(layout).defects, std::vector<std::string>{});
  EXPECT_EQ(build(bert_checkpoint({}), 1, 0, Dtype::kI8).status().code(), Code::kInvalidArgument);
}

void expect_refused(const SmallCheckpoint& checkpoint, std::int32_t tp, const std::string& text) {
  const auto layout = build(checkpoint, tp, 0);
  ASSERT_FALSE(layout.ok()) << text;
  EXPECT_NE(layout.status().message().find(text), std::string::npos) << layout.status().message();
}

TEST(DenseStacked, RefusesWhatDoesNotDivide) {
  expect_refused(llama_checkpoint({}), 3, "padded vocabulary 128 does not divide by 3: rest 2");
  expect_refused(llama_checkpoint({.heads = 6, .kv_heads = 2}), 4, "q_proj.weight: heads by ranks: 6 does not divide by 4: rest 2");
  expect_refused(llama_checkpoint({.heads = 12, .kv_heads = 3}), 4, "k_proj.weight: ranks by key and value heads: 4 does not divide by 3");
  expect_refused(llama_checkpoint({.intermediate = 25}), 2, "mlp.gate_proj.weight: rows 25 does not divide by 2");
}

TEST(DenseStacked, RefusesACheckpointThatIsAnotherModel) {
  SmallCheckpoint checkpoint = llama_checkpoint({});
  checkpoint.tensors.push_back(matrix_tensor("model.layers.0.self_attn.sinks", Dtype::kBF16, {4}));
  expect_refused(checkpoint, 1, "tensor model.layers.0.self_attn.sinks: no rule for this name in a model of type \"llama\"");
  checkpoint = llama_checkpoint({});
  std::erase_if(checkpoint.tensors, [](const CheckpointTensor& t) { return t.name.ends_with("k_proj.weight"); });
  expect_refused(checkpoint, 1, "self_attn.qkv_proj.weight: 2 of its 3 parts");
  checkpoint = llama_checkpoint({});
  for (CheckpointTensor& t : checkpoint.tensors)
    if (t.name.ends_with("up_proj.weight")) t.dtype = Dtype::kF32;
  expect_refused(checkpoint, 1, "gate_up_proj.weight: model.layers.0.mlp.gate_proj.weight is BF16 [24,16]");
  expect_refused({R"({"model_type":"llama"})", llama_checkpoint({}).tensors}, 1, "num_attention_heads is missing");
  checkpoint = llama_checkpoint({.layers = 2});
  checkpoint.config = llama_checkpoint({}).config;
  expect_refused(checkpoint, 1,
                 "tensor model.layers.1.self_attn.q_proj.weight: no rule for this name in a model of type \"llama\" with 1 layers");
  checkpoint = llama_checkpoint({.kv_heads = 4});
  checkpoint.config = llama_checkpoint({.kv_heads = 2}).config;
  expect_refused(checkpoint, 1, "k_proj.weight: 16 rows, config.json has 2 heads of 4");
}

TEST(DenseStacked, TakesNamesThatItDoesNotKnowWholeOnEveryRankWhereItIsOpen) {
  SmallCheckpoint checkpoint = llama_checkpoint({});
  for (const auto& [name, shape] : {std::pair<std::string, Shape>{"model.layers.0.eh_proj.weight", {6, 10}}, {"fc.weight_scale", {}}}) {
    CheckpointTensor odd = checkpoint.tensors.front();
    odd.name = name;
    odd.shape = shape;
    checkpoint.tensors.push_back(odd);
  }
  ASSERT_FALSE(build(checkpoint, 2, 0).ok());
  CheckpointTensor head = *std::find_if(checkpoint.tensors.begin(), checkpoint.tensors.end(),
                                        [](const CheckpointTensor& tensor) { return tensor.name == "model.embed_tokens.weight"; });
  head.name = "model.layers.0.shared_head.head.weight";
  checkpoint.tensors.push_back(head);
  ModelRequest request;
  request.family = "dense";
  request.variant = "stacked+open";
  request.parallel.tp = 2;
  const JsonValue config = json(checkpoint.config);
  for (request.rank = 0; request.rank < 2; ++request.rank) {
    const ModelLayout layout = build_model(request, &config, checkpoint.tensors).value_or_throw();
    const JudgedRank judged = judge_layout(layout);
    EXPECT_EQ(judged.defects, std::vector<std::string>{});
    const Dtype dtype = checkpoint.tensors.front().dtype;
    EXPECT_EQ(judged.storages.at("model.layers.0.eh_proj.weight"), seeded_tensor("model.layers.0.eh_proj.weight", dtype, {6, 10}));
    EXPECT_EQ(judged.storages.at("fc.weight_scale"), seeded_tensor("fc.weight_scale", dtype, {}));
    EXPECT_TRUE(judged.storages.contains("model.layers.0.self_attn.qkv_proj.weight"));
    EXPECT_EQ(plain_bytes(judged.storages.at(head.name)), Expected(checkpoint, 2, request.rank).vocabulary(head.name))
        << "the output head of a drafting layer";
  }
  for (const char* const variant : {"open", "plain+open", "plain+stacked"}) {
    request.rank = 0;
    request.variant = variant;
    EXPECT_EQ(build_model(request, &config, checkpoint.tensors).status().code(), Code::kUnsupported) << variant;
  }
}

}  // namespace
}  // namespace headrace::testing
