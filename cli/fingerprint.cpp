#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "cli/commands.h"
#include "cli/fingerprints.h"
#include "cli/output.h"

namespace headrace::cli {
namespace {

bool is_on_disk(const std::vector<std::string>& source) {
  std::error_code ignored;
  return source.size() == 1 && source.front().find("://") == std::string::npos && std::filesystem::exists(source.front(), ignored);
}

Result<JobValues> values_of(const FingerprintOptions& options) {
  if (is_on_disk(options.source)) {
    const Result<Checkpoint> checkpoint = Checkpoint::open(options.source.front());
    if (!checkpoint.ok()) return checkpoint.status();
    Result<std::vector<TensorValue>> values = checkpoint_values(checkpoint.value(), options.threads);
    if (!values.ok()) return values.status();
    return JobValues{std::move(values).value(), {}, {}};
  }
  const Result<Target> target = parse_target(options.source, options.job);
  if (!target.ok()) return target.status();
  Result<std::vector<ReceiverClient>> clients = connect_target(target.value());
  if (!clients.ok()) return clients.status();
  return job_values(clients.value());
}

}  // namespace

ExitCode fingerprint(const FingerprintOptions& options) {
  const JsonOutput json(options.json, "fingerprint");
  const Result<JobValues> values = values_of(options);
  if (!values.ok()) return finish_failed(values.status(), json);
  JsonValue::Array items;
  for (const TensorValue& tensor : values.value().tensors) {
    if (json.text_allowed()) {
      fmt::print("{}  {} {}  {}\n", fingerprint_text(tensor.sum), dtype_name(tensor.dtype), to_string(tensor.shape), tensor.name);
    }
    if (!json.wanted()) continue;
    items.push_back(JsonObject()
                        .set("name", tensor.name)
                        .set("dtype", dtype_name(tensor.dtype))
                        .set("shape", json_array(tensor.shape))
                        .set("fingerprint", fingerprint_text(tensor.sum))
                        .done());
  }
  std::vector<std::string> defects;
  for (const JobValues::Defect& defect : values.value().defects) defects.push_back(fmt::format("{}: {}", defect.name, defect.what));
  for (const std::string& defect : defects) say(fmt::format("headrace: {}\n", defect));
  return finish_done(json, json.document().set("tensors", items).set("defects", json_array(defects)),
                     values.value().defects.empty() ? ExitCode::kDone : ExitCode::kDifference);
}

}  // namespace headrace::cli
