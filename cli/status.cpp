#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/receiver_client.h"
#include "core/transport/run_directory.h"
#include "receiver/guard_page.h"

namespace headrace::cli {
namespace {

/// One place of the run directory and what its receiver says; `failure` where it says nothing.
struct RankStatus {
  FoundEndpoint place;
  std::optional<wire::StatusReply> reply;
  std::string failure;
};

struct EngineGuard {
  std::string job;
  std::string engine;
  std::string state;  // "open", "closed", or why it cannot be read
  bool open = false;
};

RankStatus ask(const FoundEndpoint& place) {
  RankStatus rank{place, std::nullopt, {}};
  if (!place.alive) {
    rank.failure = "dead; headrace doctor --clean removes what it left";
    return rank;
  }
  ClientOptions options;
  options.job = place.job;
  Result<ReceiverClient> client = ReceiverClient::connect(place.endpoint, options);
  if (!client.ok()) {
    rank.failure = client.status().to_string();
    return rank;
  }
  Result<wire::StatusReply> reply = client.value().status();
  if (reply.ok()) {
    rank.reply = std::move(reply).value();
  } else {
    rank.failure = reply.status().to_string();
  }
  return rank;
}

EngineGuard read_guard(const RunDirectory& directory, const std::string& engine) {
  EngineGuard guard{directory.job(), engine, {}, false};
  const Result<GuardView> view = GuardPage::read(directory.guard_path(engine));
  if (!view.ok()) {
    guard.state = view.status().to_string();
    return guard;
  }
  guard.open = view.value().open();
  guard.state = guard.open ? "open" : "closed";
  return guard;
}

void print_rank(const RankStatus& rank) {
  const std::string where = fmt::format("{}  {} rank {}", rank.place.job, rank.place.engine, rank.place.rank);
  if (!rank.reply) {
    fmt::print("{:<34} {}\n", where, rank.failure);
    return;
  }
  const wire::StatusReply& reply = *rank.reply;
  fmt::print("{:<34} {:<9} {:<20} {:>3} updates  {} storages, {}  {} {}  pid {}\n", where,
             wire::session_state_name(static_cast<wire::SessionState>(reply.state)), reply.version.empty() ? "-" : reply.version,
             reply.updates, reply.storages, human_bytes(reply.storage_bytes), reply.family, reply.layout, reply.pid);
  if (!reply.last_failure.empty()) fmt::print("{:<34} last failure: {}\n", "", reply.last_failure);
}

JsonValue rank_json(const RankStatus& rank) {
  JsonObject object;
  object.set("job", rank.place.job)
      .set("engine", rank.place.engine)
      .set("rank", rank.place.rank)
      .set("endpoint", rank.place.endpoint)
      .set("alive", rank.place.alive);
  if (!rank.reply) return object.set("failure", rank.failure).done();
  const wire::StatusReply& reply = *rank.reply;
  return object.set("ranks", reply.ranks)
      .set("pid", reply.pid)
      .set("state", wire::session_state_name(static_cast<wire::SessionState>(reply.state)))
      .set("version", reply.version)
      .set("attempted_version", reply.attempted_version)
      .set("serving", reply.serving)
      .set("updates", reply.updates)
      .set("storages", reply.storages)
      .set("storage_bytes", reply.storage_bytes)
      .set("engram_calls", reply.engram_calls)
      .set("memory_extra_bytes_max", reply.memory_extra_bytes_max)
      .set("table", reply.table.hex())
      .set("family", reply.family)
      .set("layout", reply.layout)
      .set("variant", reply.variant)
      .set("last_failure", reply.last_failure)
      .set("discards", reply.discards)
      .done();
}

JsonValue guard_json(const EngineGuard& guard) {
  return JsonObject().set("job", guard.job).set("engine", guard.engine).set("open", guard.open).set("state", guard.state).done();
}

}  // namespace

ExitCode status(const StatusOptions& options) {
  const JsonOutput json(options.json, "status");
  std::vector<RankStatus> ranks;
  std::vector<EngineGuard> guards;
  for (const std::string& job : options.job.empty() ? RunDirectory::jobs() : std::vector<std::string>{options.job}) {
    const Result<RunDirectory> directory = RunDirectory::open(job);
    if (!directory.ok()) return finish_failed(directory.status(), json);
    for (const FoundEndpoint& place : directory.value().endpoints()) {
      if (guards.empty() || guards.back().job != job || guards.back().engine != place.engine) {
        guards.push_back(read_guard(directory.value(), place.engine));
      }
      // A killed rank leaves its slot as it was: the page alone would still say open.
      if (EngineGuard& guard = guards.back(); guard.open && !place.alive) {
        guard.open = false;
        guard.state = fmt::format("open on its page, but rank {} is dead", place.rank);
      }
      ranks.push_back(ask(place));
    }
  }
  if (json.text_allowed()) {
    if (ranks.empty()) fmt::print("no receiver in {}\n", RunDirectory::base().string());
    for (const RankStatus& rank : ranks) print_rank(rank);
    for (const EngineGuard& guard : guards) fmt::print("{}  {} guard: {}\n", guard.job, guard.engine, guard.state);
  }
  JsonValue::Array rank_items;
  JsonValue::Array guard_items;
  for (const RankStatus& rank : ranks) rank_items.push_back(rank_json(rank));
  for (const EngineGuard& guard : guards) guard_items.push_back(guard_json(guard));
  if (!options.job.empty() && ranks.empty()) {
    return finish_failed(Status(Code::kUnavailable, fmt::format("job {}: no receiver", options.job)), json);
  }
  return finish_done(json, json.document().set("ranks", rank_items).set("guards", guard_items));
}

}  // namespace headrace::cli
