#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "receiver/models/config_reader.h"
#include "receiver/models/dense_names.h"
#include "receiver/models/layout_writer.h"

namespace headrace {

/// What the layout of everything but routed experts depends on. Sizes are elements.
struct DenseModel {
  std::string model_type;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t head_dim = 0;        // 0: not checked
  std::vector<std::int64_t> block;  // rows and columns that share one scale; empty: scales must divide their weight
  bool tied = false;                // lm_head is the embedding
  bool open = false;                // a name that is not known is a parameter of its own, whole on every rank
  DenseNaming naming;
};

/// `tensors` tell whether the model has an lm_head of its own where the config does not say. Failures stay in the reader.
DenseModel read_dense_model(ConfigReader& config, std::span<const CheckpointTensor> tensors);

/// Storages and rules of these tensors on rank `tp_rank` of `tp`. Names that the engine drops are passed over. The writer fails, by name
/// and numbers, for a name that is not known (unless the model is open), a part of a stacked parameter that is missing, and every cut that
/// leaves a rest.
void write_dense_tensors(LayoutWriter& writer, const DenseModel& model, std::span<const CheckpointTensor* const> tensors, std::int64_t tp,
                         std::int64_t tp_rank);

/// Drops what the engine drops and knows nothing else.
NameScan dense_scan(const DenseNaming& naming);

}  // namespace headrace
