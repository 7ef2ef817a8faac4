#include "tests/receiver/deepseek_inventory.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace headrace::testing {
namespace {

using Tensors = std::vector<InventoryTensor>;

bool among(int value, std::initializer_list<int> list) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

void fp8(Tensors& out, const std::string& name, std::int64_t rows, std::int64_t columns) {
  out.push_back({name + ".weight", Dtype::kF8E4M3, {rows, columns}});
  out.push_back({name + ".scale", Dtype::kF8E8M0, {rows / 32, columns / 32}});
}

void bf16(Tensors& out, const std::string& name, Shape shape) {
  out.push_back({name, Dtype::kBF16, std::move(shape)});
}

void f32(Tensors& out, const std::string& name, Shape shape) {
  out.push_back({name, Dtype::kF32, std::move(shape)});
}

/// What every block has, backbone or draft.
void block(Tensors& out, const std::string& p, int experts) {
  fp8(out, p + "attn.wq_a", 1280, 5120);
  fp8(out, p + "attn.wq_b", 32768, 1280);
  fp8(out, p + "attn.wkv", 512, 5120);
  fp8(out, p + "attn.wo_a", 8192, 4096);
  fp8(out, p + "attn.wo_b", 5120, 8192);
  bf16(out, p + "attn.q_norm.weight", {1280});
  bf16(out, p + "attn.kv_norm.weight", {512});
  bf16(out, p + "attn_norm.weight", {5120});
  bf16(out, p + "ffn_norm.weight", {5120});
  f32(out, p + "attn.attn_sink", {64});
  bf16(out, p + "ffn.gate.weight", {experts, 5120});
  f32(out, p + "ffn.gate.bias", {experts});
  f32(out, p + "ffn.gate.bias_vl", {experts});
  fp8(out, p + "ffn.shared_experts.w1", 2304, 5120);
  fp8(out, p + "ffn.shared_experts.w2", 5120, 2304);
  fp8(out, p + "ffn.shared_experts.w3", 2304, 5120);
  for (const std::string hc : {"hc_attn_", "hc_ffn_"}) {
    f32(out, p + hc + "fn", {24, 20480});
    f32(out, p + hc + "base", {24});
    f32(out, p + hc + "scale", {3});
  }
  for (int e = 0; e < experts; ++e) {
    const std::string expert = p + "ffn.experts." + std::to_string(e) + ".";
    for (const std::string w : {"w1", "w2", "w3"}) {
      const bool down = w == "w2";
      out.push_back({expert + w + ".weight", Dtype::kI8, down ? Shape{5120, 1152} : Shape{2304, 2560}});
      out.push_back({expert + w + ".scale", Dtype::kF8E8M0, down ? Shape{5120, 72} : Shape{2304, 160}});
    }
  }
}

void backbone_extras(Tensors& out, int l) {
  const std::string p = "layers." + std::to_string(l) + ".";
  if (among(l, {2, 8, 14, 20})) {
    bf16(out, p + "attn.compressor.wkv.weight", {512, 5120});
    bf16(out, p + "attn.compressor.norm.weight", {512});
    if (l != 20) bf16(out, p + "attn.compressor.wgate.weight", {512, 5120});
    bf16(out, p + "attn.indexer.wk.weight", {128, 512});
    bf16(out, p + "attn.indexer.k_norm.weight", {128});
  }
  if (among(l, {2, 8, 14, 20, 24, 28, 32, 36})) {
    fp8(out, p + "attn.indexer.wq_b", 4096, 1280);
    bf16(out, p + "attn.indexer.weights_proj.weight", {32, 5120});
  }
  if (among(l, {1, 14})) {
    const std::int64_t rows = l == 1 ? 384006168 : 384016682;
    out.push_back({p + "engram.embed.weight", Dtype::kF8E4M3, {rows, 256}});
    out.push_back({p + "engram.embed.scale", Dtype::kF8E8M0, {rows, 8}});
    fp8(out, p + "engram.wkv", 25600, 6144);
    bf16(out, p + "engram.q_weight", {4, 5120});
    bf16(out, p + "engram.k_weight", {4, 5120});
  }
}

void drafts(Tensors& out) {
  for (const std::string p : {"mtp.0.", "mtp.1.", "mtp.2."}) block(out, p, 128);
  fp8(out, "mtp.0.main_proj", 5120, 15360);
  bf16(out, "mtp.0.main_norm.weight", {5120});
  bf16(out, "mtp.2.norm.weight", {5120});
  bf16(out, "mtp.2.markov_head.embed.weight", {129280, 256});
  bf16(out, "mtp.2.markov_head.head.weight", {129280, 256});
  bf16(out, "mtp.2.confidence_head.proj.weight", {1, 5376});
}

void vision(Tensors& out) {
  for (int b = 0; b < 32; ++b) {
    const std::string p = "vision.blocks." + std::to_string(b) + ".";
    bf16(out, p + "attn.wqkv.weight", {3072, 1024});
    bf16(out, p + "attn.wqkv.bias", {3072});
    bf16(out, p + "attn.wo.weight", {1024, 1024});
    bf16(out, p + "attn.wo.bias", {1024});
    bf16(out, p + "mlp.w1.weight", {5632, 1024});
    bf16(out, p + "mlp.w2.weight", {1024, 2816});
    bf16(out, p + "norm1.weight", {1024});
    bf16(out, p + "norm2.weight", {1024});
  }
  bf16(out, "vision.norm.weight", {1024});
  bf16(out, "vision.patch_embed.proj.weight", {1024, 588});
  bf16(out, "vision.patch_embed.proj.bias", {1024});
  bf16(out, "aligner.w1.weight", {5120, 9216});
  bf16(out, "aligner.w1.bias", {5120});
  bf16(out, "aligner.w2.weight", {5120, 5120});
  bf16(out, "aligner.w2.bias", {5120});
  for (const std::string name : {"image_start", "image_end", "image_newline"}) bf16(out, name, {5120});
}

std::string repeated(const std::string& item, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i == 0 ? "" : ",") + item;
  return text;
}

}  // namespace

