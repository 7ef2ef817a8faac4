// A trainer process on the public SDK: it holds the weights of some experts (and, if it is the lead, everything else), changes them at each
// step, and syncs them to the inference ranks of a job. Steps come from standard input, one number a line; what happened goes to standard
// output, one line of JSON each. `seq 1 3 | headrace-trainer ...` runs three updates.
#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/json_text.h"
#include "examples/demo/demo_values.h"
#include "sender_sdk/report_json.h"
#include "sender_sdk/sender.h"

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

struct TrainerOptions {
  std::string checkpoint;
  std::string job;
  std::string sender;
  std::vector<std::string> senders;  // all of the update, the lead first
  std::int64_t experts_from = 0;
  std::int64_t experts_to = 0;  // exclusive
  std::string run = "demo";
  std::int64_t bucket_bytes = std::int64_t{64} << 20;
  std::uint64_t pause_in_step = 0;  // 0: never
  bool registered = false;

  bool lead() const { return senders.front() == sender; }
};

constexpr std::uint32_t kStagingBuffers = 2;
constexpr const char* kUsage =
    "usage: headrace-trainer --checkpoint DIR --job JOB --sender ID --senders LEAD,OTHER... --experts FROM:TO\n"
    "                        [--run RUN] [--bucket-bytes N] [--registered] [--pause-in-step STEP]\n";

void say(const JsonValue& line) {
  fmt::print("{}\n", json_text(line, -1));
  std::fflush(stdout);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t from = 0;
  for (std::size_t at = text.find(separator); at != std::string::npos; at = text.find(separator, from)) {
    parts.push_back(text.substr(from, at - from));
    from = at + 1;
  }
  parts.push_back(text.substr(from));
  return parts;
}

template <class Number>
bool parse_number(std::string_view text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

std::optional<TrainerOptions> parse_options(int argc, char** argv) {
  TrainerOptions options;
  std::map<std::string, std::string> values;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--registered") {
      options.registered = true;
    } else if (word.starts_with("--") && i + 1 < argc) {
      values[word] = argv[++i];
    } else {
      return std::nullopt;
    }
  }
  options.checkpoint = values["--checkpoint"];
  options.job = values["--job"];
  options.sender = values["--sender"];
  options.senders = split(values["--senders"], ',');
  if (values.count("--run") != 0) options.run = values["--run"];
  const std::vector<std::string> range = split(values["--experts"], ':');
  bool good = !options.checkpoint.empty() && !options.job.empty() && !options.sender.empty() && range.size() == 2 &&
              parse_number(range[0], options.experts_from) && parse_number(range[1], options.experts_to);
  if (values.count("--bucket-bytes") != 0) good = good && parse_number(values["--bucket-bytes"], options.bucket_bytes);
  if (values.count("--pause-in-step") != 0) good = good && parse_number(values["--pause-in-step"], options.pause_in_step);
  return good ? std::optional(options) : std::nullopt;
}

/// The expert that a checkpoint name belongs to; none for the rest of the model.
std::optional<std::int64_t> expert_of(std::string_view name) {
  constexpr std::string_view kExperts = ".ffn.experts.";
  const std::size_t at = name.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view rest = name.substr(at + kExperts.size());
  std::int64_t expert = 0;
  return parse_number(rest.substr(0, rest.find('.')), expert) ? std::optional(expert) : std::nullopt;
}

/// One trainer's share of the model.
class Trainer {
 public:
  explicit Trainer(TrainerOptions options) : options_(std::move(options)) {}

  Status connect() {
    Result<Checkpoint> checkpoint = Checkpoint::open(options_.checkpoint);
    if (!checkpoint.ok()) return checkpoint.status();
    checkpoint_.emplace(std::move(checkpoint).value());
    std::size_t bytes = 0;
    for (const CheckpointTensor* tensor : natural_order(*checkpoint_)) {
      const std::optional<std::int64_t> expert = expert_of(tensor->name);
      const bool mine = expert ? *expert >= options_.experts_from && *expert < options_.experts_to : options_.lead();
      if (!mine) continue;
      tensors_.push_back({tensor, bytes});
      bytes += (static_cast<std::size_t>(tensor->bytes()) + 63) / 64 * 64;
    }
    SenderOptions sender;
    sender.job = options_.job;
    sender.sender = options_.sender;
    sender.bucket_bytes = options_.bucket_bytes;
    sender.staging_buffers = kStagingBuffers;
    Result<std::unique_ptr<Sender>> connected = Sender::connect(sender);
    if (!connected.ok()) return connected.status();
    sender_ = std::move(connected).value();
    return hold_weights(bytes);
  }

