#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/checkpoint/json.h"

namespace headrace {

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
};

/// kInvalidArgument names the key that is missing, of the wrong kind or out of range; kUnsupported a value that the family has not.
Result<DeepseekV4Config> read_deepseek_v4_config(const JsonValue& config);

/// The model_type of config.json; empty when it has none.
std::string model_type_of(const JsonValue& config);
bool is_deepseek_v4(std::string_view model_type);

}  // namespace headrace