std::vector<InventoryTensor> v41_inventory() {
  Tensors out;
  out.reserve(96085);
  bf16(out, "embed.weight", {129280, 5120});
  bf16(out, "head.weight", {129280, 5120});
  bf16(out, "norm.weight", {5120});
  for (int l = 0; l < 40; ++l) {
    block(out, "layers." + std::to_string(l) + ".", 384);
    backbone_extras(out, l);
  }
  drafts(out);
  vision(out);
  return out;
}

std::vector<std::string> v41_table_params() {
  std::vector<std::string> params;
  for (const std::string l : {"1", "14"}) {
    params.push_back("model.layers." + l + ".engram.embed_tokens.weight");
    params.push_back("model.layers." + l + ".engram.embed_tokens.weight_scale_inv");
  }
  return params;
}

std::vector<std::string> expert_params(int layers) {
  std::vector<std::string> params;
  for (int l = 0; l < layers; ++l) {
    for (const std::string leaf : {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"}) {
      params.push_back("model.layers." + std::to_string(l) + ".ffn.experts." + leaf);
    }
  }
  return params;
}

std::vector<std::string> v41_runtime_params() {
  std::vector<std::string> params{"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"};
  const std::vector<std::string> every{"attn.fused_wqa_wkv.weight",
                                       "attn.fused_wqa_wkv.weight_scale",
                                       "attn.wq_b.weight",
                                       "attn.wq_b.weight_scale",
                                       "attn.wo_a.weight",
                                       "attn.wo_a.weight_scale",
                                       "attn.wo_b.weight",
                                       "attn.wo_b.weight_scale",
                                       "attn.q_norm.weight",
                                       "attn.kv_norm.weight",
                                       "attn_norm.weight",
                                       "ffn_norm.weight",
                                       "attn.attn_sink",
                                       "ffn.gate.weight",
                                       "ffn.gate.e_score_correction_bias",
                                       "ffn.gate.bias_vl",
                                       "ffn.shared_experts.gate_up_proj.weight",
                                       "ffn.shared_experts.gate_up_proj.weight_scale",
                                       "ffn.shared_experts.down_proj.weight",
                                       "ffn.shared_experts.down_proj.weight_scale",
                                       "hc_attn_fn",
                                       "hc_attn_base",
                                       "hc_attn_scale",
                                       "hc_ffn_fn",
                                       "hc_ffn_base",
                                       "hc_ffn_scale"};
  for (int l = 0; l < 40; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    const std::string attn = p + "attn.";
    const std::string engram = p + "engram.";
    for (const std::string& name : every) params.push_back(p + name);
    if (among(l, {2, 8, 14, 20})) {
      for (const std::string name :
           {"compressor.fused_wkv_wgate.weight", "compressor.norm.weight", "indexer.wk.weight", "indexer.k_norm.weight"})
        params.push_back(attn + name);
    }
    if (among(l, {2, 8, 14, 20, 24, 28, 32, 36})) {
      for (const std::string name : {"indexer.wq_b.weight", "indexer.wq_b.weight_scale", "indexer.weights_proj.weight"})
        params.push_back(attn + name);
    }
    if (among(l, {1, 14})) {
      for (const std::string name : {"wkv.weight", "wkv.weight_scale", "q_weight", "k_weight"}) params.push_back(engram + name);
    }
  }
  for (std::string& name : expert_params(40)) params.push_back(std::move(name));
  for (std::string& name : v41_table_params()) params.push_back(std::move(name));
  return params;
}

std::vector<std::string> v41_draft_params() {
  std::vector<std::string> params{"draft.model.main_proj.weight",
                                  "draft.model.main_proj.weight_scale",
                                  "draft.model.main_norm.weight",
                                  "draft.model.norm.weight",
                                  "draft.model.markov_head.markov_w1.weight",
                                  "draft.model.markov_head.markov_w2.weight",
                                  "draft.model.confidence_head.proj.weight"};
  // A stage has what an ordinary layer has.
  for (const std::string& name : v41_runtime_params()) {
    const std::string ordinary = "model.layers.3.";
    if (name.compare(0, ordinary.size(), ordinary) != 0) continue;
    for (const std::string s : {"0", "1", "2"}) params.push_back("draft.model.layers." + s + "." + name.substr(ordinary.size()));
  }
  return params;
}

std::vector<std::string> v41_vision_params() {
  Tensors tensors;
  vision(tensors);
  std::vector<std::string> params;
  for (const InventoryTensor& tensor : tensors) params.push_back(tensor.name);
  return params;
}

std::vector<std::string> expert_names(int layers, int experts) {
  std::vector<std::string> names;
  for (int l = 0; l < layers; ++l) {
    for (int e = 0; e < experts; ++e) {
      for (const std::string part : {"w1.weight", "w1.scale", "w2.weight", "w2.scale", "w3.weight", "w3.scale"}) {
        names.push_back("layers." + std::to_string(l) + ".ffn.experts." + std::to_string(e) + "." + part);
      }
    }
  }
  return names;
}

std::string v4_flash_config() {
  return R"({"model_type":"deepseek_v4","hidden_size":4096,"num_hidden_layers":43,"moe_intermediate_size":2048,"n_routed_experts":256,
    "num_experts_per_tok":6,"n_shared_experts":1,"num_hash_layers":3,"num_attention_heads":64,"head_dim":512,"q_lora_rank":1024,
    "o_lora_rank":1024,"o_groups":8,"index_n_heads":64,"index_head_dim":128,"hc_mult":4,"vocab_size":129280,"expert_dtype":"fp4",
    "compress_ratios":[0,0,)" +
         repeated("4,128", 20) + R"(,4,0,0,0],"quantization_config":{"quant_method":"fp8","weight_block_size":[128,128]}})";
}

std::string v4_pro_config() {
  return R"({"model_type":"deepseek_v4","hidden_size":7168,"num_hidden_layers":61,"moe_intermediate_size":3072,"n_routed_experts":384,
    "num_experts_per_tok":6,"n_shared_experts":1,"num_hash_layers":3,"num_attention_heads":128,"head_dim":512,"q_lora_rank":1536,
    "o_lora_rank":1024,"o_groups":16,"index_n_heads":64,"index_head_dim":128,"hc_mult":4,"vocab_size":129280,"expert_dtype":"fp4",
    "compress_ratios":[128,128,)" +
         repeated("4,128", 29) + R"(,4,0],"quantization_config":{"quant_method":"fp8","weight_block_size":[128,128]}})";
}

std::string v41_config() {
  return R"({"model_type":"deepseek_v41","text_config":{"model_type":"deepseek_v41_text","hidden_size":5120,"num_hidden_layers":40,
    "moe_intermediate_size":2304,"n_routed_experts":384,"num_experts_per_tok":6,"n_shared_experts":1,"num_attention_heads":64,
    "head_dim":512,"q_lora_rank":1280,"o_lora_rank":1024,"o_groups":8,"index_n_heads":32,"index_head_dim":128,"hc_mult":4,
    "vocab_size":129280,"compress_ratios":[0,0,)" +
         repeated("2", 18) + "," + repeated("1", 20) + R"(,0,0,0],"kv_source_layer_ids":[2,8,14,20],
    "index_source_layer_ids":[2,8,14,20,24,28,32,36],"engram_layer_ids":[1,14],"engram_max_ngram_size":4,"engram_n_heads":8,
    "engram_head_dim":256,"num_nextn_predict_layers":3,"dspark_target_layer_ids":[37,38,39],"dspark_markov_rank":256,
    "dspark_n_routed_experts":128},"quantization_config":{"quant_method":"fp8","weight_block_size":[32,32],"expert_dtype":"fp4"}})";
}

