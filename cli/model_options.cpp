#include "cli/model_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <utility>

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

Result<std::optional<Dtype>> live_dtype(const std::string& word) {
  constexpr std::array<std::pair<std::string_view, Dtype>, 3> kWords{{{"f32", Dtype::kF32}, {"f16", Dtype::kF16}, {"bf16", Dtype::kBF16}}};
  if (word == "auto") return std::optional<Dtype>();
  for (const auto& [known, dtype] : kWords)
    if (word == known) return std::optional(dtype);
  return Status(Code::kInvalidArgument, fmt::format("dtype {}: expected auto, f32, f16 or bf16", word));
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
  const Result<std::optional<Dtype>> dtype = live_dtype(options.dtype);
  if (!dtype.ok()) return dtype.status();
  request.dtype = dtype.value();
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
