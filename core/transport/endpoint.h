#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/transport/control.h"

namespace headrace {

/// Longest path of a Unix socket: sockaddr_un has 108 bytes, one of them the terminator.
inline constexpr std::size_t kSocketPathBytesMax = 107;

enum class EndpointKind : std::uint8_t { kIpc, kTcp };

struct Endpoint {
  EndpointKind kind = EndpointKind::kIpc;
  std::string path;  // of ipc: absolute
  std::string host;  // of tcp: a literal loopback address, IPv6 without its brackets
  std::uint16_t port = 0;
  std::string text;  // as ZeroMQ takes it
};

/// Parses "ipc://ABSOLUTE-PATH" and "tcp://HOST:PORT". kInvalidArgument for any other form and for paths over kSocketPathBytesMax;
/// kUnsupported for tcp beyond loopback.
Result<Endpoint> parse_endpoint(std::string_view text);

/// Whether a path can name a Unix socket: absolute, no NUL, not over kSocketPathBytesMax.
Status check_socket_path(std::string_view path);

/// Whether somebody accepts connections of `type` (SOCK_STREAM, SOCK_SEQPACKET) at `path`. kFailedPrecondition when a file that is no
/// socket stands there: binding would delete it.
Result<bool> socket_answers(const std::string& path, int type);

/// The sizes that `options` allows for a message and for its attachment.
struct MessageLimits {
  std::size_t message_bytes = 0;
  std::size_t attachment_bytes = 0;
};
MessageLimits message_limits(const ControlOptions& options);
/// kInvalidArgument names what is too large. `who` says whose message it is.
Status check_message(const MessageLimits& limits, std::size_t message_bytes, std::size_t attachment_bytes, std::string_view who);

}  // namespace headrace
