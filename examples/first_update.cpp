// A whole update in one process: an engine with weights of its own, a receiver in front of them, and a trainer that brings new ones.
// README.md shows these functions; a test holds the two together. Prints one line; ends with 0 when every byte is where it belongs.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/transport/run_directory.h"
#include "receiver/receiver.h"
#include "sender_sdk/sender.h"

namespace headrace {
namespace {

/// Where checkpoint tensors live in the engine: two of them, q and k, stacked in one parameter of 8 rows and 8 columns.
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

/// The engine's side: `weights` stay where they are for as long as the receiver lives, and so do table and device.
std::unique_ptr<Receiver> receive_into(std::span<float> weights, const std::string& job, StorageTable& table, Device& device) {
  Storage storage;
  storage.name = "attn.qk";
  storage.dtype = Dtype::kF32;
  storage.shape = {8, 8};
  storage.address = std::as_writable_bytes(weights).data();
  storage.bytes = 256;
  table.add(storage).value_or_throw();
  throw_if_error(table.seal());

  EngineHooks hooks;
  hooks.quiescent = [] { return ok_status(); };  // no forward pass runs now, and none starts before the guard opens again
  hooks.derive = [] { return ok_status(); };     // refresh what the engine computes from its weights
  ReceiverOptions options;
  options.job = job;
  return Receiver::start(options, stacked_layout(), table, device, hooks).value_or_throw();
}

/// The trainer's side, usually in another process.
UpdateReport send(std::span<const float> q, std::span<const float> k, const std::string& job) {
  SenderOptions options;
  options.job = job;
  const std::unique_ptr<Sender> sender = Sender::connect(options).value_or_throw();
  UpdateOptions update;
  update.version = WeightVersion{"run-1", 1};
  update.entries = {{"attn.q", Dtype::kF32, {4, 8}, {}}, {"attn.k", Dtype::kF32, {4, 8}, {}}};
  throw_if_error(sender->open(update));
  throw_if_error(sender->add("attn.q", {q.data(), {}}));
  throw_if_error(sender->add("attn.k", {k.data(), {}}));
  return sender->finish().value_or_throw();
}

int run() {
  const std::string job = fmt::format("first-update-{}", ::getpid());
  std::vector<float> live(64, 0.0F);
  std::vector<float> trained(64);
  std::iota(trained.begin(), trained.end(), 1.0F);

  StorageTable table;
  const std::unique_ptr<Device> device = make_host_device();
  std::unique_ptr<Receiver> receiver = receive_into(live, job, table, *device);
  const std::span<const float> q = std::span(trained).first(32);
  const UpdateReport report = send(q, std::span(trained).last(32), job);
  receiver.reset();
  // The guard page and the job's folder belong to all ranks: the last one to leave takes them along.
  RunDirectory::open(job).value_or_throw().clean(false);

  const bool equal = live == trained;
  fmt::print("{}: {} bytes applied, {}, live weights {}\n", report.version.to_string(), report.applied_bytes,
             report.proven ? "proven" : "not proven", equal ? "equal" : "DIFFERENT");
  return equal && report.proven ? 0 : 1;
}

}  // namespace
}  // namespace headrace

int main() {
  try {
    return headrace::run();
  } catch (const headrace::Error& error) {
    fmt::print(stderr, "first-update: {}\n", error.what());
    return 1;
  }
}
