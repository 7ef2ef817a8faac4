// An engine that owns its weights and lets trainers write them: the receiver lives inside it, in front of buffers of the engine's own.
// usage: headrace-embedded-receiver JOB
// Ends on SIGTERM or SIGINT. README.md shows its functions; a test holds the two together.
#include <signal.h>

#include <array>
#include <cstdio>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>

#include "core/transport/run_directory.h"
#include "receiver/receiver.h"

namespace headrace {
namespace {

/// The engine's memory. Its graphs have baked in these addresses.
struct Engine {
  std::array<float, 64> qk{};       // 8 rows and 8 columns: q in the upper half, k in the lower
  std::array<float, 8> row_sums{};  // what the engine computes from its weights
};

/// Where checkpoint tensors live in the engine: two of them, q and k, stacked in one parameter.
ModelLayout stacked_layout() {
  ModelLayout layout;
  layout.family = "example";
  layout.variant = "plain";
  layout.storages.push_back({.name = "attn.qk", .dtype = Dtype::kF32, .shape = {8, 8}, .strides = {}, .bytes = 256});
  for (const std::string_view part : {"q", "k"}) {
    TensorRule rule;
    rule.param = "attn.qk";
    rule.shard = part;
    rule.dtypes = {Dtype::kF32};
    rule.shape = {4, 8};
    const StridedCopy copy = StridedCopy::flat(0, part == "q" ? 0 : 128, 128);  // from byte 0 of the tensor to byte 0 or 128 of attn.qk
    rule.placements.push_back({.storage = 0, .box = Box::whole(rule.shape), .copy = copy});
    layout.named.push_back({"attn." + std::string(part), rule});
  }
  return layout;
}

/// Lists the engine's buffers as they are after loading and capture.
void list_storage(Engine& engine, StorageTable& table) {
  Storage storage;
  storage.name = "attn.qk";
  storage.dtype = Dtype::kF32;
  storage.shape = {8, 8};
  storage.address = std::as_writable_bytes(std::span(engine.qk)).data();
  storage.bytes = 256;
  storage.captured = true;
  table.add(storage).value_or_throw();
  throw_if_error(table.seal());
}

/// Starts the receiver. Engine, table and device stay where they are for as long as it lives.
std::unique_ptr<Receiver> receive_into(Engine& engine, const std::string& job, const StorageTable& table, Device& device) {
  EngineHooks hooks;
  hooks.quiescent = [] { return ok_status(); };  // no forward pass runs now, and none starts before the guard opens again
  hooks.locate = [&engine, &table] {
    return std::vector{StorageLocation{StorageId{0}, std::as_bytes(std::span(engine.qk)).data(), table.at(StorageId{0}).bytes}};
  };
  hooks.derive = [&engine] {  // the new weights are in place and proven, but not served yet
    for (std::size_t row = 0; row < 8; ++row) {
      const auto values = std::span(engine.qk).subspan(8 * row, 8);
      engine.row_sums[row] = std::accumulate(values.begin(), values.end(), 0.0F);
    }
    return ok_status();
  };
  ReceiverOptions options;
  options.job = job;
  return Receiver::start(options, stacked_layout(), table, device, hooks).value_or_throw();
}

void run(const std::string& job) {
  // Before any thread starts, so that all of them leave these signals to the wait below.
  sigset_t stop{};
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);

  Engine engine;
  StorageTable table;
  list_storage(engine, table);
  const std::unique_ptr<Device> device = make_host_device();
  std::unique_ptr<Receiver> receiver = receive_into(engine, job, table, *device);
  std::printf("ready: %s\n", receiver->endpoint().c_str());
  std::fflush(stdout);
  int signal = 0;
  sigwait(&stop, &signal);

  const std::string version = receiver->status().version;
  receiver.reset();
  // The guard page and the job's folder belong to all ranks: the last one to leave takes them along.
  RunDirectory::open(job).value_or_throw().clean(false);
  std::printf("%s: first weight %g, last weight %g, last row sum %g\n", version.empty() ? "no version" : version.c_str(),
              static_cast<double>(engine.qk.front()), static_cast<double>(engine.qk.back()), static_cast<double>(engine.row_sums.back()));
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: headrace-embedded-receiver JOB\n", stderr);
    return 2;
  }
  try {
    headrace::run(argv[1]);
    return 0;
  } catch (const headrace::Error& error) {
    std::fprintf(stderr, "embedded-receiver: %s\n", error.what());
    return 1;
  }
}
