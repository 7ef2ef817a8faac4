#include "benchmarks/receiver_process.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/bare_pipeline.h"
#include "benchmarks/planned_update.h"
#include "benchmarks/v41_model.h"
#include "core/device/device.h"
#include "core/transport/run_directory.h"
#include "receiver/receiver.h"

namespace headrace::bench {
namespace {

constexpr std::string_view kJobPrefix = "headrace-bench-";
constexpr std::string_view kTinyPrefix = "tiny:";
constexpr std::string_view kFlatExpertsPrefix = "flat-experts:";
constexpr std::string_view kErrorPrefix = "error ";
constexpr V41Sizes kV41{.layers = 2, .experts = 96, .vocab = 8192};

std::int64_t number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(Status(Code::kInvalidArgument, fmt::format("'{}' is not a number", text)));
  }
  return value;
}

std::string answer(const std::string& question, const Receiver& receiver, BareReceiver& bare, const PacketChannel& channel) {
  if (question == "memory") return std::to_string(receiver.status().memory_extra_bytes_max);
  return bare.answer(question, channel);
}

void serve(const ReceiverProcess::Options& options, const PacketChannel& channel) {
  const std::unique_ptr<Device> device = make_host_device();
  ModelLayout layout = e2e_layout(options.model, options.ranks, options.rank);
  const StorageBlock storage = StorageBlock::allocate(layout, *device);
  BareReceiver bare(layout, storage, *device);
  ReceiverOptions receiver_options;
  receiver_options.job = options.job;
  receiver_options.rank = static_cast<std::uint32_t>(options.rank);
  receiver_options.ranks = static_cast<std::uint32_t>(options.ranks);
  receiver_options.require_proof = false;  // rows without fingerprints; with them the report tells that all were equal
  const std::unique_ptr<Receiver> receiver =
      Receiver::start(receiver_options, std::move(layout), storage.table(), *device).value_or_throw();
  channel.send("ready");
  for (std::string question = channel.receive(); !question.empty(); question = channel.receive()) {
    channel.send(answer(question, *receiver, bare, channel));
  }
}

}  // namespace

ModelLayout e2e_layout(const std::string& model, std::int32_t ranks, std::int32_t rank) {
  if (model == "v41") return v41_layout(kV41, ranks, rank);
  if (model.starts_with(kTinyPrefix)) return tiny_layout(number(std::string_view(model).substr(kTinyPrefix.size())));
  if (model.starts_with(kFlatExpertsPrefix)) return flat_experts_layout(number(std::string_view(model).substr(kFlatExpertsPrefix.size())));
  throw Error(Status(Code::kInvalidArgument, "unknown model " + model));
}

std::string job_name(std::string_view row) {
  return fmt::format("{}{}-{}", kJobPrefix, ::getpid(), row);
}

void PacketChannel::send(std::string_view text) const {
  if (::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size())) {
    throw Error(errno_status(errno, fmt::format("tell the other process of the row '{}'", text)));
  }
}

std::string PacketChannel::receive() const {
  std::array<char, 4096> buffer;
  ssize_t bytes = 0;
  do {
    bytes = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) throw Error(errno_status(errno, "hear the other process of the row"));
  return {buffer.data(), static_cast<std::size_t>(bytes)};
}

std::string PacketChannel::ask(std::string_view question) const {
  send(question);
  std::string text = receive();
  if (text.empty()) throw Error(Status(Code::kUnavailable, fmt::format("the receiver's process ended when asked '{}'", question)));
  if (text.starts_with(kErrorPrefix)) throw Error(Status(Code::kInternal, "the receiver's process: " + text.substr(kErrorPrefix.size())));
  return text;
}

ReceiverProcess::ReceiverProcess(const Options& options) {
  std::array<int, 2> sockets{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()) != 0) throw Error(errno_status(errno, "make a socket pair"));
  channel_ = PacketChannel(UniqueFd(sockets[0]));
  const UniqueFd theirs(sockets[1]);
  // All of it before the fork: behind it a process with threads may not allocate.
  std::array<std::string, 6> words{"/proc/self/exe", std::string(kReceiverRole),   options.job,
                                   options.model,    std::to_string(options.rank), std::to_string(options.ranks)};
  std::array<char*, words.size() + 1> arguments{};
  for (std::size_t i = 0; i < words.size(); ++i) arguments[i] = words[i].data();
  pid_ = ::fork();
  if (pid_ < 0) throw Error(errno_status(errno, "start a receiver's process"));
  if (pid_ == 0) {
    ::dup2(theirs.get(), STDIN_FILENO);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  try {
    const std::string first = channel_.ask("hello");
    if (first != "ready") throw Error(Status(Code::kInternal, "the receiver's process says " + first));
  } catch (...) {
    channel_ = PacketChannel();
    ::waitpid(pid_, nullptr, 0);
    throw;
  }
}

ReceiverProcess::~ReceiverProcess() {
  channel_ = PacketChannel();  // it ends when it hears nothing more
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  remove_leftovers();
}

std::uint64_t ReceiverProcess::memory_extra_bytes_max() const {
  return static_cast<std::uint64_t>(number(channel_.ask("memory")));
}

std::uint64_t ReceiverProcess::status_bytes(std::string_view key) const {
  std::ifstream status(fmt::format("/proc/{}/status", pid_));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(std::string(key) + ":")) return std::stoull(line.substr(key.size() + 1)) * 1024;
  }
  throw Error(Status(Code::kUnsupported, fmt::format("/proc/{}/status has no {}", pid_, key)));
}

int receiver_process_main(std::span<char*> arguments) {
  if (arguments.size() != 4) return 2;
  ::signal(SIGINT, SIG_IGN);  // a terminal sends it to both; the other process closes the channel when it goes
  const PacketChannel channel{UniqueFd(STDIN_FILENO)};
  try {
    if (channel.receive() != "hello") return 0;
    serve({arguments[0], arguments[1], static_cast<std::int32_t>(number(arguments[2])), static_cast<std::int32_t>(number(arguments[3]))},
          channel);
  } catch (const std::exception& error) {
    fmt::print(stderr, "headrace-bench: the receiver's process: {}\n", error.what());
    try {
      channel.send(fmt::format("{}{}", kErrorPrefix, error.what()));
    } catch (const Error&) {
      remove_leftovers();  // nobody is left to hear it, or to tidy up
    }
    return 1;
  }
  remove_leftovers();  // in case that the other process was killed
  return 0;
}

void remove_leftovers() {
  for (const std::string& job : RunDirectory::jobs()) {
    if (!job.starts_with(kJobPrefix)) continue;
    if (const Result<RunDirectory> directory = RunDirectory::open(job); directory.ok()) directory.value().clean(false);
  }
}

}  // namespace headrace::bench
