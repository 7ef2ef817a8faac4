#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/base/unique_fd.h"

namespace headrace {

/// Names one sender's connection to one receiver: 16 random bytes that the sender chooses anew for each connection.
struct PeerId {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const PeerId&) const = default;
  std::string hex() const;
  static PeerId random();
};

/// Who the kernel says is at the other end of a descriptor socket.
struct PeerCredentials {
  std::int64_t pid = 0;
  std::uint32_t uid = 0;
};

enum class ControlEventKind : std::uint8_t {
  kMessage,       // `message`, perhaps `attachment`
  kDescriptor,    // receiver side: `memory`, `memory_bytes` and `descriptor`; must be answered with acknowledge()
  kReleased,      // receiver side: the sender forgets `memory`; unmap it once no bucket uses it
  kAcknowledged,  // sender side: the receiver's answer for `memory` is in `status`
  kPeerLost,      // the peer's process or connection is gone; `status` says how it was noticed. Once per peer
};

struct ControlEvent {
  ControlEventKind kind = ControlEventKind::kMessage;
  PeerId peer;
  std::vector<std::byte> message;
  std::vector<std::byte> attachment;  // empty when the message came without one
  MemoryId memory;
  std::uint64_t memory_bytes = 0;
  UniqueFd descriptor;
  PeerCredentials credentials;  // with kDescriptor
  Status status;
};

/// The receiver's end: many peers. All calls on one thread, but wake() on any.
class ControlListener {
 public:
  virtual ~ControlListener() = default;
  /// Where senders connect, e.g. "ipc:///run/user/0/headrace/job/engine-0.ipc".
  virtual const std::string& endpoint() const noexcept = 0;
  /// Path of the descriptor socket beside it; empty when this listener has none.
  virtual const std::string& descriptor_path() const noexcept = 0;
  /// Queues a message. kUnavailable when the peer is gone, kResourceExhausted when its queue is full.
  virtual Status send(const PeerId& peer, std::span<const std::byte> message, std::span<const std::byte> attachment = {}) = 0;
  /// Answers a kDescriptor event: ok, or why the memory cannot be used.
  virtual Status acknowledge(const PeerId& peer, MemoryId memory, const Status& outcome) = 0;
  /// Forgets a peer and closes what belongs to it.
  virtual void drop(const PeerId& peer) = 0;
  /// The next event, or nullopt after timeout_ms or a wake().
  virtual Result<std::optional<ControlEvent>> poll(std::int64_t timeout_ms) = 0;
  /// Makes a present or the next poll() return early.
  virtual void wake() noexcept = 0;
};

/// The sender's end: one receiver. All calls on one thread, but wake() on any.
class ControlConnection {
 public:
  virtual ~ControlConnection() = default;
  virtual const std::string& endpoint() const noexcept = 0;
  virtual const PeerId& id() const noexcept = 0;
  virtual Status send(std::span<const std::byte> message, std::span<const std::byte> attachment = {}) = 0;
  /// Opens the descriptor socket at `path`. kUnsupported or kUnavailable when it cannot be reached from here (another host or namespace).
  virtual Status connect_descriptors(const std::string& path, std::int64_t timeout_ms) = 0;
  /// Offers memory; the answer arrives as kAcknowledged. The descriptor is duplicated, the caller keeps its own.
  virtual Status send_descriptor(MemoryId memory, std::uint64_t bytes, int descriptor) = 0;
  /// Tells the receiver to forget memory; it is unmapped once no bucket uses it.
  virtual Status release_descriptor(MemoryId memory) = 0;
  virtual Result<std::optional<ControlEvent>> poll(std::int64_t timeout_ms) = 0;
  virtual void wake() noexcept = 0;
  /// A descriptor that becomes readable when poll() has something to return, so that one thread can wait on many connections with poll(2).
  /// Readability is a hint, as with ZMQ_FD: poll(0) until it returns nothing before waiting again.
  virtual int ready_fd() const noexcept = 0;
};

struct ControlOptions {
  std::int64_t connect_timeout_ms = 5'000;
  std::int32_t queue_messages_max = 1'024;  // per peer and direction
  std::int64_t message_bytes_max = 0;       // of a message and of an attachment; 0: those of core/wire/limits.h
};

/// Binds `endpoint` ("ipc://PATH" or "tcp://127.0.0.1:PORT"; port 0 picks one). `descriptor_path` empty: no descriptor socket.
/// Refused: tcp to anything but loopback (nothing is encrypted), and socket paths longer than 107 bytes.
Result<std::unique_ptr<ControlListener>> listen_zmq(const std::string& endpoint, const std::string& descriptor_path,
                                                    const ControlOptions& options = {});
/// Connects. kDeadlineExceeded names the endpoint when nobody answers within connect_timeout_ms.
Result<std::unique_ptr<ControlConnection>> connect_zmq(const std::string& endpoint, const ControlOptions& options = {});

}  // namespace headrace
