#include "tests/receiver/small_checkpoints.h"

#include "tests/receiver/family_matrix.h"

namespace headrace::testing {
namespace {

void add(SmallCheckpoint& checkpoint, std::string name, Dtype dtype, Shape shape) {
  checkpoint.tensors.push_back(matrix_tensor(std::move(name), dtype, std::move(shape)));
}

std::string number(const char* key, std::int64_t value) {
  return std::string(",\"") + key + "\":" + std::to_string(value);
}

void add_attention(SmallCheckpoint& checkpoint, const std::string& layer, const LlamaSizes& s) {
  const std::string attention = layer + "self_attn.";
  const bool bias = s.model_type == "qwen2";
  const auto projection = [&](const char* name, std::int64_t rows) {
    add(checkpoint, attention + name + ".weight", s.dtype, {rows, s.hidden});
    if (bias) add(checkpoint, attention + name + ".bias", s.dtype, {rows});
  };
  projection("q_proj", s.heads * s.head_dim);
  projection("k_proj", s.kv_heads * s.head_dim);
  projection("v_proj", s.kv_heads * s.head_dim);
  add(checkpoint, attention + "o_proj.weight", s.dtype, {s.hidden, s.heads * s.head_dim});
  add(checkpoint, attention + "rotary_emb.inv_freq", Dtype::kF32, {s.head_dim / 2});
  add(checkpoint, layer + "input_layernorm.weight", s.dtype, {s.hidden});
  add(checkpoint, layer + "post_attention_layernorm.weight", s.dtype, {s.hidden});
  if (s.model_type != "qwen3" && s.model_type != "qwen3_moe") return;
  add(checkpoint, attention + "q_norm.weight", s.dtype, {s.head_dim});
  add(checkpoint, attention + "k_norm.weight", s.dtype, {s.head_dim});
}

std::string llama_config(const LlamaSizes& s) {
  std::string text = "\"model_type\":\"" + s.model_type + "\"" + number("num_hidden_layers", s.layers) + number("hidden_size", s.hidden) +
                     number("num_attention_heads", s.heads) + number("num_key_value_heads", s.kv_heads) + number("head_dim", s.head_dim) +
                     number("intermediate_size", s.intermediate) + number("vocab_size", s.vocabulary);
  if (s.tied) text += std::string(",\"tie_word_embeddings\":") + (*s.tied ? "true" : "false");
  return text;
}

void add_ends(SmallCheckpoint& checkpoint, const LlamaSizes& s) {
  add(checkpoint, "model.embed_tokens.weight", s.dtype, {s.vocabulary, s.hidden});
  add(checkpoint, "model.norm.weight", s.dtype, {s.hidden});
  if (s.lm_head) add(checkpoint, "lm_head.weight", s.dtype, {s.vocabulary, s.hidden});
}

/// One projection of one expert.
void add_expert(SmallCheckpoint& checkpoint, const std::string& name, const MoeSizes& s, std::int64_t rows, std::int64_t columns) {
  const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  if (s.form == "bf16") add(checkpoint, name + ".weight", Dtype::kBF16, {rows, columns});
  if (s.form == "fp8") {
    add(checkpoint, name + ".weight", Dtype::kF8E4M3, {rows, columns});
    add(checkpoint, name + ".weight_scale_inv", Dtype::kF32, {up(rows, s.block), up(columns, s.block)});
  }
  if (s.form == "mxfp4") {
    add(checkpoint, name + ".weight", Dtype::kU8, {rows, columns / 2});
    add(checkpoint, name + ".weight_scale", Dtype::kU8, {rows, columns / 32});
  }
  if (s.form == "nvfp4") {
    add(checkpoint, name + ".weight", Dtype::kU8, {rows, columns / 2});
    add(checkpoint, name + ".weight_scale", Dtype::kF8E4M3, {rows, columns / 16});
    add(checkpoint, name + ".weight_scale_2", Dtype::kF32, {});
    add(checkpoint, name + ".input_scale", Dtype::kF32, {});
  }
}

void add_experts(SmallCheckpoint& checkpoint, const std::string& layer, const MoeSizes& s) {
  const bool mixtral = s.model_type == "mixtral";
  const std::string moe = layer + (mixtral ? "block_sparse_moe." : "mlp.");
  add(checkpoint, moe + "gate.weight", Dtype::kBF16, {s.experts, s.hidden});
  if (s.form == "joint") {
    add(checkpoint, moe + "experts.gate_up_proj", Dtype::kBF16, {s.experts, 2 * s.intermediate, s.hidden});
    add(checkpoint, moe + "experts.down_proj", Dtype::kBF16, {s.experts, s.hidden, s.intermediate});
    return;
  }
  if (s.form == "joint_turned") {
    add(checkpoint, moe + "experts.gate_up_proj", Dtype::kBF16, {s.experts, s.hidden, 2 * s.intermediate});
    add(checkpoint, moe + "experts.down_proj", Dtype::kBF16, {s.experts, s.intermediate, s.hidden});
    return;
  }
  for (std::int64_t e = 0; e < s.experts; ++e) {
    const std::string expert = moe + "experts." + std::to_string(e) + ".";
    add_expert(checkpoint, expert + (mixtral ? "w1" : "gate_proj"), s, s.intermediate, s.hidden);
    add_expert(checkpoint, expert + (mixtral ? "w3" : "up_proj"), s, s.intermediate, s.hidden);
    add_expert(checkpoint, expert + (mixtral ? "w2" : "down_proj"), s, s.hidden, s.intermediate);
  }
}

}  // namespace

SmallCheckpoint llama_checkpoint(const LlamaSizes& s) {
  SmallCheckpoint checkpoint;
  checkpoint.config = "{" + llama_config(s) + "}";
  add_ends(checkpoint, s);
  for (std::int64_t l = 0; l < s.layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    add_attention(checkpoint, layer, s);
    add(checkpoint, layer + "mlp.gate_proj.weight", s.dtype, {s.intermediate, s.hidden});
    add(checkpoint, layer + "mlp.up_proj.weight", s.dtype, {s.intermediate, s.hidden});
    add(checkpoint, layer + "mlp.down_proj.weight", s.dtype, {s.hidden, s.intermediate});
  }
  return checkpoint;
}

SmallCheckpoint bert_checkpoint(const BertSizes& s) {
  SmallCheckpoint checkpoint;
  checkpoint.config = "{\"model_type\":\"bert\"" + number("num_hidden_layers", s.layers) + number("hidden_size", s.hidden) +
                      number("num_attention_heads", s.heads) + number("intermediate_size", s.intermediate) + "}";
  const auto linear = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    add(checkpoint, name + ".weight", s.dtype, {rows, columns});
    add(checkpoint, name + ".bias", s.dtype, {rows});
  };
  const auto norm = [&](const std::string& name) {
    add(checkpoint, name + ".weight", s.dtype, {s.hidden});
    add(checkpoint, name + ".bias", s.dtype, {s.hidden});
  };
  add(checkpoint, "embeddings.position_ids", Dtype::kI64, {1, s.positions});
  add(checkpoint, "embeddings.word_embeddings.weight", s.dtype, {s.vocabulary, s.hidden});
  add(checkpoint, "embeddings.position_embeddings.weight", s.dtype, {s.positions, s.hidden});
  add(checkpoint, "embeddings.token_type_embeddings.weight", s.dtype, {2, s.hidden});
  norm("embeddings.LayerNorm");
  for (std::int64_t l = 0; l < s.layers; ++l) {
    const std::string layer = "encoder.layer." + std::to_string(l) + ".";
    for (const char* part : {"query", "key", "value"}) linear(layer + "attention.self." + part, s.hidden, s.hidden);
    linear(layer + "attention.output.dense", s.hidden, s.hidden);
    norm(layer + "attention.output.LayerNorm");
    linear(layer + "intermediate.dense", s.intermediate, s.hidden);
    linear(layer + "output.dense", s.hidden, s.intermediate);
    norm(layer + "output.LayerNorm");
  }
  linear("pooler.dense", s.hidden, s.hidden);
  return checkpoint;
}

