#include "examples/demo/demo.h"

#include <fmt/color.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <set>
#include <utility>

#include "cli/output.h"
#include "cli/progress.h"
#include "core/transport/run_directory.h"

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kEngine = "engine-0";
constexpr std::uint64_t kMemoryWanted = std::uint64_t{9} << 30;
constexpr std::uint64_t kDiskSpare = std::uint64_t{1} << 30;
constexpr std::int64_t kStartTimeoutMs = 60'000;
constexpr std::int64_t kUpdateTimeoutMs = 120'000;
constexpr std::int64_t kTornTimeoutMs = 5'000;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Sum of a file's "key: N kB" lines whose key is one of `keys`, in bytes.
std::uint64_t kilobytes_of(const std::string& path, const std::set<std::string>& keys) {
  std::ifstream file(path);
  std::uint64_t bytes = 0;
  for (std::string text; std::getline(file, text);) {
    const std::size_t colon = text.find(':');
    if (colon == std::string::npos || keys.count(text.substr(0, colon)) == 0) continue;
    bytes += std::strtoull(text.c_str() + colon + 1, nullptr, 10) * 1024;
  }
  return bytes;
}

std::uint64_t disk_free(const std::filesystem::path& path) {
  struct statvfs place{};
  return ::statvfs(path.c_str(), &place) == 0 ? static_cast<std::uint64_t>(place.f_bavail) * place.f_frsize : 0;
}

std::string event_of(const JsonValue& line) {
  const JsonValue* event = line.find("event");
  return event != nullptr && event->as_string() != nullptr ? *event->as_string() : std::string();
}

std::string text_of(const JsonValue& line, std::string_view key) {
  const JsonValue* value = line.find(key);
  return value != nullptr && value->as_string() != nullptr ? *value->as_string() : std::string();
}

/// The next event of a trainer; nullopt when none came in time.
Result<std::optional<JsonValue>> next_event(ChildProcess& trainer, std::int64_t timeout_ms) {
  Result<std::optional<std::string>> text = trainer.read_line(timeout_ms);
  if (!text.ok()) return text.status();
  if (!text.value()) return std::optional<JsonValue>();
  Result<JsonValue> value = parse_json(*text.value());
  if (!value.ok()) return value.status();
  return std::optional<JsonValue>(std::move(value).value());
}

}  // namespace

Demo::Demo(DemoOptions options) : options_(std::move(options)), job_(fmt::format("demo-{}", ::getpid())) {
  result_.ranks = kRanks;
  result_.senders = 2;
}

void Demo::line(const std::string& label, const std::string& text) const {
  fmt::print("{:<12} {}\n", label, text);
  std::fflush(stdout);
}

Demo::~Demo() {
  // After a failure: ranks that are asked to leave take their sockets along, killed ones would not.
  trainers_.clear();
  for (const ChildProcess& rank : ranks_) rank.send_signal(SIGTERM);
  for (ChildProcess& rank : ranks_) (void)rank.wait(kTornTimeoutMs).ok();
  ranks_.clear();
  if (const Result<RunDirectory> directory = RunDirectory::open(job_); directory.ok()) directory.value().clean(false);
}

Status Demo::run() {
  HEADRACE_RETURN_IF_ERROR(make_checkpoint());
  HEADRACE_RETURN_IF_ERROR(start_ranks());
  HEADRACE_RETURN_IF_ERROR(start_trainers());
  fmt::print("\n{}\n", table_heading());
  bool equal = true;
  for (std::uint64_t step = 1; step <= kUpdates; ++step) {
    HEADRACE_RETURN_IF_ERROR(update(step));
    const DemoStep& last = result_.steps.back();
    equal = equal && last.bytes_different == 0 && last.fingerprints_equal && last.wire_bytes == judge_->wire_bytes();
    if (!equal) return ok_status();  // what follows would only hide it
  }
  fmt::print("\n");
  HEADRACE_RETURN_IF_ERROR(kill_a_trainer(kUpdates + 1));
  HEADRACE_RETURN_IF_ERROR(recover(kUpdates + 2));
  HEADRACE_RETURN_IF_ERROR(stop());
  const DemoFault& fault = result_.fault;
  result_.verified =
      equal && result_.bytes_different == 0 && fault.injected && fault.state_after == "torn" && !fault.served_while_torn && fault.recovered;
  return ok_status();
}

