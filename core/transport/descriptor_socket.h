#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/base/unique_fd.h"
#include "core/transport/control.h"

namespace headrace {

// Descriptors travel beside the messages in datagrams of a SOCK_SEQPACKET socket. All numbers are little-endian:
//   header    u32 magic 0x31445248 ("HRD1"), u32 type
//   hello     type 1: header, 16 bytes peer id                                                    sender -> receiver, once and first
//   memory    type 2: header, u64 memory, u64 bytes; exactly one descriptor                       sender -> receiver
//   release   type 3: header, u64 memory                                                          sender -> receiver
//   answer    type 4: header, u64 memory, u32 code, u32 source, i32 native, text to the end       receiver -> sender
enum class DatagramType : std::uint32_t { kHello = 1, kMemory = 2, kRelease = 3, kAnswer = 4 };

struct Datagram {
  DatagramType type = DatagramType::kHello;
  PeerId peer;              // hello
  MemoryId memory;          // memory, release, answer
  std::uint64_t bytes = 0;  // memory
  Status status;            // answer
};

std::vector<std::byte> encode_datagram(const Datagram& datagram);
/// kCorruption says what is wrong with it.
Result<Datagram> decode_datagram(std::span<const std::byte> bytes);

/// One connected descriptor socket. One thread.
class DescriptorLink {
 public:
  struct Received {
    Datagram datagram;
    std::vector<UniqueFd> descriptors;
  };

  /// Connects to `path`; kUnavailable names it when nobody can be reached there, or when whoever listens is another user.
  static Result<DescriptorLink> connect(const std::string& path, std::int64_t timeout_ms);
  /// Takes over an accepted socket. kFailedPrecondition unless its peer runs as our user or as root.
  static Result<DescriptorLink> accept(UniqueFd socket);

  int fd() const noexcept { return socket_.get(); }
  const PeerCredentials& credentials() const noexcept { return credentials_; }
  /// kUnavailable when the peer is gone, kResourceExhausted when it does not read.
  Status send(const Datagram& datagram, int descriptor = -1);
  /// The next datagram, nullopt when there is none now. kUnavailable when the peer hung up, kCorruption for what is no datagram of ours.
  Result<std::optional<Received>> receive();

 private:
  DescriptorLink(UniqueFd socket, PeerCredentials credentials) : socket_(std::move(socket)), credentials_(credentials) {}
  UniqueFd socket_;
  PeerCredentials credentials_;
};

/// The receiver's end: accepts links and turns their datagrams into events. One thread.
class DescriptorListener {
 public:
  struct Lost {
    PeerId peer;
    Status status;
  };

  /// Binds `path`, mode 0600, over a dead socket if need be. kFailedPrecondition when somebody answers there.
  static Result<std::unique_ptr<DescriptorListener>> bind(const std::string& path);
  ~DescriptorListener();
  DescriptorListener(const DescriptorListener&) = delete;
  DescriptorListener& operator=(const DescriptorListener&) = delete;

  const std::string& path() const noexcept { return path_; }
  /// Appends the descriptors to wait on for reading.
  void append_fds(std::vector<int>& fds) const;
  /// Accepts and reads what is there, without waiting. Links that hung up or broke the rules are closed; of peers that had said hello they
  /// are appended to `lost`.
  void service(std::vector<ControlEvent>& events, std::vector<Lost>& lost);
  /// kUnavailable when the peer has no link.
  Status answer(const PeerId& peer, MemoryId memory, const Status& outcome);
  void close(const PeerId& peer);

 private:
  struct Link {
    DescriptorLink link;
    std::optional<PeerId> peer;  // after its hello
    std::int64_t accepted_ns = 0;
    bool closed = false;
  };

  DescriptorListener(UniqueFd socket, UniqueFd spare, std::string path)
      : socket_(std::move(socket)), spare_(std::move(spare)), path_(std::move(path)) {}
  void accept_all();
  bool turn_away();
  Status read_all(Link& link, std::vector<ControlEvent>& events);
  Status handle(Link& link, DescriptorLink::Received received, std::vector<ControlEvent>& events);
  Link* find(const PeerId& peer);

  UniqueFd socket_;
  UniqueFd spare_;  // given up for an instant to turn somebody away when there are no descriptors left
  std::string path_;
  std::vector<Link> links_;
};

}  // namespace headrace
