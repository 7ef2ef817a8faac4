#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/receiver_client.h"
#include "core/checkpoint/checkpoint.h"
#include "receiver/sync_plan.h"
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

/// What is to be committed, and by whom.
struct Goal {
  WeightVersion version;
  Target target;
};

/// The ranks of a job that lack the version that the others hold, and that version. Where the target names endpoints, it is they that lack
/// it.
Result<Goal> find_repair(const Target& target) {
  Result<std::vector<ReceiverClient>> clients = connect_target({target.job, {}});
  if (!clients.ok()) return clients.status();
  const auto named = [&](const std::string& endpoint) {
    return std::find(target.endpoints.begin(), target.endpoints.end(), endpoint) != target.endpoints.end();
  };
  std::set<std::string> held;
  std::vector<std::pair<std::string, std::string>> ranks;  // endpoint, version
  for (ReceiverClient& client : clients.value()) {
    const Result<wire::StatusReply> status = client.status();
    if (!status.ok()) return status.status();
    const std::string version = named(client.endpoint()) ? std::string() : status.value().version;
    if (!version.empty()) held.insert(version);
    ranks.emplace_back(client.endpoint(), version);
  }
  const auto refused = [&](const std::string& why) {
    return Status(Code::kFailedPrecondition, fmt::format("repair of job {}: {}", target.job, why));
  };
  if (held.empty()) return refused("no rank holds a version; push a whole update");
  if (held.size() > 1) return refused(fmt::format("its ranks hold {}; push a whole update", fmt::join(held, " and ")));
  Goal goal{*parse_weight_version(*held.begin()), target};
  for (const auto& [endpoint, version] : ranks) {
    if (target.endpoints.empty() && version.empty()) goal.target.endpoints.push_back(endpoint);
  }
  if (goal.target.endpoints.empty()) return refused(fmt::format("every rank holds {}", *held.begin()));
  return goal;
}

Result<Goal> goal_of(const PushOptions& options, const Target& target) {
  // A version and endpoints say it all; otherwise the other ranks are asked.
  if (options.repair && (options.version.empty() || target.endpoints.empty())) {
    Result<Goal> goal = find_repair(target);
    if (!goal.ok() || options.version.empty() || goal.value().version.to_string() == options.version) return goal;
    return Status(Code::kFailedPrecondition,
                  fmt::format("repair to {}: the others hold {}", options.version, goal.value().version.to_string()));
  }
  if (options.version.empty()) {
    Result<WeightVersion> next = next_version(target);
    if (!next.ok()) return next.status();
    return Goal{next.value(), target};
  }
  const std::optional<WeightVersion> version = parse_weight_version(options.version);
  if (!version) return Status(Code::kInvalidArgument, fmt::format("version '{}': expected RUN/STEP, such as run-1/17", options.version));
  return Goal{*version, target};
}

/// The tensors that `--only` and `--ignore` leave, in their natural order. kInvalidArgument when that is none.
Result<std::vector<const CheckpointTensor*>> chosen_tensors(const Checkpoint& checkpoint, const PushOptions& options) {
  std::vector<const CheckpointTensor*> tensors = natural_order(checkpoint);
  std::erase_if(tensors, [&](const CheckpointTensor* tensor) {
    return (!options.only.empty() && !matches_any(options.only, tensor->name)) || matches_any(options.ignore, tensor->name);
  });
  if (tensors.empty()) return Status(Code::kInvalidArgument, "--only and --ignore leave no tensor of the checkpoint");
  return tensors;
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
  update.repair = options.repair;
  const Result<std::vector<const CheckpointTensor*>> tensors = chosen_tensors(checkpoint, options);
  if (!tensors.ok()) return tensors.status();
  std::uint64_t total = 0;
  for (const CheckpointTensor* tensor : tensors.value()) {
    SenderEntry& entry = update.entries.emplace_back(SenderEntry{tensor->name, tensor->dtype, tensor->shape, std::nullopt});
    if (sender.wants_value(entry.name)) {
      const Result<std::span<const std::byte>> bytes = checkpoint.bytes(*tensor);
      if (!bytes.ok()) return bytes.status();
      entry.value = TensorView{bytes.value().data(), {}};
    }
    total += static_cast<std::uint64_t>(byte_count(tensor->dtype, tensor->shape).value_or(0));
  }
  HEADRACE_RETURN_IF_ERROR(sender.open(update));
  Progress progress("pushing", total);
  std::uint64_t done = 0;
  for (const std::uint32_t entry : sender.order()) {
    const CheckpointTensor* tensor = tensors.value()[entry];
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
  if (report.ignored == 0) return;
  fmt::print("{} tensor{} that the engine drops: {}{}\n", report.ignored, report.ignored == 1 ? "" : "s",
             fmt::join(report.ignored_names, ", "), report.ignored > report.ignored_names.size() ? ", ..." : "");
}

}  // namespace

ExitCode push(const PushOptions& options) {
  const JsonOutput json(options.json, "push");
  const Result<Target> target = parse_target(options.to, options.job);
  if (!target.ok()) return finish_failed(target.status(), json);
  const Result<Checkpoint> checkpoint = Checkpoint::open(options.checkpoint);
  if (!checkpoint.ok()) return finish_failed(checkpoint.status(), json);
  const Result<Goal> goal = goal_of(options, target.value());
  if (!goal.ok()) return finish_failed(goal.status(), json);
  const Result<std::unique_ptr<Sender>> sender = Sender::connect(sender_options(options, goal.value().target));
  if (!sender.ok()) return finish_failed(sender.status(), json);
  const Result<UpdateReport> report = update(*sender.value(), checkpoint.value(), options, goal.value().version);
  if (!report.ok()) return finish_failed(report.status(), json);
  if (json.text_allowed()) print_report(report.value());
  return finish_done(json, json.document().set("report", report_json(report.value())),
                     report.value().proven ? ExitCode::kDone : ExitCode::kDifference);
}

}  // namespace headrace::cli
