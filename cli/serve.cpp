#include <fmt/format.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/model_options.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "core/base/digest.h"
#include "core/checkpoint/checkpoint.h"
#include "core/device/device.h"
#include "core/transport/run_directory.h"
#include "kernels/fingerprint.h"
#include "receiver/host_storage.h"
#include "receiver/models/family.h"
#include "receiver/receiver.h"

namespace headrace::cli {
namespace {

constexpr std::size_t kLoadBytesAtATime = std::size_t{256} << 20;

/// SIGTERM and SIGINT, blocked in this thread and in all that it starts, so that they can be waited for.
class StopSignals {
 public:
  StopSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }
  int wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
    return signal;
  }
  bool arrived() const {
    sigset_t pending{};
    sigpending(&pending);
    return sigismember(&pending, SIGTERM) == 1 || sigismember(&pending, SIGINT) == 1;
  }

 private:
  sigset_t set_{};
};

Result<ModelLayout> model_of(const ServeOptions& options) {
  Result<ModelRequest> request = model_request(options.model, options.rank);
  if (!request.ok()) return request.status();
  if (options.checkpoint.empty() && options.config.empty()) {
    return Status(Code::kInvalidArgument, "give --config or --checkpoint: the model must be known");
  }
  Result<ModelSource> source = options.checkpoint.empty() ? open_config(options.config) : open_model_source(options.checkpoint);
  if (!source.ok()) return source.status();
  return build_model(request.value(), source.value().config(), source.value().tensors());
}

/// The version of a cold load: the digest of the checkpoint's content, step 0.
Result<WeightVersion> checkpoint_version(const Checkpoint& checkpoint) {
  Hasher hasher;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    const Result<std::span<const std::byte>> bytes = checkpoint.bytes(tensor);
    if (!bytes.ok()) return bytes.status();
    const FingerprintSum sum = headrace::fingerprint(tensor_key(tensor.name, tensor.dtype, tensor.shape), 0, bytes.value());
    hasher.text(tensor.name).number(static_cast<std::uint64_t>(tensor.dtype)).text(to_string(tensor.shape));
    hasher.number(sum.lanes[0]).number(sum.lanes[1]);
  }
  return WeightVersion{hasher.finish().hex(), 0};
}

/// Feeds a checkpoint through the receiver's own path: index, runs, executor, coverage, fingerprints.
Result<wire::Receipt> load_checkpoint(Receiver& receiver, const std::string& path, const StopSignals& stop) {
  Result<Checkpoint> opened = Checkpoint::open(path);
  if (!opened.ok()) return opened.status();
  const Checkpoint& checkpoint = opened.value();
  Result<WeightVersion> version = checkpoint_version(checkpoint);
  if (!version.ok()) return version.status();
  HEADRACE_RETURN_IF_ERROR(receiver.begin(version.value()));
  Progress progress("loading", static_cast<std::uint64_t>(checkpoint.total_bytes()));
  std::uint64_t done = 0;
  std::vector<NamedView> views;
  std::size_t bytes_in_views = 0;
  const auto flush = [&]() -> Status {
    if (stop.arrived()) return Status(Code::kCancelled, fmt::format("load {}: told to stop", path));
    if (views.empty()) return ok_status();
    HEADRACE_RETURN_IF_ERROR(receiver.load(views));
    done += bytes_in_views;
    progress.update(done);
    views.clear();
    bytes_in_views = 0;
    return ok_status();
  };
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    const Result<std::span<const std::byte>> bytes = checkpoint.bytes(tensor);
    if (!bytes.ok()) return bytes.status();
    views.push_back(NamedView{tensor.name, tensor.dtype, tensor.shape, bytes.value()});
    bytes_in_views += bytes.value().size();
    if (bytes_in_views >= kLoadBytesAtATime) HEADRACE_RETURN_IF_ERROR(flush());
  }
  HEADRACE_RETURN_IF_ERROR(flush());
  return receiver.finish();
}

