#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "core/checkpoint/json.h"

/// Published DeepSeek-V4 checkpoints as lists of literal numbers. Shares nothing with receiver/: it judges it.
namespace headrace::testing {

struct InventoryTensor {
  std::string name;
  Dtype dtype;
  Shape shape;
};

/// All 96,085 tensors of V4.1-Flash, drafts, vision and Engram tables included.
std::vector<InventoryTensor> v41_inventory();
/// The engine's parameters for its text model, Engram tables included: 1,255.
std::vector<std::string> v41_runtime_params();
/// The two Engram layers' table parameters among them.
std::vector<std::string> v41_table_params();

/// Those of its draft, told from the target's by "draft.": 97. The embedding and the output head that it shares are not among them.
std::vector<std::string> v41_draft_params();
/// Those of the image parts: 266, called as in the checkpoint.
std::vector<std::string> v41_vision_params();

/// Names of the routed experts of a backbone, without drafts.
std::vector<std::string> expert_names(int layers, int experts);
/// Runtime names of the routed experts' parameters, four a layer.
std::vector<std::string> expert_params(int layers);

/// config.json, reduced to what a layout depends on. V4-Flash has 43 layers, V4-Pro 61, V4.1 40.
std::string v4_flash_config();
std::string v4_pro_config();
std::string v41_config();
/// The same with the image tower's config beside the text's.
std::string v41_full_config();
/// V4.1's structure at the widths of the demo: hidden 256, experts of 384, padded to 512.
std::string v41_demo_config();
/// One V4.1-like layer, everything small, of these widths.
std::string v41_tiny_config(int hidden, int intermediate, int experts);
/// The same with heads, groups and ranks of projections that 8 ranks divide, and that fill whole tiles of scales.
std::string v41_divided_config(int hidden, int intermediate, int experts);

/// With `to` for the first `from`; throws when there is none.
std::string replaced(std::string text, const std::string& from, const std::string& to);
JsonValue json(std::string_view text);

}  // namespace headrace::testing
