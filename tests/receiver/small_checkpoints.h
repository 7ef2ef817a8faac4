#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/json.h"

/// Headers and config.json of models as they are published, at any size.
namespace headrace::testing {

struct SmallCheckpoint {
  std::string config;
  std::vector<CheckpointTensor> tensors;
};

struct LlamaSizes {
  std::string model_type = "llama";  // llama, mistral, qwen2 (biases), qwen3 (norms of queries and keys)
  std::int64_t layers = 1;
  std::int64_t hidden = 16;
  std::int64_t heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t head_dim = 4;
  std::int64_t intermediate = 24;
  std::int64_t vocabulary = 128;
  std::optional<bool> tied = false;
  bool lm_head = true;
  Dtype dtype = Dtype::kBF16;
};
SmallCheckpoint llama_checkpoint(const LlamaSizes& sizes);

struct BertSizes {
  std::int64_t layers = 1;
  std::int64_t hidden = 16;
  std::int64_t heads = 4;
  std::int64_t intermediate = 32;
  std::int64_t vocabulary = 100;
  std::int64_t positions = 64;
  Dtype dtype = Dtype::kF32;
};
SmallCheckpoint bert_checkpoint(const BertSizes& sizes);

struct MoeSizes {
  std::string model_type = "qwen3_moe";  // mixtral: block_sparse_moe and w1, w2, w3
  std::int64_t layers = 1;
  std::int64_t experts = 4;
  std::int64_t hidden = 16;
  std::int64_t intermediate = 8;
  std::string form = "bf16";  // bf16, fp8 (blocks of `block`), mxfp4, nvfp4, joint, joint_turned (one tensor for all experts)
  std::int64_t block = 4;
  bool dense = true;  // attention and the like too
};
SmallCheckpoint moe_checkpoint(const MoeSizes& sizes);

/// DeepSeek-V3 with its linears in FP8 blocks of 4: layer 0 has no experts, layer 1 has 4 and a shared one, layer 2 is the draft's.
/// Hidden 16, 4 heads of 8 + 2 and 8, queries from 12, keys and values from 8 (or queries from the hidden state itself).
SmallCheckpoint deepseek_v3_checkpoint(bool compressed_query);

}  // namespace headrace::testing