ReceiverOptions receiver_options(const ServeOptions& options, const ModelLayout& layout) {
  ReceiverOptions receiver;
  receiver.job = options.job;
  receiver.engine = options.engine;
  receiver.rank = static_cast<std::uint32_t>(options.rank);
  receiver.ranks = static_cast<std::uint32_t>(layout.parallel.ranks());
  receiver.endpoint = options.endpoint;
  receiver.threads = options.threads;
  receiver.bucket_bytes_max = options.bucket_bytes_max;
  receiver.deadline_ms = options.deadline_ms;
  receiver.optional_names = options.optional_names;
  return receiver;
}

Status announce(const ServeOptions& options, const Receiver& receiver, const JsonOutput& json) {
  const wire::StatusReply status = receiver.status();
  if (json.text_allowed()) {
    fmt::print("ready: {}  job {}  {} rank {} of {}  {} storages, {}{}\n", receiver.endpoint(), options.job, options.engine, options.rank,
               status.ranks, status.storages, human_bytes(status.storage_bytes),
               status.version.empty() ? std::string() : ", version " + status.version);
    std::fflush(stdout);
  }
  if (!json.wanted()) return ok_status();
  return json.write(json.document()
                        .set("ok", true)
                        .set("endpoint", receiver.endpoint())
                        .set("job", options.job)
                        .set("engine", options.engine)
                        .set("rank", options.rank)
                        .set("ranks", status.ranks)
                        .set("family", status.family)
                        .set("layout", status.layout)
                        .set("variant", status.variant)
                        .set("version", status.version)
                        .set("storages", status.storages)
                        .set("storage_bytes", status.storage_bytes)
                        .done());
}

/// The guard page and the job's folder belong to all ranks: the last one to leave, and be it for a failed start, takes them along.
class LastToLeave {
 public:
  explicit LastToLeave(std::string job) : job_(std::move(job)) {}
  ~LastToLeave() {
    if (const Result<RunDirectory> directory = RunDirectory::open(job_); directory.ok()) directory.value().clean(false);
  }
  LastToLeave(const LastToLeave&) = delete;
  LastToLeave& operator=(const LastToLeave&) = delete;

 private:
  std::string job_;
};

/// ZeroMQ ends the process when it can accept nobody more, so that whoever connects often enough could stop a rank. As many
/// descriptors as the system allows put that out of an accident's reach.
void raise_descriptor_limit() {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

ExitCode serve(const ServeOptions& options) {
  const StopSignals stop;
  raise_descriptor_limit();
  const JsonOutput json(options.json, "serve");
  Result<ModelLayout> layout = model_of(options);
  if (!layout.ok()) return finish_failed(layout.status(), json);
  const ReceiverOptions receiver_opts = receiver_options(options, layout.value());
  const std::unique_ptr<Device> device = make_host_device();
  const Result<HostStorage> storage = HostStorage::allocate(layout.value(), *device);
  if (!storage.ok()) return finish_failed(storage.status(), json);
  const LastToLeave last(options.job);
  // Decoding and compiling leave many small holes. Here the heap is ours to trim; in an engine it is the engine's.
  EngineHooks hooks;
  hooks.committed = [] {
    ::malloc_trim(0);
    return ok_status();
  };
  Result<std::unique_ptr<Receiver>> receiver =
      Receiver::start(receiver_opts, std::move(layout).value(), storage.value().table(), *device, std::move(hooks));
  if (!receiver.ok()) return finish_failed(receiver.status(), json);
  if (!options.load.empty()) {
    const Result<wire::Receipt> loaded = load_checkpoint(*receiver.value(), options.load, stop);
    if (!loaded.ok()) return finish_failed(loaded.status(), json);
  }
  const Status announced = announce(options, *receiver.value(), json);
  if (!announced.ok()) return finish_failed(announced, json);
  const int signal = stop.wait();
  say(fmt::format("headrace serve: {}, leaving\n", signal == SIGTERM ? "SIGTERM" : "SIGINT"));
  return ExitCode::kDone;
}

}  // namespace headrace::cli
