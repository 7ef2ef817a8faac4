#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/shape.h"
#include "core/base/status.h"
#include "core/transport/control.h"
#include "core/wire/messages.h"

namespace headrace::cli {

struct ClientOptions {
  std::string job;
  std::int64_t connect_timeout_ms = 3'000;
  std::int64_t reply_timeout_ms = 30'000;  // of one question
};

/// A connection to one receiver that only asks: it says HELLO without a sender's name and takes part in no update. One thread.
class ReceiverClient {
 public:
  static Result<ReceiverClient> connect(const std::string& endpoint, const ClientOptions& options);

  const std::string& endpoint() const noexcept { return connection_->endpoint(); }
  const wire::Welcome& welcome() const noexcept { return welcome_; }

  Result<wire::StatusReply> status();
  Result<wire::StorageReply> storages();
  /// Of every checkpoint tensor that the rank holds a part of.
  Result<std::vector<wire::TensorFingerprint>> fingerprints();
  /// Packed bytes of a box that the rank holds, at most limits::kReadBytesMax of them.
  Result<std::vector<std::byte>> read(const std::string& name, const Box& box);

 private:
  ReceiverClient(std::unique_ptr<ControlConnection> connection, const ClientOptions& options)
      : connection_(std::move(connection)), options_(options) {}
  template <class Reply>
  Result<Reply> ask(wire::Body question, std::int64_t timeout_ms);

  std::unique_ptr<ControlConnection> connection_;
  ClientOptions options_;
  wire::Welcome welcome_;
  Incarnation incarnation_;
};

/// Which receivers a command line means.
struct Target {
  std::string job;
  std::vector<std::string> endpoints;  // empty: every live rank of the job
};

/// One job name, or endpoints of one job. The job of an ipc endpoint is the name of its folder; of tcp endpoints it must be given.
Result<Target> parse_target(const std::vector<std::string>& words, const std::string& job = {});
/// Connects to every receiver of a target, sorted by engine and rank. kUnavailable when there is none.
Result<std::vector<ReceiverClient>> connect_target(const Target& target);

}  // namespace headrace::cli
