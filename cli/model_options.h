#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/checkpoint/checkpoint.h"
#include "receiver/models/family.h"

namespace headrace::cli {

/// What the command line says about a model and how an engine's ranks divide it.
struct ModelOptions {
  std::string family = "auto";
  std::string variant = "plain";
  std::string layout = "tp1";
  std::int32_t redundant_experts = 0;
  std::vector<std::string> scopes{"target"};  // models that the engine holds
  std::string dtype = "auto";                 // of floating-point tensors in live storage: f32, f16, bf16; auto: as the checkpoint has them
};
/// kInvalidArgument: a layout or a dtype that is none.
Result<ModelRequest> model_request(const ModelOptions& options, std::int32_t rank);

/// What says which model it is: a checkpoint's headers and config, or config.json alone. Weights are not read and need not be there.
struct ModelSource {
  std::optional<Checkpoint> checkpoint;
  std::optional<JsonValue> lone_config;  // of a folder without safetensors files

  const JsonValue* config() const { return checkpoint ? checkpoint->config() : lone_config ? &*lone_config : nullptr; }
  std::span<const CheckpointTensor> tensors() const {
    return checkpoint ? std::span<const CheckpointTensor>(checkpoint->tensors()) : std::span<const CheckpointTensor>();
  }
};
/// `path`: a safetensors file, a folder of them, or a folder with a config.json and none of them.
Result<ModelSource> open_model_source(const std::string& path);
/// The config.json of a folder, whatever else is in it.
Result<ModelSource> open_config(const std::string& folder);

}  // namespace headrace::cli