std::string v41_full_config() {
  std::string text = v41_config();
  text = replaced(std::move(text), "\"text_config\"",
                  R"("vision_config":{"num_hidden_layers":32,"hidden_size":1024,"num_attention_heads":16,"intermediate_size":2816,
    "patch_size":14,"downsample_ratio":3},"text_config")");
  return text;
}

std::string v41_demo_config() {
  std::string text = v41_config();
  text = replaced(std::move(text), "\"hidden_size\":5120", "\"hidden_size\":256");
  text = replaced(std::move(text), "\"moe_intermediate_size\":2304", "\"moe_intermediate_size\":384");
  text = replaced(std::move(text), "\"num_attention_heads\":64", "\"num_attention_heads\":16");
  text = replaced(std::move(text), "\"q_lora_rank\":1280", "\"q_lora_rank\":32");
  text = replaced(std::move(text), "\"o_lora_rank\":1024", "\"o_lora_rank\":32");
  text = replaced(std::move(text), "\"o_groups\":8", "\"o_groups\":2");
  text = replaced(std::move(text), "\"index_n_heads\":32", "\"index_n_heads\":8");
  text = replaced(std::move(text), "\"vocab_size\":129280", "\"vocab_size\":4096");
  text = replaced(std::move(text), "\"engram_head_dim\":256", "\"engram_head_dim\":32");
  return text;
}