SmallCheckpoint moe_checkpoint(const MoeSizes& s) {
  LlamaSizes dense{.model_type = s.model_type, .layers = s.layers, .hidden = s.hidden, .head_dim = s.hidden / 4};
  SmallCheckpoint checkpoint;
  checkpoint.config = "{" + llama_config(dense) + number("moe_intermediate_size", s.intermediate) + number("num_experts", s.experts);
  if (s.form == "fp8") {
    const std::string block = std::to_string(s.block);
    checkpoint.config += ",\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[" + block + "," + block + "]}";
  }
  checkpoint.config += "}";
  if (s.dense) add_ends(checkpoint, dense);
  for (std::int64_t l = 0; l < s.layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    if (s.dense) add_attention(checkpoint, layer, dense);
    add_experts(checkpoint, layer, s);
  }
  return checkpoint;
}

SmallCheckpoint deepseek_v3_checkpoint(bool compressed_query) {
  SmallCheckpoint checkpoint;
  checkpoint.config =
      std::string(
          R"({"model_type":"deepseek_v3","num_hidden_layers":2,"num_nextn_predict_layers":1,"hidden_size":16,"num_attention_heads":4)") +
      R"(,"num_key_value_heads":4,"kv_lora_rank":8,"moe_intermediate_size":8,"intermediate_size":24,"n_routed_experts":4)" +
      R"(,"tie_word_embeddings":false,"quantization_config":{"weight_block_size":[4,4]})" +
      (compressed_query ? R"(,"q_lora_rank":12})" : R"(,"q_lora_rank":null})");
  const auto plain = [&](const std::string& name, Shape shape) { add(checkpoint, name + ".weight", Dtype::kBF16, std::move(shape)); };
  const auto linear = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    add(checkpoint, name + ".weight", Dtype::kF8E4M3, {rows, columns});
    add(checkpoint, name + ".weight_scale_inv", Dtype::kF32, {(rows + 3) / 4, (columns + 3) / 4});
  };
  const auto mlp = [&](const std::string& name, std::int64_t width) {
    linear(name + "gate_proj", width, 16);
    linear(name + "up_proj", width, 16);
    linear(name + "down_proj", 16, width);
  };
  plain("model.embed_tokens", {128, 16});
  plain("model.norm", {16});
  plain("lm_head", {128, 16});
  for (std::int64_t l = 0; l < 3; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    plain(layer + "input_layernorm", {16});
    plain(layer + "post_attention_layernorm", {16});
    if (compressed_query) {
      linear(layer + "self_attn.q_a_proj", 12, 16);
      plain(layer + "self_attn.q_a_layernorm", {12});
      linear(layer + "self_attn.q_b_proj", 40, 12);
    } else {
      linear(layer + "self_attn.q_proj", 40, 16);
    }
    linear(layer + "self_attn.kv_a_proj_with_mqa", 10, 16);
    plain(layer + "self_attn.kv_a_layernorm", {8});
    linear(layer + "self_attn.kv_b_proj", 64, 8);
    linear(layer + "self_attn.o_proj", 16, 32);
    if (l == 0) {
      mlp(layer + "mlp.", 24);
      continue;
    }
    if (l == 2) plain(layer + "eh_proj", {16, 32});
    plain(layer + "mlp.gate", {4, 16});
    add(checkpoint, layer + "mlp.gate.e_score_correction_bias", Dtype::kF32, {4});
    mlp(layer + "mlp.shared_experts.", 8);
    for (int e = 0; e < 4; ++e) mlp(layer + "mlp.experts." + std::to_string(e) + ".", 8);
  }
  return checkpoint;
}

}  // namespace headrace::testing
