#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

/// What a rank of an engine holds of a DeepSeek-V4 model's dense tensors when they are cut by tensor parallelism or reordered for kernels,
/// computed element by element from the formulas of each form.
namespace headrace::oracle {

/// Sizes in elements, as config.json has them.
struct DenseModel {
  std::int64_t hidden = 0;
  std::int64_t shared = 0;  // features of the shared experts together
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t q_lora = 0;
  std::int64_t o_lora = 0;
  std::int64_t o_groups = 0;
  std::int64_t vocab = 0;
  std::int64_t block = 0;    // rows and columns that share a scale
  std::int64_t indexer = 0;  // rows of the indexer's query projection; 0: the layer has none
  std::int64_t engram = 0;   // columns of the Engram projection; 0: none
  std::int64_t hc_mult = 0;
};

enum class DenseScales { kBlocks, kRows, kSwizzled };

struct DenseForm {
  std::int64_t tp = 1;
  std::int64_t rank = 0;  // among the tp ranks
  DenseScales scales = DenseScales::kBlocks;
  bool mega_attention = false;
  bool grouped_wo_a = false;
};

using DenseBytes = std::vector<std::uint8_t>;
/// Bytes of a checkpoint tensor.
using DenseSource = std::function<const DenseBytes&(const std::string& name)>;

/// Expected bytes of every storage that a form touches, by runtime name: those of layer `layer`, the embedding and the head. `scale` is
/// what the engine calls the scale of a linear.
std::map<std::string, DenseBytes> dense_storages(const DenseModel& model, const DenseForm& form, int layer, const std::string& scale,
                                                 const DenseSource& source);

}  // namespace headrace::oracle
