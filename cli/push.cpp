#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/receiver_client.h"
#include "core/checkpoint/checkpoint.h"
#include "sender_sdk/report_json.h"
#include "sender_sdk/sender.h"

namespace headrace::cli {
namespace {

/// The step after the newest that is served or was attempted, in its run; push/1 where nothing ever was.
Result<WeightVersion> next_version(const Target& target) {
  Result<std::vector<ReceiverClient>> clients = connect_target(target);
  if (!clients.ok()) return clients.status();
  std::optional<WeightVersion> newest;
  for (ReceiverClient& client : clients.value()) {
    const Result<wire::StatusReply> status = client.status();
    if (!status.ok()) return status.status();
    for (const std::string& text : {status.value().version, status.value().attempted_version}) {
      const std::optional<WeightVersion> version = parse_weight_version(text);
      if (version && (!newest || newest->run != version->run || newest->step < version->step)) newest = version;
    }
  }
  if (!newest) return WeightVersion{"push", 1};
  return WeightVersion{newest->run, newest->step + 1};
}

Result<WeightVersion> version_of(const PushOptions& options, const Target& target) {
  if (options.version.empty()) return next_version(target);
  const std::optional<WeightVersion> version = parse_weight_version(options.version);
  if (!version) return Status(Code::kInvalidArgument, fmt::format("version '{}': expected RUN/STEP, such as run-1/17", options.version));
  return *version;
}

SenderOptions sender_options(const PushOptions& options, const Target& target) {
  SenderOptions sender;
  sender.job = target.job;
  sender.sender = options.sender;
  sender.endpoints = target.endpoints;
  sender.data_path = options.data_path;
  sender.threads = options.threads;
  sender.bucket_bytes = options.bucket_bytes;
  sender.connect_timeout_ms = options.connect_timeout_ms;
  sender.deadline_ms = options.deadline_ms;
  return sender;
}

Result<UpdateReport> update(Sender& sender, const Checkpoint& checkpoint, const PushOptions& options, const WeightVersion& version) {
  UpdateOptions update;
  update.version = version;
  update.scopes = options.scopes;
  update.some_ranks = options.some_ranks;
  const std::vector<const CheckpointTensor*> tensors = natural_order(checkpoint);
  for (const CheckpointTensor* tensor : tensors) {
    update.entries.push_back(SenderEntry{tensor->name, tensor->dtype, tensor->shape, std::nullopt});
  }
  HEADRACE_RETURN_IF_ERROR(sender.open(std::move(update)));
  Progress progress("pushing", static_cast<std::uint64_t>(checkpoint.total_bytes()));
  std::uint64_t done = 0;
  for (const CheckpointTensor* tensor : tensors) {
    const Result<std::span<const std::byte>> bytes = checkpoint.bytes(*tensor);
    if (!bytes.ok()) {
      sender.abort(bytes.status().message());
      return bytes.status();
    }
    HEADRACE_RETURN_IF_ERROR(sender.add(tensor->name, TensorView{bytes.value().data(), {}}));
    done += bytes.value().size();
    progress.update(done);
  }
  return sender.finish();
}

void print_report(const UpdateReport& report) {
  std::uint64_t tensors = 0;
  for (const wire::Receipt& receipt : report.receipts) tensors += receipt.tensors;
  const double seconds = report.total_ms / 1000;
  fmt::print("{} is served by {} rank{}: {} on the wire ({}), {} applied, {} tensors, {:.0f} ms, {}/s, {}\n", report.version.to_string(),
             report.receipts.size(), report.receipts.size() == 1 ? "" : "s", human_bytes(report.wire_bytes), report.data_path,
             human_bytes(report.applied_bytes), tensors, report.total_ms,
             human_bytes(seconds > 0 ? static_cast<std::uint64_t>(static_cast<double>(report.applied_bytes) / seconds) : 0),
             report.proven ? "every fingerprint equal" : "not proven");
}

}  // namespace

ExitCode push(const PushOptions& options) {
  const JsonOutput json(options.json, "push");
  const Result<Target> target = parse_target(options.to, options.job);
  if (!target.ok()) return finish_failed(target.status(), json);
  const Result<Checkpoint> checkpoint = Checkpoint::open(options.checkpoint);
  if (!checkpoint.ok()) return finish_failed(checkpoint.status(), json);
  const Result<WeightVersion> version = version_of(options, target.value());
  if (!version.ok()) return finish_failed(version.status(), json);
  const Result<std::unique_ptr<Sender>> sender = Sender::connect(sender_options(options, target.value()));
  if (!sender.ok()) return finish_failed(sender.status(), json);
  const Result<UpdateReport> report = update(*sender.value(), checkpoint.value(), options, version.value());
  if (!report.ok()) return finish_failed(report.status(), json);
  if (json.text_allowed()) print_report(report.value());
  return finish_done(json, json.document().set("report", report_json(report.value())),
                     report.value().proven ? ExitCode::kDone : ExitCode::kDifference);
}

}  // namespace headrace::cli
