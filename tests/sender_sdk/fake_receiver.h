#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/device/device.h"
#include "core/transport/control.h"
#include "core/transport/data_path.h"
#include "core/wire/messages.h"

namespace headrace::test {

/// How a FakeReceiver answers when a test does not intercept.
struct FakeScript {
  std::string job = "job";
  std::string engine = "engine-0";
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
  std::vector<std::string> data_paths{"shm", "inline"};
  std::uint32_t credits = 2;
  std::int64_t bucket_bytes_max = 0;
  wire::SessionState state = wire::SessionState::kIdle;
  std::uint64_t state_session = 0;
  Digest expert_map;
  std::vector<wire::ValueRule> values;
  /// What it wants of an entry; missing: the whole of it in one box, any cut.
  std::function<wire::Wanted(const wire::ManifestEntry&)> wants;
};

/// One tensor as it arrived.
struct Arrived {
  wire::ManifestEntry entry;
  std::vector<std::byte> bytes;      // of the whole tensor
  std::vector<std::uint8_t> writes;  // how often each byte was written
};

/// The other end of the protocol, written for tests from docs/protocol.md: a thread over a listener that answers every message as a
/// receiver does that has nothing to do, and keeps what it saw. Bytes are unpacked by a plain loop over elements.
class FakeReceiver {
 public:
  /// True: the message has been dealt with. On the fake's thread.
  using Intercept = std::function<bool(FakeReceiver&, const PeerId&, const wire::Message&)>;

  FakeReceiver(std::unique_ptr<ControlListener> listener, FakeScript script, Intercept intercept = {});
  ~FakeReceiver();
  FakeReceiver(const FakeReceiver&) = delete;
  FakeReceiver& operator=(const FakeReceiver&) = delete;

  const std::string& endpoint() const { return listener_->endpoint(); }

  // For intercepts and posted work, on the fake's thread.
  void send(const PeerId& peer, wire::Body body);
  void send_in(SessionId session, const PeerId& peer, wire::Body body);
  void consume(const PeerId& peer, std::uint64_t sequence);
  std::vector<PeerId> peers() const;
  /// Consumes everything that was held back, oldest first.
  void consume_held();
  wire::Failure failure(Code code, std::string message) const;

  // From the test's thread.
  void post(std::function<void(FakeReceiver&)> work);
  /// Waits until `seen` holds; false after ten seconds.
  bool await(const std::function<bool(const FakeReceiver&)>& seen);
  std::size_t count(wire::MessageType type) const;
  /// The last message of this kind.
  std::optional<wire::Message> last(wire::MessageType type) const;
  std::vector<wire::Message> all(wire::MessageType type) const;
  Arrived arrived(const std::string& name) const;
  std::uint64_t attached_bytes() const;
  std::uint64_t attachment_bytes() const;
  std::size_t unanswered_max() const;
  std::size_t unreadable_extents() const;
  void hold_consumed(bool hold);

 private:
  struct Peer {
    std::string sender;
    std::unique_ptr<DataSink> sink;
    std::vector<wire::ManifestEntry> entries;
    std::vector<wire::Wanted> wanted;
    std::uint64_t expected_sequence = 0;
    std::size_t unanswered = 0;
    bool has_manifest = false;
    bool confirmed = false;
    bool ended = false;
    std::optional<Digest> committed_digest;
    Digest digest;
  };

  void run();
  void on_event(ControlEvent event);
  void on_message(const PeerId& peer, const wire::Message& message, std::span<const std::byte> attachment);
  void on_manifest(const PeerId& peer, const wire::Manifest& manifest);
  void on_bucket(const PeerId& peer, const wire::Bucket& bucket, std::span<const std::byte> attachment);
  void answer_manifests();
  void unpack(Peer& peer, const wire::Extent& extent, std::span<const std::byte> attachment);
  void to_all(const wire::Body& body);
  bool all_senders(const std::function<bool(const Peer&)>& holds) const;

  std::unique_ptr<ControlListener> listener_;
  const FakeScript script_;
  const Intercept intercept_;
  std::unique_ptr<Device> device_;
  const Incarnation incarnation_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<PeerId, Peer> peers_;
  SessionId session_;
  wire::Open open_;
  std::vector<wire::Message> messages_;
  std::map<std::string, Arrived> arrived_;
  std::vector<std::pair<PeerId, std::uint64_t>> held_;
  std::vector<std::function<void(FakeReceiver&)>> work_;
  std::uint64_t attached_bytes_ = 0;
  std::uint64_t attachment_bytes_ = 0;
  std::size_t unanswered_max_ = 0;
  std::size_t unreadable_extents_ = 0;
  bool hold_consumed_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace headrace::test
