#include "core/transport/zmq_socket.h"

#include <fmt/format.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <latch>
#include <system_error>
#include <thread>

#include "core/base/clock.h"
#include "core/base/ids.h"
#include "core/base/unique_fd.h"

namespace headrace {
namespace {

constexpr int kLingerMs = 100;
constexpr int kHandshakeMs = 5'000;
constexpr int kDescriptorsOfZmq = 16;  // of a context with a socket, its monitor and a listener or connection: 12, and some to spare
constexpr int kThreadsOfZmq = 2;

}  // namespace

Status check_room_for_zmq() {
  std::vector<UniqueFd> descriptors;
  for (int i = 0; i < kDescriptorsOfZmq; ++i) {
    descriptors.emplace_back(::eventfd(0, EFD_CLOEXEC));
    if (!descriptors.back().valid()) return errno_status(errno, fmt::format("room for the {} descriptors of ZeroMQ", kDescriptorsOfZmq));
  }
  std::vector<std::thread> threads;
  Status status;
  // At the same time, as ZeroMQ has them: each waits for the last one.
  std::latch all(kThreadsOfZmq);
  try {
    for (int i = 0; i < kThreadsOfZmq; ++i) threads.emplace_back([&all] { all.arrive_and_wait(); });
  } catch (const std::system_error& error) {
    status = Status(Code::kResourceExhausted, fmt::format("room for the {} threads of ZeroMQ: {}", kThreadsOfZmq, error.what()));
    all.count_down(kThreadsOfZmq - static_cast<std::ptrdiff_t>(threads.size()));
  }
  for (std::thread& thread : threads) thread.join();
  return status;
}

void set_common_options(zmq::socket_t& socket, const Endpoint& endpoint, const ControlOptions& options) {
  const MessageLimits limits = message_limits(options);
  socket.set(zmq::sockopt::linger, kLingerMs);
  socket.set(zmq::sockopt::sndhwm, options.queue_messages_max);
  socket.set(zmq::sockopt::rcvhwm, options.queue_messages_max);
  socket.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(std::max(limits.message_bytes, limits.attachment_bytes)));
  socket.set(zmq::sockopt::handshake_ivl, kHandshakeMs);
  socket.set(zmq::sockopt::ipv6, endpoint.kind == EndpointKind::kTcp && endpoint.host.find(':') != std::string::npos);
}

ZmqMonitor::ZmqMonitor(zmq::context_t& context, zmq::socket_t& watched, int events) : pair_(context, zmq::socket_type::pair) {
  // Unbounded: a full queue would block ZeroMQ's own thread, and there is only one event for each connection made and lost.
  pair_.set(zmq::sockopt::rcvhwm, 0);
  pair_.set(zmq::sockopt::linger, 0);
  const std::string address = fmt::format("inproc://monitor-{:016x}", random_u64());
  if (zmq_socket_monitor(watched.handle(), address.c_str(), events) != 0) throw zmq::error_t();
  pair_.connect(address);
}

std::optional<ZmqMonitor::Event> ZmqMonitor::next() {
  std::vector<zmq::message_t> frames;
  // Two frames: u16 event and u32 value in this machine's byte order, then the address.
  while (receive_frames(pair_, frames)) {
    if (frames.empty() || frames[0].size() < 6) continue;
    std::uint16_t kind = 0;
    std::int32_t value = 0;
    std::memcpy(&kind, frames[0].data(), sizeof kind);
    std::memcpy(&value, static_cast<const char*>(frames[0].data()) + sizeof kind, sizeof value);
    return Event{kind, value};
  }
  return std::nullopt;
}

bool receive_frames(zmq::socket_t& socket, std::vector<zmq::message_t>& frames) {
  frames.clear();
  do {
    zmq::message_t frame;
    if (!socket.recv(frame, zmq::recv_flags::dontwait)) return false;
    frames.push_back(std::move(frame));
  } while (frames.back().more());
  return true;
}

bool send_frames(zmq::socket_t& socket, std::optional<std::span<const std::byte>> prefix, std::span<const std::byte> message,
                 std::span<const std::byte> attachment) {
  const auto put = [&](std::span<const std::byte> bytes, bool more) {
    const auto flags = more ? zmq::send_flags::dontwait | zmq::send_flags::sndmore : zmq::send_flags::dontwait;
    return socket.send(zmq::message_t(bytes.data(), bytes.size()), flags).has_value();
  };
  if (prefix && !put(*prefix, true)) return false;
  if (!put(message, !attachment.empty())) return false;
  return attachment.empty() || put(attachment, false);
}

std::vector<std::byte> to_bytes(const zmq::message_t& frame) {
  const auto* const data = static_cast<const std::byte*>(frame.data());
  return std::vector<std::byte>(data, data + frame.size());
}

std::span<const std::byte> peer_bytes(const PeerId& peer) noexcept {
  return std::as_bytes(std::span(peer.bytes));
}

zmq::pollitem_t poll_item(zmq::socket_t& socket) noexcept {
  return {socket.handle(), 0, ZMQ_POLLIN, 0};
}

zmq::pollitem_t poll_item(int fd) noexcept {
  return {nullptr, fd, ZMQ_POLLIN, 0};
}

std::int64_t now_ns() noexcept {
  return SteadyClock().now_ns();
}

std::int64_t until_ms(std::int64_t due_ns) noexcept {
  return std::max<std::int64_t>(0, (due_ns - now_ns() + 999'999) / 1'000'000);
}

}  // namespace headrace