void Demo::choose_size() {
  const std::uint64_t memory = kilobytes_of("/proc/meminfo", {"MemAvailable"});
  const std::uint64_t disk = disk_free(options_.work);
  const bool cached = demo_checkpoint_exists(options_.work / "checkpoint", demo_model(false));
  const std::uint64_t disk_wanted = cached ? 0 : static_cast<std::uint64_t>(demo_checkpoint_bytes(demo_model(false))) + kDiskSpare;
  if (options_.small || (memory >= kMemoryWanted && disk >= disk_wanted)) return;
  options_.small = true;
  line("size", fmt::format("small, since {} of memory and {} of disk are free; the full demo wants {} and {}", cli::human_bytes(memory),
                           cli::human_bytes(disk), cli::human_bytes(kMemoryWanted), cli::human_bytes(disk_wanted)));
}

Status Demo::make_checkpoint() {
  std::error_code error;
  std::filesystem::create_directories(options_.work / "logs", error);
  if (error) return errno_status(error.value(), "create " + options_.work.string());
  choose_size();
  model_ = demo_model(options_.small);
  bucket_bytes_ = (options_.small ? std::int64_t{8} : std::int64_t{64}) << 20;
  checkpoint_ = options_.work / (options_.small ? "checkpoint-small" : "checkpoint");
  const bool cached = demo_checkpoint_exists(checkpoint_, model_);
  const Clock::time_point start = Clock::now();
  {
    cli::Progress progress("checkpoint", static_cast<std::uint64_t>(demo_checkpoint_bytes(model_)));
    HEADRACE_RETURN_IF_ERROR(make_demo_checkpoint(
        checkpoint_, model_, [&](std::int64_t done, std::int64_t) { progress.update(static_cast<std::uint64_t>(done)); }));
  }
  line("checkpoint", fmt::format("DeepSeek-V4.1-shaped, {} layers, {} experts a layer, {} in {} ({})", model_.layers, model_.experts,
                                 cli::human_bytes(static_cast<std::uint64_t>(demo_checkpoint_bytes(model_))), checkpoint_.string(),
                                 cached ? "cached" : fmt::format("made in {:.1f} s", seconds_since(start))));
  Result<Judge> judge = Judge::open({.checkpoint = checkpoint_, .job = job_, .ranks = kRanks});
  if (!judge.ok()) return judge.status();
  judge_.emplace(std::move(judge).value());
  return ok_status();
}

Status Demo::start_ranks() {
  const Clock::time_point start = Clock::now();
  // Only the config: a rank that has no weight file cannot read one.
  const std::filesystem::path config = options_.work / (options_.small ? "config-small" : "config");
  std::error_code error;
  std::filesystem::create_directories(config, error);
  if (!error) {
    std::filesystem::copy_file(checkpoint_ / "config.json", config / "config.json", std::filesystem::copy_options::overwrite_existing,
                               error);
  }
  if (error) return errno_status(error.value(), "copy config.json to " + config.string());
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    ChildOptions child;
    child.name = fmt::format("rank {}", rank);
    child.words = {(options_.programs / "headrace").string(),
                   "serve",
                   "--job",
                   job_,
                   "--config",
                   config.string(),
                   "--family",
                   "deepseek_v4",
                   "--variant",
                   "padded",
                   "--layout",
                   fmt::format("ep{}", kRanks),
                   "--rank",
                   std::to_string(rank),
                   "--engine",
                   kEngine};
    child.error_log = (options_.work / "logs" / fmt::format("rank-{}.log", rank)).string();
    child.death_signal = SIGTERM;
    Result<ChildProcess> started = ChildProcess::start(child);
    if (!started.ok()) return started.status();
    ranks_.push_back(std::move(started).value());
  }
  for (ChildProcess& rank : ranks_) {
    const Result<std::optional<std::string>> ready = rank.read_line(kStartTimeoutMs);
    if (!ready.ok() || !ready.value()) {
      return Status(Code::kUnavailable, fmt::format("{} did not start; see {}", rank.name(), (options_.work / "logs").string()));
    }
  }
  HEADRACE_RETURN_IF_ERROR(judge_->find_storages());
  line("ranks",
       fmt::format("{} x headrace serve, one engine, EP{}, padded experts: {} of live storage, as the oracle lists it, in {:.1f} s", kRanks,
                   kRanks, cli::human_bytes(judge_->live_bytes()), seconds_since(start)));
  return ok_status();
}

