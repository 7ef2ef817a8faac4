#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace headrace {

/// How tensor parallelism divides the weight of a module.
enum class Cut : std::uint8_t {
  kWhole,    // every rank holds all of it
  kRows,     // outputs; the bias goes with them
  kColumns,  // inputs; every rank holds the whole bias
  kHeads,    // rows, by query heads
  kKvHeads,  // rows, by key and value heads, which several ranks share when there are fewer heads than ranks
  kVocab,    // rows of a vocabulary that is padded
};

/// What a decoder or encoder does with one checkpoint tensor that is no routed expert's.
struct DenseName {
  enum class Kind : std::uint8_t { kUnknown, kDropped, kTensor } kind = Kind::kUnknown;
  std::string module;  // up to the leaf, as in the checkpoint
  std::string leaf;    // "weight", "bias", "weight_scale_inv", …
  std::string param;   // the engine's parameter
  std::string_view shard;
  int part = 0;   // which part of the parameter, by rows
  int parts = 1;  // that the parameter is stacked of
  Cut cut = Cut::kWhole;
};

/// What of config.json changes the meaning of names.
struct DenseNaming {
  bool latent_attention = false;  // DeepSeek-V2 and later: queries, keys and values come from compressed ones
  bool compressed_query = false;  // latent_attention whose queries are compressed too
  bool drop_lm_head = false;      // it is the embedding
  std::int64_t layers = 0;        // of the model
  std::int64_t draft_layers = 0;  // behind them; the engine's loader drops their names
};

/// Whose layer a name is of. Names without a layer are the model's.
enum class LayerOwner : std::uint8_t { kModel, kDraft, kNobody };
LayerOwner layer_owner(const DenseNaming& naming, std::string_view name);

/// Of a name as Llama, Mistral, Qwen, Mixtral, GLM-MoE, DeepSeek-V2 and V3 or BERT have it. Time does not depend on the model.
DenseName dense_name(const DenseNaming& naming, std::string_view name);

}  // namespace headrace
