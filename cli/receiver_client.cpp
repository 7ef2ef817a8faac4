#include "cli/receiver_client.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <tuple>
#include <utility>

#include "core/base/clock.h"
#include "core/transport/run_directory.h"
#include "core/wire/codec.h"
#include "core/wire/limits.h"

namespace headrace::cli {
namespace {

constexpr std::uint64_t kFingerprintsAtATime = 4'096;

bool is_endpoint(const std::string& word) {
  return word.find("://") != std::string::npos;
}

/// "ipc:///run/user/0/headrace/JOB/engine-0-0.ipc" names its job, other endpoints do not.
std::string job_of(const std::string& endpoint) {
  constexpr std::string_view kIpc = "ipc://";
  if (!endpoint.starts_with(kIpc)) return {};
  return std::filesystem::path(endpoint.substr(kIpc.size())).parent_path().filename().string();
}

Result<std::vector<std::string>> live_endpoints(const std::string& job) {
  Result<RunDirectory> directory = RunDirectory::open(job);
  if (!directory.ok()) return directory.status();
  std::vector<std::string> endpoints;
  for (const FoundEndpoint& found : directory.value().endpoints()) {
    if (found.alive) endpoints.push_back(found.endpoint);
  }
  return endpoints;
}

}  // namespace

Result<ReceiverClient> ReceiverClient::connect(const std::string& endpoint, const ClientOptions& options) {
  ControlOptions control;
  control.connect_timeout_ms = options.connect_timeout_ms;
  Result<std::unique_ptr<ControlConnection>> connection = connect_zmq(endpoint, control);
  if (!connection.ok()) return connection.status();
  ReceiverClient client(std::move(connection).value(), options);
  wire::Hello hello;
  hello.protocol_min = limits::kProtocolVersion;
  hello.protocol_max = limits::kProtocolVersion;
  hello.job = options.job;
  Result<wire::Welcome> welcome = client.ask<wire::Welcome>(std::move(hello), options.connect_timeout_ms);
  if (!welcome.ok()) return welcome.status();
  client.welcome_ = std::move(welcome).value();
  return client;
}

template <class Reply>
Result<Reply> ReceiverClient::ask(wire::Body question, std::int64_t timeout_ms) {
  const std::string what(wire::message_name(wire::type_of(question)));
  wire::Message message{SessionId{}, incarnation_, std::move(question)};
  const std::vector<std::byte> encoded = wire::encode(message);
  if (Status sent = connection_->send(encoded); !sent.ok()) return sent;
  const SteadyClock clock;
  const ProgressDeadline deadline(clock, timeout_ms);
  while (!deadline.expired()) {
    Result<std::optional<ControlEvent>> event = connection_->poll(deadline.left_ms() + 1);
    if (!event.ok()) return event.status();
    if (!event.value().has_value()) continue;
    if (event.value()->kind == ControlEventKind::kPeerLost) return event.value()->status;
    if (event.value()->kind != ControlEventKind::kMessage) continue;
    Result<wire::Message> decoded = wire::decode(event.value()->message);
    if (!decoded.ok()) return decoded.status();
    wire::Body& body = decoded.value().body;
    if (Reply* reply = std::get_if<Reply>(&body)) {
      incarnation_ = decoded.value().incarnation;
      return std::move(*reply);
    }
    if (const auto* error = std::get_if<wire::ErrorReport>(&body)) return wire::to_status(error->failure);
  }
  return Status(Code::kDeadlineExceeded, fmt::format("{} to {}: no answer within {} ms", what, connection_->endpoint(), timeout_ms));
}

Result<wire::StatusReply> ReceiverClient::status() {
  return ask<wire::StatusReply>(wire::StatusRequest{}, options_.reply_timeout_ms);
}

Result<wire::StorageReply> ReceiverClient::storages() {
  return ask<wire::StorageReply>(wire::StorageRequest{}, options_.reply_timeout_ms);
}

Result<std::vector<wire::TensorFingerprint>> ReceiverClient::fingerprints() {
  std::vector<wire::TensorFingerprint> all;
  std::string version;
  while (true) {
    Result<wire::FingerprintReply> reply =
        ask<wire::FingerprintReply>(wire::FingerprintRequest{all.size(), kFingerprintsAtATime}, options_.reply_timeout_ms);
    if (!reply.ok()) return reply.status();
    wire::FingerprintReply& page = reply.value();
    if (all.empty()) version = page.version;
    if (page.version != version) {
      return Status(Code::kFailedPrecondition,
                    fmt::format("fingerprints of {}: an update to {} came in between", endpoint(), page.version));
    }
    std::move(page.tensors.begin(), page.tensors.end(), std::back_inserter(all));
    if (page.tensors.empty() || all.size() >= page.total) return all;
  }
}

Result<std::vector<std::byte>> ReceiverClient::read(const std::string& name, const Box& box) {
  Result<wire::ReadReply> reply = ask<wire::ReadReply>(wire::ReadRequest{name, box}, options_.reply_timeout_ms);
  if (!reply.ok()) return reply.status();
  return std::move(reply.value().bytes);
}

Result<Target> parse_target(const std::vector<std::string>& words, const std::string& job) {
  Target target;
  target.job = job;
  for (const std::string& word : words) {
    const bool endpoint = is_endpoint(word);
    if (!endpoint && words.size() > 1) {
      return Status(Code::kInvalidArgument, fmt::format("target '{}': give one job name, or endpoints of one job", word));
    }
    const std::string named = endpoint ? job_of(word) : word;
    if (endpoint) target.endpoints.push_back(word);
    if (named.empty()) continue;
    if (!target.job.empty() && target.job != named) {
      return Status(Code::kInvalidArgument, fmt::format("target '{}': job {} beside job {}", word, named, target.job));
    }
    target.job = named;
  }
  if (target.job.empty()) {
    return Status(Code::kInvalidArgument, words.empty() ? "no target: give a job name or endpoints" : "a tcp endpoint needs --job");
  }
  return target;
}

Result<std::vector<ReceiverClient>> connect_target(const Target& target) {
  std::vector<std::string> endpoints = target.endpoints;
  if (endpoints.empty()) {
    Result<std::vector<std::string>> found = live_endpoints(target.job);
    if (!found.ok()) return found.status();
    endpoints = std::move(found).value();
  }
  if (endpoints.empty()) return Status(Code::kUnavailable, fmt::format("job {}: no receiver is running", target.job));
  std::vector<ReceiverClient> clients;
  ClientOptions options;
  options.job = target.job;
  for (const std::string& endpoint : endpoints) {
    Result<ReceiverClient> client = ReceiverClient::connect(endpoint, options);
    if (!client.ok()) return client.status();
    clients.push_back(std::move(client).value());
  }
  std::sort(clients.begin(), clients.end(), [](const ReceiverClient& a, const ReceiverClient& b) {
    return std::tie(a.welcome().engine, a.welcome().rank) < std::tie(b.welcome().engine, b.welcome().rank);
  });
  return clients;
}

}  // namespace headrace::cli