Result<ChildProcess> Demo::start_trainer(std::uint32_t index) const {
  const int half = model_.experts / 2;
  ChildOptions child;
  child.name = fmt::format("trainer-{}", index);
  child.words = {(options_.programs / "examples" / "headrace-trainer").string(),
                 "--checkpoint",
                 checkpoint_.string(),
                 "--job",
                 job_,
                 "--sender",
                 child.name,
                 "--senders",
                 "trainer-0,trainer-1",
                 "--experts",
                 index == 0 ? fmt::format("0:{}", half) : fmt::format("{}:{}", half, model_.experts),
                 "--bucket-bytes",
                 std::to_string(bucket_bytes_)};
  if (options_.registered) child.words.emplace_back("--registered");
  if (index == 1) {
    child.words.emplace_back("--pause-in-step");
    child.words.push_back(std::to_string(kUpdates + 1));
  }
  child.error_log = (options_.work / "logs" / (child.name + ".log")).string();
  return ChildProcess::start(child);
}

Status Demo::start_trainers() {
  for (std::uint32_t index = 0; index < 2; ++index) {
    Result<ChildProcess> started = start_trainer(index);
    if (!started.ok()) return started.status();
    trainers_.push_back(std::move(started).value());
  }
  trainer_bytes_ = 0;
  for (ChildProcess& trainer : trainers_) {
    const Result<std::optional<JsonValue>> ready = next_event(trainer, kStartTimeoutMs);
    if (!ready.ok() || !ready.value()) {
      return Status(Code::kUnavailable, fmt::format("{} did not start; see {}", trainer.name(), (options_.work / "logs").string()));
    }
    trainer_bytes_ += ready.value()->find("bytes")->as_uint64().value_or(0);
  }
  line("trainers", fmt::format("trainer-0 leads, with experts below {} and all that is no expert; trainer-1 has the other experts{}",
                               model_.experts / 2, options_.registered ? "; ranks read their memory in place" : ""));
  return ok_status();
}

Status Demo::send_step(std::uint64_t step) {
  for (ChildProcess& trainer : trainers_) HEADRACE_RETURN_IF_ERROR(trainer.write_line(std::to_string(step)));
  return ok_status();
}

Status Demo::wait_for_trainers(std::uint64_t step, std::map<std::uint32_t, JsonValue>& events) {
  const Clock::time_point due = Clock::now() + std::chrono::milliseconds(kUpdateTimeoutMs);
  cli::Progress progress(fmt::format("update {}", step), trainer_bytes_);
  std::map<std::uint32_t, std::uint64_t> bytes;
  while (events.size() < trainers_.size()) {
    if (Clock::now() > due) return Status(Code::kDeadlineExceeded, fmt::format("update {}: the trainers are not done", step));
    for (std::uint32_t index = 0; index < trainers_.size(); ++index) {
      if (events.count(index) != 0) continue;
      Result<std::optional<JsonValue>> event = next_event(trainers_[index], 20);
      if (!event.ok()) return event.status();
      if (!event.value()) continue;
      const std::string kind = event_of(*event.value());
      if (kind == "synced" || kind == "failed") events[index] = std::move(*event.value());
      if (kind == "progress") bytes[index] = event.value()->find("bytes")->as_uint64().value_or(0);
    }
    std::uint64_t done = 0;
    for (const auto& [index, count] : bytes) done += count;
    progress.update(done);
  }
  return ok_status();
}

Status Demo::update(std::uint64_t step) {
  HEADRACE_RETURN_IF_ERROR(send_step(step));
  std::map<std::uint32_t, JsonValue> events;
  HEADRACE_RETURN_IF_ERROR(wait_for_trainers(step, events));
  DemoStep record;
  for (const auto& [index, event] : events) {
    if (event_of(event) != "synced") {
      return Status(Code::kInternal, fmt::format("update {}: {}: {}", step, trainers_[index].name(), text_of(event, "error")));
    }
    add_report(record, *event.find("report"), index == 0);
  }
  note_memory();
  HEADRACE_RETURN_IF_ERROR(judge_->no_weight_file_open());
  if (options_.poke && step == 2) {
    HEADRACE_RETURN_IF_ERROR(judge_->poke(2));
    line("poke", "one bit of rank 2 flipped");
  }
  HEADRACE_RETURN_IF_ERROR(judge_step(record, step));
  result_.steps.push_back(record);
  const bool good = record.bytes_different == 0 && record.fingerprints_equal;
  const std::string text = table_line(record);
  if (::isatty(STDOUT_FILENO) == 1) {
    fmt::print(fg(good ? fmt::terminal_color::green : fmt::terminal_color::red), "{}", text);
    fmt::print("\n");
  } else {
    fmt::print("{}\n", text);
  }
  std::fflush(stdout);
  if (record.wire_bytes != judge_->wire_bytes()) {
    line("wire", fmt::format("{} bytes were packed, the oracle counts {}", record.wire_bytes, judge_->wire_bytes()));
  }
  return ok_status();
}

