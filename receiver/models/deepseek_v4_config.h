#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/checkpoint/json.h"

namespace headrace {

/// What the routed experts of a checkpoint are made of.
enum class DeepseekV4ExpertFormat : std::uint8_t {
  kMxfp4,  // FP4, an E8M0 scale per 32 columns
  kNvfp4,  // FP4, an E4M3 scale per 16 columns, and a global one per matrix
  kBf16,
};
std::string_view to_string(DeepseekV4ExpertFormat format);

/// What the layout of a DeepSeek-V4 text model depends on, read from config.json and checked. Sizes are elements.
struct DeepseekV4Config {
  bool v41 = false;
  std::int64_t hidden = 0;
  std::int64_t layers = 0;
  std::int64_t intermediate = 0;  // of one expert
  std::int64_t experts = 0;
  std::int64_t experts_per_token = 0;
  std::int64_t shared_experts = 0;
  std::int64_t hash_layers = 0;  // V4: the first layers route by a table of token ids
  std::int64_t vocab = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t q_lora = 0;
  std::int64_t o_lora = 0;
  std::int64_t o_groups = 0;
  std::int64_t index_heads = 0;
  std::int64_t index_dim = 0;
  std::int64_t hc_mult = 0;
  std::int64_t block = 0;                     // rows and columns that share one scale in a dense linear
  std::vector<std::int64_t> compress_ratios;  // one per layer, more are the draft's
  std::vector<std::int64_t> kv_sources;       // V4.1: layers with a compressor
  std::vector<std::int64_t> index_sources;    // V4.1: layers with an indexer
  std::vector<std::int64_t> engram_layers;
  std::int64_t engram_width = 0;  // features of one token's rows over all hash columns
  std::string linear_scale;       // what the engine calls the scale of a dense linear

  DeepseekV4ExpertFormat expert_format = DeepseekV4ExpertFormat::kMxfp4;
  std::vector<std::string> not_nvfp4;  // fnmatch patterns of blocks' experts, e.g. "layers.0.ffn.experts", that stay MXFP4

  /// Of the experts of a block, named by its prefix, e.g. "layers.3.".
  DeepseekV4ExpertFormat expert_format_of(const std::string& block) const;
};

/// The draft of a V4.1 model: blocks "mtp.<stage>.".
struct DeepseekV4Draft {
  std::int64_t stages = 0;
  std::int64_t experts = 0;      // of one stage
  std::int64_t targets = 0;      // layers of the target whose states it reads
  std::int64_t markov_rank = 0;  // width of the token embedding that corrects logits
};

/// The image part of a V4.1 model.
struct DeepseekV4Vision {
  std::int64_t blocks = 0;
  std::int64_t width = 0;
  std::int64_t intermediate = 0;
  std::int64_t patch = 0;       // pixels a side
  std::int64_t downsample = 0;  // patches a side that make one token
};

/// kInvalidArgument names the key that is missing, of the wrong kind or out of range; kUnsupported a value that the family has not.
Result<DeepseekV4Config> read_deepseek_v4_config(const JsonValue& config);

/// The same errors; kUnsupported when the model has no such part.
Result<DeepseekV4Draft> read_deepseek_v4_draft(const JsonValue& config);
Result<DeepseekV4Vision> read_deepseek_v4_vision(const JsonValue& config);

/// The model_type of config.json; empty when it has none.
std::string model_type_of(const JsonValue& config);
bool is_deepseek_v4(std::string_view model_type);

}  // namespace headrace
