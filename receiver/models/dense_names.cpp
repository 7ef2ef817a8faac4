#include "receiver/models/dense_names.h"

#include <array>
#include <charconv>
#include <optional>
#include <span>

namespace headrace {
namespace {

/// A module by the end of its path. `target` replaces that end in the name of the parameter.
struct Module {
  std::string_view path;
  std::string_view target;
  std::string_view shard;
  int part;
  int parts;
  Cut cut;
};

constexpr Module alone(std::string_view path, Cut cut) {
  return {path, path, "", 0, 1, cut};
}

constexpr std::array kModules{
    Module{"self_attn.q_proj", "self_attn.qkv_proj", "q", 0, 3, Cut::kHeads},
    Module{"self_attn.k_proj", "self_attn.qkv_proj", "k", 1, 3, Cut::kKvHeads},
    Module{"self_attn.v_proj", "self_attn.qkv_proj", "v", 2, 3, Cut::kKvHeads},
    alone("self_attn.o_proj", Cut::kColumns),
    alone("self_attn.q_norm", Cut::kWhole),
    alone("self_attn.k_norm", Cut::kWhole),
    Module{"mlp.gate_proj", "mlp.gate_up_proj", "0", 0, 2, Cut::kRows},
    Module{"mlp.up_proj", "mlp.gate_up_proj", "1", 1, 2, Cut::kRows},
    alone("mlp.down_proj", Cut::kColumns),
    alone("input_layernorm", Cut::kWhole),
    alone("post_attention_layernorm", Cut::kWhole),
    alone("norm", Cut::kWhole),
    alone("embed_tokens", Cut::kVocab),
    alone("lm_head", Cut::kVocab),
    alone("shared_head.head", Cut::kVocab),  // of a layer that drafts
    // Mixtures of experts, beside the routed ones.
    alone("mlp.gate", Cut::kWhole),
    alone("block_sparse_moe.gate", Cut::kWhole),
    alone("mlp.shared_expert_gate", Cut::kWhole),
    Module{"shared_expert.gate_proj", "shared_expert.gate_up_proj", "0", 0, 2, Cut::kRows},
    Module{"shared_expert.up_proj", "shared_expert.gate_up_proj", "1", 1, 2, Cut::kRows},
    alone("shared_expert.down_proj", Cut::kColumns),
    Module{"shared_experts.gate_proj", "shared_experts.gate_up_proj", "0", 0, 2, Cut::kRows},
    Module{"shared_experts.up_proj", "shared_experts.gate_up_proj", "1", 1, 2, Cut::kRows},
    alone("shared_experts.down_proj", Cut::kColumns),
    // BERT.
    Module{"attention.self.query", "attention.self.qkv_proj", "q", 0, 3, Cut::kHeads},
    Module{"attention.self.key", "attention.self.qkv_proj", "k", 1, 3, Cut::kKvHeads},
    Module{"attention.self.value", "attention.self.qkv_proj", "v", 2, 3, Cut::kKvHeads},
    alone("intermediate.dense", Cut::kRows),
    alone("output.dense", Cut::kColumns),
    alone("LayerNorm", Cut::kWhole),
    alone("pooler.dense", Cut::kWhole),
    alone("embeddings.word_embeddings", Cut::kVocab),
    alone("embeddings.position_embeddings", Cut::kVocab),
    alone("embeddings.token_type_embeddings", Cut::kVocab),
};

/// Attention over compressed keys and values. What compresses is small and held by every rank.
constexpr std::array kLatentModules{
    alone("self_attn.q_proj", Cut::kHeads),
    Module{"self_attn.q_a_proj", "self_attn.fused_qkv_a_proj", "0", 0, 2, Cut::kWhole},
    Module{"self_attn.kv_a_proj_with_mqa", "self_attn.fused_qkv_a_proj", "1", 1, 2, Cut::kWhole},
    alone("self_attn.q_a_layernorm", Cut::kWhole),
    alone("self_attn.kv_a_layernorm", Cut::kWhole),
    alone("self_attn.q_b_proj", Cut::kHeads),
    alone("self_attn.kv_b_proj", Cut::kHeads),
};

constexpr std::array<std::string_view, 5> kLeaves{"weight", "bias", "weight_scale_inv", "weight_scale", "e_score_correction_bias"};
/// Buffers that an engine computes by itself.
constexpr std::array<std::string_view, 4> kBuffers{"inv_freq", "cos_cached", "sin_cached", "position_ids"};

bool ends_with_path(std::string_view text, std::string_view path) {
  return text.ends_with(path) && (text.size() == path.size() || text[text.size() - path.size() - 1] == '.');
}

const Module* find_module(std::span<const Module> modules, std::string_view path) {
  for (const Module& module : modules)
    if (ends_with_path(path, module.path)) return &module;
  return nullptr;
}

/// The number after "layers.", if there is one.
std::optional<std::int64_t> layer_of(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  const std::size_t at = name.find(kLayers);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view rest = name.substr(at + kLayers.size());
  std::int64_t layer = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
  if (error != std::errc() || end == rest.data() + rest.size() || *end != '.') return std::nullopt;
  return layer;
}

template <std::size_t N>
bool holds(const std::array<std::string_view, N>& words, std::string_view word) {
  for (const std::string_view known : words)
    if (known == word) return true;
  return false;
}

}  // namespace

LayerOwner layer_owner(const DenseNaming& naming, std::string_view name) {
  const auto layer = layer_of(name);
  if (!layer || *layer < naming.layers) return LayerOwner::kModel;
  return *layer < naming.layers + naming.draft_layers ? LayerOwner::kDraft : LayerOwner::kNobody;
}

DenseName dense_name(const DenseNaming& naming, std::string_view name) {
  DenseName result;
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos || dot == 0) return result;
  result.module = name.substr(0, dot);
  result.leaf = name.substr(dot + 1);
  const LayerOwner owner = layer_owner(naming, name);
  if (owner == LayerOwner::kNobody) return result;
  if (owner == LayerOwner::kDraft || holds(kBuffers, result.leaf) || (naming.drop_lm_head && ends_with_path(result.module, "lm_head"))) {
    result.kind = DenseName::Kind::kDropped;
    return result;
  }
  const Module* module = naming.latent_attention ? find_module(kLatentModules, result.module) : nullptr;
  if (module == nullptr) module = find_module(kModules, result.module);
  if (module == nullptr || !holds(kLeaves, result.leaf)) return result;
  result.kind = DenseName::Kind::kTensor;
  const bool uncompressed = naming.latent_attention && !naming.compressed_query && ends_with_path(result.module, "kv_a_proj_with_mqa");
  const Module found = uncompressed ? alone(module->path, Cut::kWhole) : *module;
  result.param = result.module.substr(0, result.module.size() - found.path.size());
  result.param += std::string(found.target) + "." + result.leaf;
  result.shard = found.shard;
  result.part = found.part;
  result.parts = found.parts;
  result.cut = found.cut == Cut::kColumns && result.leaf == "bias" ? Cut::kWhole : found.cut;
  return result;
}

}  // namespace headrace