Status Demo::judge_step(DemoStep& step, std::uint64_t version) {
  cli::Progress progress("judging", judge_->live_bytes());
  const Result<oracle::Comparison> compared = judge_->compare(version, [&](std::uint64_t done, std::uint64_t) { progress.update(done); });
  if (!compared.ok()) return compared.status();
  step.bytes_compared = compared.value().bytes_compared;
  step.bytes_different = compared.value().bytes_different;
  result_.bytes_compared += step.bytes_compared;
  result_.bytes_different += step.bytes_different;
  if (step.bytes_different != 0) line("oracle", compared.value().to_string());
  const Status fingerprints = judge_->compare_fingerprints(version);
  if (!fingerprints.ok()) line("judge", fingerprints.to_string());
  step.fingerprints_equal = fingerprints.ok() && step.proven && step.receipts == kRanks;
  const Result<std::vector<wire::StatusReply>> statuses = judge_->statuses();
  if (!statuses.ok()) return statuses.status();
  for (const wire::StatusReply& status : statuses.value()) {
    result_.receiver_extra_bytes_max = std::max(result_.receiver_extra_bytes_max, status.memory_extra_bytes_max);
  }
  return ok_status();
}

Status Demo::wait_for_state(wire::SessionState state, std::int64_t timeout_ms) {
  const Clock::time_point due = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (true) {
    const Result<std::vector<wire::StatusReply>> statuses = judge_->statuses();
    if (!statuses.ok()) return statuses.status();
    std::string states;
    bool all = statuses.value().size() == kRanks;
    for (const wire::StatusReply& status : statuses.value()) {
      all = all && status.state == static_cast<std::uint32_t>(state);
      states += fmt::format(" {}", wire::session_state_name(static_cast<wire::SessionState>(status.state)));
    }
    result_.fault.state_after = all ? std::string(wire::session_state_name(state)) : states.substr(1);
    if (all) return ok_status();
    if (Clock::now() > due) {
      return Status(Code::kDeadlineExceeded, fmt::format("ranks are{}, expected {}", states, wire::session_state_name(state)));
    }
  }
}

Result<bool> Demo::guard_is_open() const {
  const Result<RunDirectory> directory = RunDirectory::open(job_);
  if (!directory.ok()) return directory.status();
  ChildOptions child;
  child.name = "guard reader";
  child.words = {(options_.programs / "examples" / "headrace-guard-reader").string(), directory.value().guard_path(kEngine).string()};
  Result<ChildProcess> reader = ChildProcess::start(child);
  if (!reader.ok()) return reader.status();
  const Result<int> code = reader.value().wait(kTornTimeoutMs);
  if (!code.ok()) return code.status();
  if (code.value() != 0 && code.value() != 1) return Status(Code::kInternal, fmt::format("guard reader ended with {}", code.value()));
  return code.value() == 0;
}