std::string v41_tiny_config(int hidden, int intermediate, int experts) {
  return R"({"model_type":"deepseek_v41","text_config":{"num_hidden_layers":1,"num_experts_per_tok":1,"n_shared_experts":1,
    "num_attention_heads":2,"head_dim":32,"q_lora_rank":32,"o_lora_rank":32,"o_groups":1,"index_n_heads":1,"index_head_dim":32,
    "hc_mult":2,"vocab_size":64,"compress_ratios":[0],"kv_source_layer_ids":[],"index_source_layer_ids":[],"hidden_size":)" +
         std::to_string(hidden) + ",\"moe_intermediate_size\":" + std::to_string(intermediate) +
         ",\"n_routed_experts\":" + std::to_string(experts) +
         R"(},"quantization_config":{"weight_block_size":[32,32],"expert_dtype":"fp4"}})";
}

std::string v41_divided_config(int hidden, int intermediate, int experts) {
  std::string text = v41_tiny_config(hidden, intermediate, experts);
  text = replaced(std::move(text), "\"num_attention_heads\":2", "\"num_attention_heads\":32");
  text = replaced(std::move(text), "\"q_lora_rank\":32", "\"q_lora_rank\":128");
  text = replaced(std::move(text), "\"o_lora_rank\":32", "\"o_lora_rank\":128");
  text = replaced(std::move(text), "\"o_groups\":1", "\"o_groups\":8");
  return text;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  if (at == std::string::npos) throw std::runtime_error("no " + from);
  return text.replace(at, from.size(), to);
}

JsonValue json(std::string_view text) {
  return parse_json(text).value_or_throw();
}

}  // namespace headrace::testing
