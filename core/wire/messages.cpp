#include "core/wire/messages.h"

#include <fmt/format.h>

#include <array>

namespace headrace::wire {

std::string_view session_state_name(SessionState state) noexcept {
  switch (state) {
    case SessionState::kIdle: return "idle";
    case SessionState::kOpen: return "open";
    case SessionState::kApplying: return "applying";
    case SessionState::kPrepared: return "prepared";
    case SessionState::kTorn: return "torn";
    case SessionState::kInDoubt: return "in_doubt";
  }
  return "unknown";
}

std::string_view message_name(MessageType type) noexcept {
  static constexpr std::array<std::string_view, 28> kNames{"",
                                                           "HELLO",
                                                           "WELCOME",
                                                           "OPEN",
                                                           "OPENED",
                                                           "MANIFEST",
                                                           "ACCEPT",
                                                           "REJECT",
                                                           "CONFIRM",
                                                           "BEGIN",
                                                           "BUCKET",
                                                           "CONSUMED",
                                                           "END",
                                                           "PREPARED",
                                                           "COMMIT",
                                                           "COMMITTED",
                                                           "ABORT",
                                                           "ERROR",
                                                           "PING",
                                                           "PONG",
                                                           "STATUS_REQUEST",
                                                           "STATUS_REPLY",
                                                           "FINGERPRINT_REQUEST",
                                                           "FINGERPRINT_REPLY",
                                                           "READ_REQUEST",
                                                           "READ_REPLY",
                                                           "STORAGE_REQUEST",
                                                           "STORAGE_REPLY"};
  const auto number = static_cast<std::size_t>(type);
  return number < kNames.size() ? kNames[number] : "unknown";
}

Failure make_failure(const Status& status, std::string phase) {
  Failure failure;
  failure.code = static_cast<std::uint32_t>(status.code());
  failure.message = status.message();
  failure.phase = std::move(phase);
  return failure;
}

Status to_status(const Failure& failure) {
  std::string where;
  if (failure.rank >= 0) where += fmt::format("{} rank {}", failure.engine.empty() ? "engine" : failure.engine, failure.rank);
  if (!failure.sender.empty()) where += fmt::format("{}sender {}", where.empty() ? "" : ", ", failure.sender);
  if (!failure.phase.empty()) where += fmt::format("{}{}", where.empty() ? "" : ", ", failure.phase);
  if (failure.bucket >= 0) where += fmt::format(", bucket {}", failure.bucket);
  std::string text = where.empty() ? failure.message : fmt::format("{}: {}", where, failure.message);
  if (!failure.name.empty() && failure.message.find(failure.name) == std::string::npos) text += fmt::format(" [{}]", failure.name);
  if (!failure.expected.empty() || !failure.actual.empty()) text += fmt::format(" (expected {}, got {})", failure.expected, failure.actual);
  const Code code =
      failure.code >= 1 && failure.code <= static_cast<std::uint32_t>(Code::kInternal) ? static_cast<Code>(failure.code) : Code::kInternal;
  return Status(code, text)
      .with({failure.engine, failure.rank, failure.sender, failure.phase, failure.bucket, failure.name, failure.expected, failure.actual});
}

}  // namespace headrace::wire
