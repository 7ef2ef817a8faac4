#pragma once

#include <string>
#include <vector>

#include "examples/demo/make_checkpoint.h"

/// What the files of the demo checkpoint hold, apart from the tensors' bytes. Pure functions of the model.
namespace headrace {

struct DemoShard {
  std::string file;
  std::vector<TensorSpec> tensors;
};

/// One shard a layer, then one for the top.
std::vector<DemoShard> demo_shards(const DemoModel& model);
std::string demo_config_json(const DemoModel& model);
std::string demo_index_json(const DemoModel& model, const std::vector<DemoShard>& shards);
/// Text that two models share only when they are the same in everything.
std::string demo_stamp(const DemoModel& model);

}  // namespace headrace
