#include <gtest/gtest.h>

#include <map>

#include "receiver/weight_index.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/expected_tensors.h"

namespace headrace::testing {
namespace {

Result<ModelLayout> build(const SmallCheckpoint& checkpoint, const ParallelLayout& parallel, std::int32_t rank,
                          std::optional<Dtype> dtype = {}) {
  ModelRequest request;
  request.parallel = parallel;
  request.rank = rank;
  request.dtype = dtype;
  const JsonValue config = json(checkpoint.config);
  return build_model(request, &config, checkpoint.tensors);
}

/// Everything but the routed experts.
std::map<std::string, Bytes> other_storages(const SmallCheckpoint& checkpoint, bool compressed_query, std::int64_t tp, std::int64_t rank) {
  const Expected x(checkpoint, tp, rank);
  std::map<std::string, Bytes> all;
  for (const std::string name : {"model.embed_tokens.weight", "lm_head.weight"}) all.emplace(name, x.vocabulary(name));
  all["model.norm.weight"] = x.bytes("model.norm.weight");
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    const std::string a = layer + "self_attn.";
    for (const std::string norm : {"input_layernorm", "post_attention_layernorm", "self_attn.kv_a_layernorm"}) {
      all.emplace(layer + norm + ".weight", x.bytes(layer + norm + ".weight"));
    }
    for (const char* const leaf : {".weight", ".weight_scale_inv"}) {
      const std::string kv_a = a + "kv_a_proj_with_mqa" + leaf;
      if (compressed_query) {
        all.emplace(a + "fused_qkv_a_proj" + leaf, x.bytes(a + "q_a_proj" + leaf) + x.bytes(kv_a));
        all.emplace(a + "q_b_proj" + leaf, x.part(a + "q_b_proj" + leaf));
      } else {
        all.emplace(kv_a, x.bytes(kv_a));
        all.emplace(a + "q_proj" + leaf, x.part(a + "q_proj" + leaf));
      }
      all.emplace(a + "kv_b_proj" + leaf, x.part(a + "kv_b_proj" + leaf));
      all.emplace(a + "o_proj" + leaf, x.columns(a + "o_proj" + leaf));
      const std::string mlp = layer + (layer == "model.layers.0." ? "mlp." : "mlp.shared_experts.");
      all.emplace(mlp + "gate_up_proj" + leaf, x.part(mlp + "gate_proj" + leaf) + x.part(mlp + "up_proj" + leaf));
      all.emplace(mlp + "down_proj" + leaf, x.columns(mlp + "down_proj" + leaf));
    }
    if (compressed_query) all.emplace(a + "q_a_layernorm.weight", x.bytes(a + "q_a_layernorm.weight"));
  }
  for (const std::string name : {"weight", "e_score_correction_bias"}) {
    all.emplace("model.layers.1.mlp.gate." + name, x.bytes("model.layers.1.mlp.gate." + name));
  }
  return all;
}

TEST(LatentAttention, PlacesTheBytesOfDeepseekV3AsTheFormulasSay) {
  for (const bool compressed_query : {true, false}) {
    const SmallCheckpoint checkpoint = deepseek_v3_checkpoint(compressed_query);
    for (const ParallelLayout parallel : {ParallelLayout{1, 1}, ParallelLayout{2, 1}, ParallelLayout{2, 4}}) {
      for (std::int32_t rank = 0; rank < parallel.ranks(); ++rank) {
        const auto layout = build(checkpoint, parallel, rank);
        ASSERT_TRUE(layout.ok()) << layout.status().to_string();
        EXPECT_EQ(layout.value().family, "fused_moe");
        const JudgedRank judged = judge_layout(layout.value());
        EXPECT_EQ(judged.defects, std::vector<std::string>{});
        const auto expected = other_storages(checkpoint, compressed_query, parallel.tp, rank % parallel.tp);
        EXPECT_EQ(judged.storages.size(), expected.size() + 4) << "four parameters of the routed experts";
        for (const auto& [name, bytes] : expected) {
          ASSERT_TRUE(judged.storages.contains(name)) << name;
          EXPECT_TRUE(plain_bytes(judged.storages.at(name)) == bytes) << name << " " << parallel.to_string() << " rank " << rank;
        }
      }
    }
  }
}

TEST(LatentAttention, DropsTheDraftsLayer) {
  const WeightIndex index(build(deepseek_v3_checkpoint(true), {}, 0).value_or_throw());
  for (const char* name :
       {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight", "model.layers.2.input_layernorm.weight"}) {
    EXPECT_EQ(index.resolve(name).kind, Resolution::Kind::kDropped) << name;
  }
}

TEST(LatentAttention, ConvertsNoScaleAndNoCorrection) {
  const ModelLayout layout = build(deepseek_v3_checkpoint(true), {}, 0, Dtype::kF16).value_or_throw();
  for (const StorageSpec& storage : layout.storages) {
    const bool scale = storage.name.ends_with("scale_inv") || storage.name.ends_with("e_score_correction_bias");
    const bool plain = storage.dtype != Dtype::kF8E4M3 && !scale;
    EXPECT_EQ(storage.dtype == Dtype::kF32, scale) << storage.name;
    EXPECT_EQ(storage.dtype == Dtype::kF16, plain) << storage.name;
  }
}

TEST(LatentAttention, RefusesACutInsideABlock) {
  const auto layout = build(deepseek_v3_checkpoint(true), {.tp = 4, .ep = 1}, 1);
  ASSERT_FALSE(layout.ok());
  EXPECT_NE(layout.status().message().find(
                "model.layers.0.self_attn.q_b_proj.weight_scale_inv: [10, 20) of its weight's dimension 0 is cut inside a block of 4"),
            std::string::npos)
      << layout.status().message();
}

}  // namespace
}  // namespace headrace::testing
