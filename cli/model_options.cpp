#include "cli/model_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

namespace headrace::cli {
namespace {

namespace fs = std::filesystem;

bool has_config_alone(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error) || !fs::exists(folder / "config.json", error)) return false;
  const fs::directory_iterator entries(folder, error);
  return !error && std::none_of(begin(entries), end(entries), [](const fs::directory_entry& entry) {
    return entry.path().extension() == ".safetensors" || entry.path().filename() == "model.safetensors.index.json";
  });
}

}  // namespace

Result<ModelRequest> model_request(const ModelOptions& options, std::int32_t rank) {
  ModelRequest request;
  request.family = options.family;
  request.variant = options.variant;
  request.rank = rank;
  request.redundant_experts = options.redundant_experts;
  request.scopes = options.scopes;
  Result<ParallelLayout> parallel = parse_layout(options.layout);
  if (!parallel.ok()) return parallel.status();
  request.parallel = parallel.value();
  return request;
}

Result<ModelSource> open_config(const std::string& folder) {
  Result<JsonValue> config = read_json_file((fs::path(folder) / "config.json").string());
  if (!config.ok()) return config.status();
  ModelSource source;
  source.lone_config = std::move(config).value();
  return source;
}

Result<ModelSource> open_model_source(const std::string& path) {
  if (has_config_alone(path)) return open_config(path);
  Result<Checkpoint> checkpoint = Checkpoint::open(path, ParseMode::kStrict, DataPart::kIgnored);
  if (!checkpoint.ok()) return checkpoint.status();
  ModelSource source;
  source.checkpoint = std::move(checkpoint).value();
  return source;
}

}  // namespace headrace::cli
