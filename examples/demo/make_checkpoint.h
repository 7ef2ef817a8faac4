#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/checkpoint/safetensors.h"

namespace headrace {

/// The widths of the demo's model: the names, dtypes and structure of DeepSeek-V4.1's text model, with every width scaled down such that
/// what must divide still divides (128 into hidden and expert width, 32x32 scale blocks into every FP8 matrix, 8 heads of 512 an output
/// group).
struct DemoModel {
  int layers = 40;
  int experts = 384;
  int experts_per_token = 6;
  int hidden = 256;
  int moe_intermediate = 384;
  int heads = 16;
  int head_dim = 512;
  int rope_head_dim = 64;
  int q_lora = 32;
  int o_lora = 32;
  int o_groups = 2;
  int index_heads = 8;
  int index_head_dim = 128;
  int hc_mult = 4;
  int engram_head_dim = 32;
  int engram_heads = 8;
  int engram_ngram_max = 4;
  int vocab = 4096;
  std::uint64_t seed = 41;
};

/// 40 layers, about 2.5 GB; small: 6 layers, under 400 MB, of which one has Engram tensors and one a compressor and an indexer.
DemoModel demo_model(bool small);
/// Every tensor of the checkpoint, layer after layer, then the top.
std::vector<TensorSpec> demo_tensors(const DemoModel& model);
/// Bytes of all tensors together.
std::int64_t demo_checkpoint_bytes(const DemoModel& model);
/// Whether `dir` holds the finished checkpoint of exactly this model.
bool demo_checkpoint_exists(const std::filesystem::path& dir, const DemoModel& model);

using DemoProgress = std::function<void(std::int64_t bytes_done, std::int64_t bytes_total)>;

/// Makes the checkpoint at `dir` unless it is there: shards, index and config.json, filled with seeded pseudo-random bytes. All is written
/// into `dir`.partial and renamed at the end, so that `dir` is whole or absent; a killed run leaves `dir`.partial, which the next run takes
/// over. Two runs at once wait for each other. A folder at `dir` that holds another model of the demo is replaced, any other folder is
/// refused. Calls `progress` on the calling thread. Uses two threads.
Status make_demo_checkpoint(const std::filesystem::path& dir, const DemoModel& model, const DemoProgress& progress = {});

}  // namespace headrace