Status Demo::kill_a_trainer(std::uint64_t step) {
  const Result<bool> open_before = guard_is_open();
  if (!open_before.ok()) return open_before.status();
  if (!open_before.value()) return Status(Code::kInternal, "the guard is closed although every rank has committed the same version");
  HEADRACE_RETURN_IF_ERROR(send_step(step));
  const Clock::time_point due = Clock::now() + std::chrono::milliseconds(kUpdateTimeoutMs);
  std::string kind;
  while (kind != "paused" && Clock::now() < due) {
    const Result<std::optional<JsonValue>> event = next_event(trainers_[1], 1'000);
    if (!event.ok()) return event.status();
    if (event.value()) kind = event_of(*event.value());
    if (kind == "failed") return Status(Code::kInternal, "trainer-1: " + text_of(*event.value(), "error"));
  }
  HEADRACE_RETURN_IF_ERROR(wait_for_state(wire::SessionState::kApplying, kUpdateTimeoutMs));
  trainers_[1].send_signal(SIGKILL);
  const Clock::time_point killed = Clock::now();
  const Result<int> code = trainers_[1].wait(kTornTimeoutMs);
  if (!code.ok()) return code.status();
  result_.fault.injected = kind == "paused" && code.value() == -SIGKILL;
  std::string told;
  while (told.empty() && seconds_since(killed) * 1'000 < static_cast<double>(kTornTimeoutMs)) {
    const Result<std::optional<JsonValue>> event = next_event(trainers_[0], 100);
    if (!event.ok()) return event.status();
    if (event.value() && event_of(*event.value()) == "failed") told = text_of(*event.value(), "error");
  }
  if (told.empty()) return Status(Code::kDeadlineExceeded, "the lead was not told of the other trainer's death");
  const double told_s = seconds_since(killed);
  HEADRACE_RETURN_IF_ERROR(wait_for_state(wire::SessionState::kTorn, kTornTimeoutMs));
  const Result<bool> open = guard_is_open();
  if (!open.ok()) return open.status();
  result_.fault.served_while_torn = open.value();
  line("fault", fmt::format("trainer-1 killed in update {} after buckets were consumed; every rank is torn, the guard is {}", step,
                            open.value() ? "OPEN" : "closed"));
  line("", fmt::format("the lead was told in {:.0f} ms: {}", told_s * 1'000, told));
  return ok_status();
}

Status Demo::recover(std::uint64_t step) {
  Result<ChildProcess> started = start_trainer(1);
  if (!started.ok()) return started.status();
  trainers_[1] = std::move(started).value();
  const Result<std::optional<JsonValue>> ready = next_event(trainers_[1], kStartTimeoutMs);
  if (!ready.ok()) return ready.status();
  HEADRACE_RETURN_IF_ERROR(send_step(step));
  std::map<std::uint32_t, JsonValue> events;
  HEADRACE_RETURN_IF_ERROR(wait_for_trainers(step, events));
  DemoStep record;
  for (const auto& [index, event] : events) {
    if (event_of(event) != "synced") {
      return Status(Code::kInternal, fmt::format("recovery: {}: {}", trainers_[index].name(), text_of(event, "error")));
    }
    add_report(record, *event.find("report"), index == 0);
  }
  HEADRACE_RETURN_IF_ERROR(judge_step(record, step));
  const Result<bool> open = guard_is_open();
  if (!open.ok()) return open.status();
  result_.fault.recovered = record.bytes_different == 0 && record.fingerprints_equal && open.value();
  note_memory();
  line("recovery", fmt::format("a new trainer-1 and a full update to {}: {} of {} differ, the guard is {}", record.version,
                               record.bytes_different, cli::human_bytes(record.bytes_compared), open.value() ? "open" : "CLOSED"));
  return ok_status();
}

void Demo::note_memory() {
  std::uint64_t bytes = 0;
  std::vector<pid_t> pids{::getpid()};
  for (const ChildProcess& child : ranks_) pids.push_back(child.pid());
  for (const ChildProcess& child : trainers_) pids.push_back(child.pid());
  for (const pid_t pid : pids) bytes += kilobytes_of(fmt::format("/proc/{}/smaps_rollup", pid), {"Pss_Anon", "Pss_Shmem"});
  resident_bytes_max_ = std::max(resident_bytes_max_, bytes);
}

Status Demo::stop() {
  trainers_.clear();
  for (ChildProcess& rank : ranks_) rank.send_signal(SIGTERM);
  for (ChildProcess& rank : ranks_) {
    const Result<int> code = rank.wait(10'000);
    if (!code.ok()) return code.status();
    if (code.value() != 0) return Status(Code::kInternal, fmt::format("{} ended with {}", rank.name(), code.value()));
  }
  ranks_.clear();
  std::error_code ignored;
  if (std::filesystem::exists(RunDirectory::base() / job_, ignored) && !std::filesystem::is_empty(RunDirectory::base() / job_, ignored)) {
    return Status(Code::kInternal, fmt::format("the ranks left files in {}", (RunDirectory::base() / job_).string()));
  }
  line("memory", fmt::format("{} resident in all processes, page cache apart; {} at most in a rank beyond its storage",
                             cli::human_bytes(resident_bytes_max_), cli::human_bytes(result_.receiver_extra_bytes_max)));
  return ok_status();
}

}  // namespace headrace
