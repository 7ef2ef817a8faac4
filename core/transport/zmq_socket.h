#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>
#include <zmq.hpp>

#include "core/base/status.h"
#include "core/transport/control.h"
#include "core/transport/endpoint.h"

namespace headrace {

/// What both ends set: limits, and a short linger so that a last ABORT or ERROR still leaves.
/// ZeroMQ ends the process where it gets no descriptor or no thread for its own use. This says so before: kResourceExhausted.
Status check_room_for_zmq();

void set_common_options(zmq::socket_t& socket, const Endpoint& endpoint, const ControlOptions& options);

/// Reads what ZeroMQ says about a socket's connections. Destroy it after the socket that it watches.
class ZmqMonitor {
 public:
  struct Event {
    int kind = 0;   // ZMQ_EVENT_*
    int value = 0;  // the connection's descriptor, or an error number
  };

  ZmqMonitor(zmq::context_t& context, zmq::socket_t& watched, int events);
  zmq::socket_t& socket() noexcept { return pair_; }
  std::optional<Event> next();

 private:
  zmq::socket_t pair_;
};

/// All frames of the next message; false when there is none now.
bool receive_frames(zmq::socket_t& socket, std::vector<zmq::message_t>& frames);
/// Queues [prefix] message [attachment] without waiting; false when the queue is full. An empty attachment is no frame.
bool send_frames(zmq::socket_t& socket, std::optional<std::span<const std::byte>> prefix, std::span<const std::byte> message,
                 std::span<const std::byte> attachment);

std::vector<std::byte> to_bytes(const zmq::message_t& frame);
std::span<const std::byte> peer_bytes(const PeerId& peer) noexcept;
zmq::pollitem_t poll_item(zmq::socket_t& socket) noexcept;
zmq::pollitem_t poll_item(int fd) noexcept;

/// A peer whose connection ended, until its last messages are read and kPeerLost is reported.
struct Losing {
  PeerId peer;
  Status status;
  std::int64_t due_ns = 0;              // not before; a hang-up of the descriptor socket can overtake the last messages
  std::int64_t other_messages_max = 0;  // messages of others that may still come first
};
/// How long messages may lag behind a hang-up of the descriptor socket.
inline constexpr std::int64_t kHangupGraceNs = 100'000'000;

std::int64_t now_ns() noexcept;
/// Milliseconds until `due_ns`, rounded up, at least 0.
std::int64_t until_ms(std::int64_t due_ns) noexcept;

}  // namespace headrace
