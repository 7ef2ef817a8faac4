#include "examples/demo/demo_model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace headrace {
namespace {

constexpr std::array kEngramLayers{1, 14};
constexpr std::array kKvSourceLayers{2, 8, 14, 20};
constexpr std::array kIndexSourceLayers{2, 8, 14, 20, 24, 28, 32, 36};
constexpr int kUngatedLayer = 20;  // from here on nothing is compressed, so this layer's compressor has no gate
constexpr int kScaleBlock = 32;

template <class Layers>
bool contains(const Layers& layers, int layer) {
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

template <class Layers>
std::string list_below(const Layers& layers, int end) {
  std::vector<int> below;
  std::copy_if(layers.begin(), layers.end(), std::back_inserter(below), [&](int layer) { return layer < end; });
  return fmt::format("[{}]", fmt::join(below, ", "));
}

std::vector<int> compress_ratios(int layers) {
  std::vector<int> ratios;
  ratios.reserve(static_cast<std::size_t>(layers));
  for (int layer = 0; layer < layers; ++layer) ratios.push_back(layer < 2 ? 0 : layer < kUngatedLayer ? 2 : 1);
  return ratios;
}

int engram_columns(const DemoModel& m) {
  return (m.engram_ngram_max - 1) * m.engram_heads;
}

/// Adds tensors under one prefix.
class Adder {
 public:
  Adder(std::vector<TensorSpec>& out, std::string prefix) : out_(out), prefix_(std::move(prefix)) {}

  void add(std::string_view name, Dtype dtype, Shape shape) {
    out_.push_back(TensorSpec{fmt::format("{}{}", prefix_, name), dtype, std::move(shape)});
  }
  /// An FP8 matrix and the E8M0 scales of its 32x32 blocks.
  void add_fp8(std::string_view name, std::int64_t rows, std::int64_t columns) {
    add(fmt::format("{}.weight", name), Dtype::kF8E4M3, {rows, columns});
    add(fmt::format("{}.scale", name), Dtype::kF8E8M0, {rows / kScaleBlock, columns / kScaleBlock});
  }
  /// An MXFP4 matrix, two elements a byte, and the E8M0 scales of 32 elements of a row.
  void add_fp4(std::string_view name, std::int64_t rows, std::int64_t columns) {
    add(fmt::format("{}.weight", name), Dtype::kI8, {rows, columns / 2});
    add(fmt::format("{}.scale", name), Dtype::kF8E8M0, {rows, columns / kScaleBlock});
  }

 private:
  std::vector<TensorSpec>& out_;
  std::string prefix_;
};

void add_attention(Adder& adder, const DemoModel& m, int layer) {
  const int heads_width = m.heads * m.head_dim;
  adder.add_fp8("attn.wq_a", m.q_lora, m.hidden);
  adder.add_fp8("attn.wq_b", heads_width, m.q_lora);
  adder.add_fp8("attn.wkv", m.head_dim, m.hidden);
  adder.add_fp8("attn.wo_a", m.o_groups * m.o_lora, heads_width / m.o_groups);
  adder.add_fp8("attn.wo_b", m.hidden, m.o_groups * m.o_lora);
  adder.add("attn.q_norm.weight", Dtype::kBF16, {m.q_lora});
  adder.add("attn.kv_norm.weight", Dtype::kBF16, {m.head_dim});
  adder.add("attn.attn_sink", Dtype::kF32, {m.heads});
  if (contains(kKvSourceLayers, layer)) {
    adder.add("attn.compressor.wkv.weight", Dtype::kBF16, {m.head_dim, m.hidden});
    adder.add("attn.compressor.norm.weight", Dtype::kBF16, {m.head_dim});
    if (layer != kUngatedLayer) adder.add("attn.compressor.wgate.weight", Dtype::kBF16, {m.head_dim, m.hidden});
    adder.add("attn.indexer.wk.weight", Dtype::kBF16, {m.index_head_dim, m.head_dim});
    adder.add("attn.indexer.k_norm.weight", Dtype::kBF16, {m.index_head_dim});
  }
  if (contains(kIndexSourceLayers, layer)) {
    adder.add_fp8("attn.indexer.wq_b", m.index_heads * m.index_head_dim, m.q_lora);
    adder.add("attn.indexer.weights_proj.weight", Dtype::kBF16, {m.index_heads, m.hidden});
  }
}

void add_layer(std::vector<TensorSpec>& out, const DemoModel& m, int layer) {
  Adder adder(out, fmt::format("layers.{}.", layer));
  add_attention(adder, m, layer);
  adder.add("attn_norm.weight", Dtype::kBF16, {m.hidden});
  adder.add("ffn_norm.weight", Dtype::kBF16, {m.hidden});
  for (const std::string_view part : {"attn", "ffn"}) {
    const int rows = m.hc_mult * (m.hc_mult + 2);
    adder.add(fmt::format("hc_{}_fn", part), Dtype::kF32, {rows, m.hc_mult * m.hidden});
    adder.add(fmt::format("hc_{}_base", part), Dtype::kF32, {rows});
    adder.add(fmt::format("hc_{}_scale", part), Dtype::kF32, {3});
  }
  if (contains(kEngramLayers, layer)) {
    adder.add_fp8("engram.wkv", (m.hc_mult + 1) * m.hidden, engram_columns(m) * m.engram_head_dim);
    adder.add("engram.q_weight", Dtype::kBF16, {m.hc_mult, m.hidden});
    adder.add("engram.k_weight", Dtype::kBF16, {m.hc_mult, m.hidden});
  }
  adder.add("ffn.gate.weight", Dtype::kBF16, {m.experts, m.hidden});
  adder.add("ffn.gate.bias", Dtype::kF32, {m.experts});
  adder.add("ffn.gate.bias_vl", Dtype::kF32, {m.experts});
  adder.add_fp8("ffn.shared_experts.w1", m.moe_intermediate, m.hidden);
  adder.add_fp8("ffn.shared_experts.w2", m.hidden, m.moe_intermediate);
  adder.add_fp8("ffn.shared_experts.w3", m.moe_intermediate, m.hidden);
  for (int expert = 0; expert < m.experts; ++expert) {
    adder.add_fp4(fmt::format("ffn.experts.{}.w1", expert), m.moe_intermediate, m.hidden);
    adder.add_fp4(fmt::format("ffn.experts.{}.w2", expert), m.hidden, m.moe_intermediate);
    adder.add_fp4(fmt::format("ffn.experts.{}.w3", expert), m.moe_intermediate, m.hidden);
  }
}

void add_top(std::vector<TensorSpec>& out, const DemoModel& m) {
  Adder adder(out, "");
  adder.add("embed.weight", Dtype::kBF16, {m.vocab, m.hidden});
  adder.add("norm.weight", Dtype::kBF16, {m.hidden});
  adder.add("head.weight", Dtype::kBF16, {m.vocab, m.hidden});
}

}  // namespace

DemoModel demo_model(bool small) {
  DemoModel model;
  if (small) model.layers = 6;
  return model;
}

std::vector<TensorSpec> demo_tensors(const DemoModel& model) {
  std::vector<TensorSpec> tensors;
  for (int layer = 0; layer < model.layers; ++layer) add_layer(tensors, model, layer);
  add_top(tensors, model);
  return tensors;
}

std::int64_t demo_checkpoint_bytes(const DemoModel& model) {
  std::int64_t total = 0;
  for (const TensorSpec& tensor : demo_tensors(model)) total += byte_count(tensor.dtype, tensor.shape).value_or(0);
  return total;
}

std::vector<DemoShard> demo_shards(const DemoModel& model) {
  std::vector<DemoShard> shards(static_cast<std::size_t>(model.layers) + 1);
  for (std::size_t i = 0; i < shards.size(); ++i) shards[i].file = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  for (int layer = 0; layer < model.layers; ++layer) add_layer(shards[static_cast<std::size_t>(layer)].tensors, model, layer);
  add_top(shards.back().tensors, model);
  return shards;
}

std::string demo_config_json(const DemoModel& m) {
  return fmt::format(
      R"({{
  "architectures": ["DeepseekV41ForCausalLM"],
  "model_type": "deepseek_v41",
  "torch_dtype": "bfloat16",
  "text_config": {{
    "model_type": "deepseek_v41_text",
    "hidden_size": {hidden},
    "num_hidden_layers": {layers},
    "num_nextn_predict_layers": 0,
    "moe_intermediate_size": {moe_intermediate},
    "n_routed_experts": {experts},
    "n_shared_experts": 1,
    "num_experts_per_tok": {experts_per_token},
    "num_hash_layers": 0,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_attention_heads": {heads},
    "num_key_value_heads": 1,
    "head_dim": {head_dim},
    "qk_rope_head_dim": {rope_head_dim},
    "q_lora_rank": {q_lora},
    "o_lora_rank": {o_lora},
    "o_groups": {o_groups},
    "index_n_heads": {index_heads},
    "index_head_dim": {index_head_dim},
    "index_topk": 512,
    "compress_ratios": [{compress_ratios}],
    "kv_source_layer_ids": {kv_source},
    "index_source_layer_ids": {index_source},
    "hc_mult": {hc_mult},
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "vocab_size": {vocab},
    "engram_layer_ids": {engram_layers},
    "engram_max_ngram_size": {engram_ngram_max},
    "engram_n_heads": {engram_heads},
    "engram_head_dim": {engram_head_dim}
  }},
  "quantization_config": {{
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [{block}, {block}],
    "expert_dtype": "fp4"
  }}
}}
)",
      fmt::arg("hidden", m.hidden), fmt::arg("layers", m.layers), fmt::arg("moe_intermediate", m.moe_intermediate),
      fmt::arg("experts", m.experts), fmt::arg("experts_per_token", m.experts_per_token), fmt::arg("heads", m.heads),
      fmt::arg("head_dim", m.head_dim), fmt::arg("rope_head_dim", m.rope_head_dim), fmt::arg("q_lora", m.q_lora),
      fmt::arg("o_lora", m.o_lora), fmt::arg("o_groups", m.o_groups), fmt::arg("index_heads", m.index_heads),
      fmt::arg("index_head_dim", m.index_head_dim),
      fmt::arg("compress_ratios", fmt::format("{}", fmt::join(compress_ratios(m.layers), ", "))),
      fmt::arg("kv_source", list_below(kKvSourceLayers, m.layers)), fmt::arg("index_source", list_below(kIndexSourceLayers, m.layers)),
      fmt::arg("hc_mult", m.hc_mult), fmt::arg("vocab", m.vocab), fmt::arg("engram_layers", list_below(kEngramLayers, m.layers)),
      fmt::arg("engram_ngram_max", m.engram_ngram_max), fmt::arg("engram_heads", m.engram_heads),
      fmt::arg("engram_head_dim", m.engram_head_dim), fmt::arg("block", kScaleBlock));
}

std::string demo_index_json(const DemoModel& model, const std::vector<DemoShard>& shards) {
  std::string json = fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", demo_checkpoint_bytes(model));
  std::string_view separator = "\n";
  for (const DemoShard& shard : shards) {
    for (const TensorSpec& tensor : shard.tensors) {
      json += fmt::format("{}    \"{}\": \"{}\"", separator, tensor.name, shard.file);
      separator = ",\n";
    }
  }
  return json + "\n  }\n}\n";
}

std::string demo_stamp(const DemoModel& model) {
  // The config names every width that shapes a tensor; the number in front counts changes of the rule that fills them.
  return fmt::format("headrace demo checkpoint, rule 1, seed {}\n{}", model.seed, demo_config_json(model));
}

}  // namespace headrace
