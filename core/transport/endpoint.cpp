#include "core/transport/endpoint.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>

#include "core/base/unique_fd.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

Status malformed(std::string_view text, std::string_view reason) {
  return Status(Code::kInvalidArgument, fmt::format("endpoint '{}': {}; expected ipc://ABSOLUTE-PATH or tcp://HOST:PORT", text, reason));
}

std::optional<std::uint16_t> parse_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return port;
}

bool is_loopback(const std::string& host, bool six) {
  if (six) {
    in6_addr address = {};
    return ::inet_pton(AF_INET6, host.c_str(), &address) == 1 && IN6_IS_ADDR_LOOPBACK(&address);
  }
  in_addr address = {};
  return ::inet_pton(AF_INET, host.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

Result<Endpoint> parse_tcp(std::string_view text, std::string_view rest) {
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return malformed(text, "no port");
  std::string_view host = rest.substr(0, colon);
  const auto port = parse_port(rest.substr(colon + 1));
  if (!port) return malformed(text, "the port is not a number up to 65535");
  const bool six = host.front() == '[' && host.back() == ']';
  if (six) host = host.substr(1, host.size() - 2);
  if (!six && host.find(':') != std::string_view::npos) return malformed(text, "an IPv6 address needs brackets");
  Endpoint endpoint{EndpointKind::kTcp, "", std::string(host == "localhost" ? "127.0.0.1" : host), *port, ""};
  if (!is_loopback(endpoint.host, six)) {
    return Status(
        Code::kUnsupported,
        fmt::format("endpoint '{}': '{}' is not a loopback address; tcp is not encrypted yet, so only 127.0.0.0/8 and [::1] are served",
                    text, endpoint.host));
  }
  endpoint.text = six ? fmt::format("tcp://[{}]:{}", endpoint.host, *port) : fmt::format("tcp://{}:{}", endpoint.host, *port);
  return endpoint;
}

}  // namespace

Status check_socket_path(std::string_view path) {
  if (path.empty() || path.front() != '/' || path.find('\0') != std::string_view::npos) {
    return Status(Code::kInvalidArgument, fmt::format("socket path '{}': not an absolute path", path));
  }
  if (path.size() > kSocketPathBytesMax) {
    return Status(Code::kInvalidArgument,
                  fmt::format("socket path '{}': {} bytes, a Unix socket takes at most {}", path, path.size(), kSocketPathBytesMax));
  }
  return ok_status();
}

Result<Endpoint> parse_endpoint(std::string_view text) {
  if (text.size() > limits::kTextBytesMax) return malformed(text.substr(0, 80), "too long");
  if (text.starts_with("tcp://")) return parse_tcp(text, text.substr(6));
  if (!text.starts_with("ipc://")) return malformed(text, "unknown form");
  const std::string_view path = text.substr(6);
  HEADRACE_RETURN_IF_ERROR(check_socket_path(path));
  return Endpoint{EndpointKind::kIpc, std::string(path), "", 0, std::string(text)};
}

Result<bool> socket_answers(const std::string& path, int type) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return false;
    return errno_status(errno, fmt::format("look at socket path '{}'", path));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return Status(Code::kFailedPrecondition, fmt::format("socket path '{}': a file that is not a socket is there", path));
  }
  const UniqueFd probe(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return errno_status(errno, "create a socket");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return true;
  // Only a refusal proves that nobody listens; a full backlog (EAGAIN) or another kind of socket is somebody.
  return errno != ECONNREFUSED && errno != ENOENT;
}

MessageLimits message_limits(const ControlOptions& options) {
  if (options.message_bytes_max <= 0) return {limits::kMessageBytesMax, limits::kAttachmentBytesMax};
  const auto bytes = static_cast<std::size_t>(options.message_bytes_max);
  return {std::min(bytes, limits::kMessageBytesMax), std::min(bytes, limits::kAttachmentBytesMax)};
}

Status check_message(const MessageLimits& limits, std::size_t message_bytes, std::size_t attachment_bytes, std::string_view who) {
  if (message_bytes > limits.message_bytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: a message of {} bytes, at most {} are allowed", who, message_bytes, limits.message_bytes));
  }
  if (attachment_bytes > limits.attachment_bytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: an attachment of {} bytes, at most {} are allowed", who, attachment_bytes, limits.attachment_bytes));
  }
  return ok_status();
}

}  // namespace headrace