  /// The optimizer's step: every byte of every tensor changes.
  Status train(std::uint64_t step) {
    for (const Held& held : tensors_) {
      const Result<std::span<const std::byte>> base = checkpoint_->bytes(*held.tensor);
      if (!base.ok()) return base.status();
      apply_demo_version(held.tensor->name, step, base.value(), weights_.data() + held.offset);
    }
    return ok_status();
  }

  Result<UpdateReport> sync(std::uint64_t step) {
    UpdateOptions update;
    update.version = WeightVersion{options_.run, step};
    update.senders = options_.senders;
    for (const Held& held : tensors_) {
      const TensorView view{weights_.data() + held.offset, {}};
      update.entries.push_back(SenderEntry{held.tensor->name, held.tensor->dtype, held.tensor->shape, std::nullopt, view});
    }
    HEADRACE_RETURN_IF_ERROR(sender_->open(update));
    std::int64_t added = 0;
    Clock::time_point next = Clock::now() + std::chrono::milliseconds(100);
    for (const Held& held : tensors_) {
      HEADRACE_RETURN_IF_ERROR(sender_->add(held.tensor->name, TensorView{weights_.data() + held.offset, {}}));
      added += held.tensor->bytes();
      if (step == options_.pause_in_step && added > (kStagingBuffers + 1) * options_.bucket_bytes) pause(added);
      if (Clock::now() < next) continue;
      next = Clock::now() + std::chrono::milliseconds(100);
      say(JsonObject().set("event", "progress").set("bytes", added).done());
    }
    return sender_->finish();
  }

  std::int64_t bytes() const {
    std::int64_t bytes = 0;
    for (const Held& held : tensors_) bytes += held.tensor->bytes();
    return bytes;
  }
  std::size_t tensors() const { return tensors_.size(); }

 private:
  struct Held {
    const CheckpointTensor* tensor = nullptr;
    std::size_t offset = 0;  // in weights_
  };

  Status hold_weights(std::size_t bytes) {
    if (!options_.registered) {
      own_weights_.resize(bytes);
      weights_ = own_weights_;
      return ok_status();
    }
    Result<std::span<std::byte>> memory = sender_->allocate(bytes);
    if (!memory.ok()) return memory.status();
    weights_ = memory.value();
    return ok_status();
  }

  /// More has been packed than all staging buffers hold, so at least one bucket has come back CONSUMED. Waits for a line or for the end.
  void pause(std::int64_t added) {
    say(JsonObject().set("event", "paused").set("bytes", added).set("buckets_consumed_min", 1).done());
    std::string line;
    std::getline(std::cin, line);
    options_.pause_in_step = 0;
  }

  TrainerOptions options_;
  std::optional<Checkpoint> checkpoint_;
  std::vector<Held> tensors_;
  std::unique_ptr<Sender> sender_;
  std::vector<std::byte> own_weights_;
  std::span<std::byte> weights_;  // own_weights_, or registered memory of the sender
};

void run_step(Trainer& trainer, std::uint64_t step) {
  const Clock::time_point start = Clock::now();
  const Status trained = trainer.train(step);
  const double train_ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  if (trained.ok()) say(JsonObject().set("event", "trained").set("step", step).set("train_ms", train_ms).done());
  const Result<UpdateReport> report = trained.ok() ? trainer.sync(step) : Result<UpdateReport>(trained);
  if (report.ok()) {
    say(JsonObject().set("event", "synced").set("step", step).set("report", report_json(report.value())).done());
  } else {
    say(JsonObject().set("event", "failed").set("step", step).set("error", report.status().to_string()).done());
  }
}

int run(int argc, char** argv) {
  const std::optional<TrainerOptions> options = parse_options(argc, argv);
  if (!options) {
    fmt::print(stderr, "{}", kUsage);
    return 2;
  }
  Trainer trainer(*options);
  if (const Status connected = trainer.connect(); !connected.ok()) {
    fmt::print(stderr, "{}: {}\n", options->sender, connected.to_string());
    return 3;
  }
  say(JsonObject().set("event", "ready").set("tensors", trainer.tensors()).set("bytes", trainer.bytes()).done());
  std::string line;
  while (std::getline(std::cin, line)) {
    std::uint64_t step = 0;
    if (!parse_number(line, step)) {
      fmt::print(stderr, "{}: '{}' is no step\n", options->sender, line);
      return 2;
    }
    run_step(trainer, step);
  }
  return 0;
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  return headrace::run(argc, argv);
}
