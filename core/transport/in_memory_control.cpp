#include "core/transport/in_memory_control.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "core/transport/endpoint.h"
#include "core/transport/wake_event.h"

namespace headrace {
namespace {

/// What waits for one end. Guarded by the hub's mutex.
struct Inbox {
  explicit Inbox(WakeEvent event) : signal(std::move(event)) {}

  void push(ControlEvent event) {
    events.push_back(std::move(event));
    notify();
  }
  void notify() {
    signal.set();
    changed.notify_all();
  }
  std::int64_t messages_of(const PeerId& peer) const {
    return std::count_if(events.begin(), events.end(),
                         [&](const ControlEvent& event) { return event.kind == ControlEventKind::kMessage && event.peer == peer; });
  }

  std::deque<ControlEvent> events;
  bool woken = false;
  std::condition_variable changed;
  WakeEvent signal;  // readable while there is something to poll
};

Result<std::shared_ptr<Inbox>> make_inbox() {
  auto signal = WakeEvent::create();
  if (!signal.ok()) return signal.status();
  return std::make_shared<Inbox>(std::move(signal).value());
}

struct MemoryPeer {
  std::shared_ptr<Inbox> inbox;  // the sender's
  bool spoke = false;            // the listener has heard of it
  bool descriptors = false;
  bool dropped = false;
};

struct MemoryEndpoint {
  std::string name;
  std::shared_ptr<Inbox> inbox;  // the listener's
  std::map<PeerId, MemoryPeer> peers;
  bool closed = false;
};

ControlEvent lost_event(const PeerId& peer, std::string why) {
  ControlEvent event;
  event.kind = ControlEventKind::kPeerLost;
  event.peer = peer;
  event.status = Status(Code::kUnavailable, std::move(why));
  return event;
}

ControlEvent message_event(const PeerId& peer, std::span<const std::byte> message, std::span<const std::byte> attachment) {
  ControlEvent event;
  event.peer = peer;
  event.message.assign(message.begin(), message.end());
  event.attachment.assign(attachment.begin(), attachment.end());
  return event;
}

std::optional<ControlEvent> wait_for_event(std::mutex& mutex, Inbox& inbox, std::int64_t timeout_ms) {
  std::unique_lock lock(mutex);
  inbox.changed.wait_for(lock, std::chrono::milliseconds(std::max<std::int64_t>(timeout_ms, 0)),
                         [&] { return inbox.woken || !inbox.events.empty(); });
  std::optional<ControlEvent> event;
  if (!inbox.events.empty()) {
    event = std::move(inbox.events.front());
    inbox.events.pop_front();
  } else {
    inbox.woken = false;
  }
  if (inbox.events.empty() && !inbox.woken) inbox.signal.take();
  return event;
}

}  // namespace

struct InMemoryHub::State {
  explicit State(const ControlOptions& given) : options(given), limits(message_limits(given)) {}

  const ControlOptions options;
  const MessageLimits limits;
  std::mutex mutex;
  std::condition_variable listening;
  std::map<std::string, std::shared_ptr<MemoryEndpoint>> endpoints;  // guarded by mutex, as is everything behind it
};

namespace {

using HubState = std::shared_ptr<InMemoryHub::State>;

class InMemoryListener final : public ControlListener {
 public:
  InMemoryListener(HubState hub, std::shared_ptr<MemoryEndpoint> endpoint, bool descriptors)
      : hub_(std::move(hub)),
        state_(std::move(endpoint)),
        endpoint_("memory://" + state_->name),
        descriptor_path_(descriptors ? endpoint_ + ".fds" : "") {}

  ~InMemoryListener() override {
    const std::lock_guard lock(hub_->mutex);
    state_->closed = true;
    for (auto& [id, peer] : state_->peers) {
      if (!peer.dropped || !peer.descriptors) peer.inbox->push(lost_event(id, fmt::format("receiver '{}' is gone", endpoint_)));
    }
    state_->peers.clear();
    state_->inbox->events.clear();
    hub_->endpoints.erase(state_->name);
  }

  const std::string& endpoint() const noexcept override { return endpoint_; }
  const std::string& descriptor_path() const noexcept override { return descriptor_path_; }

  Status send(const PeerId& peer, std::span<const std::byte> message, std::span<const std::byte> attachment) override {
    HEADRACE_RETURN_IF_ERROR(check_message(hub_->limits, message.size(), attachment.size(), "send to peer " + peer.hex()));
    const std::lock_guard lock(hub_->mutex);
    MemoryPeer* const found = find(peer);
    if (found == nullptr) return Status(Code::kUnavailable, fmt::format("send to peer {}: it is not connected", peer.hex()));
    if (found->inbox->messages_of(peer) >= hub_->options.queue_messages_max) {
      return Status(Code::kResourceExhausted,
                    fmt::format("send to peer {}: {} messages are queued", peer.hex(), hub_->options.queue_messages_max));
    }
    found->inbox->push(message_event(peer, message, attachment));
    return ok_status();
  }

  Status acknowledge(const PeerId& peer, MemoryId memory, const Status& outcome) override {
    const std::lock_guard lock(hub_->mutex);
    MemoryPeer* const found = find(peer);
    if (found == nullptr || !found->descriptors) {
      return Status(Code::kUnavailable, fmt::format("answer for memory {:#x}: peer {} has no descriptor socket", memory.value, peer.hex()));
    }
    ControlEvent event;
    event.kind = ControlEventKind::kAcknowledged;
    event.peer = peer;
    event.memory = memory;
    event.status = outcome;
    found->inbox->push(std::move(event));
    return ok_status();
  }

  void drop(const PeerId& peer) override {
    const std::lock_guard lock(hub_->mutex);
    std::erase_if(state_->inbox->events, [&](const ControlEvent& event) { return event.peer == peer; });
    MemoryPeer* const found = find(peer);
    if (found == nullptr) return;
    found->dropped = true;
    if (found->descriptors) found->inbox->push(lost_event(peer, fmt::format("receiver '{}' closed the descriptor socket", endpoint_)));
  }

  Result<std::optional<ControlEvent>> poll(std::int64_t timeout_ms) override {
    return wait_for_event(hub_->mutex, *state_->inbox, timeout_ms);
  }

  void wake() noexcept override {
    const std::lock_guard lock(hub_->mutex);
    state_->inbox->woken = true;
    state_->inbox->notify();
  }

 private:
  MemoryPeer* find(const PeerId& peer) {
    const auto found = state_->peers.find(peer);
    return found == state_->peers.end() || found->second.dropped ? nullptr : &found->second;
  }

  const HubState hub_;
  const std::shared_ptr<MemoryEndpoint> state_;  // shared: connections find it gone after the listener
  const std::string endpoint_;
  const std::string descriptor_path_;
};

class InMemoryConnection final : public ControlConnection {
 public:
  InMemoryConnection(HubState hub, std::shared_ptr<MemoryEndpoint> endpoint, std::shared_ptr<Inbox> inbox, const PeerId& id)
      : hub_(std::move(hub)), state_(std::move(endpoint)), inbox_(std::move(inbox)), id_(id), endpoint_("memory://" + state_->name) {}

  ~InMemoryConnection() override {
    const std::lock_guard lock(hub_->mutex);
    const MemoryPeer* const peer = find();
    if (peer == nullptr) return;
    const bool noticed = (peer->spoke || peer->descriptors) && !peer->dropped;
    if (noticed) state_->inbox->push(lost_event(id_, fmt::format("peer {}: its connection to '{}' ended", id_.hex(), endpoint_)));
    state_->peers.erase(id_);
  }

  const std::string& endpoint() const noexcept override { return endpoint_; }
  const PeerId& id() const noexcept override { return id_; }
  int ready_fd() const noexcept override { return inbox_->signal.fd(); }

  Status send(std::span<const std::byte> message, std::span<const std::byte> attachment) override {
    HEADRACE_RETURN_IF_ERROR(check_message(hub_->limits, message.size(), attachment.size(), fmt::format("send to '{}'", endpoint_)));
    const std::lock_guard lock(hub_->mutex);
    MemoryPeer* const peer = find();
    if (peer == nullptr) return gone();
    if (peer->dropped) return peer->descriptors ? gone() : ok_status();
    if (state_->inbox->messages_of(id_) >= hub_->options.queue_messages_max) {
      return Status(Code::kResourceExhausted,
                    fmt::format("send to '{}': {} messages are queued", endpoint_, hub_->options.queue_messages_max));
    }
    peer->spoke = true;
    state_->inbox->push(message_event(id_, message, attachment));
    return ok_status();
  }

  Status connect_descriptors(const std::string& path, std::int64_t /*timeout_ms*/) override {
    const std::lock_guard lock(hub_->mutex);
    MemoryPeer* const peer = find();
    if (peer == nullptr) return gone();
    if (path != endpoint_ + ".fds")
      return Status(Code::kUnavailable, fmt::format("connect to descriptor socket '{}': nobody is there", path));
    if (peer->descriptors) return Status(Code::kFailedPrecondition, fmt::format("'{}' has a descriptor socket already", endpoint_));
    peer->descriptors = true;
    return ok_status();
  }

  Status send_descriptor(MemoryId memory, std::uint64_t bytes, int descriptor) override {
    UniqueFd copy(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return errno_status(errno, fmt::format("offer memory {:#x}: duplicate its descriptor", memory.value));
    ControlEvent event;
    event.kind = ControlEventKind::kDescriptor;
    event.memory = memory;
    event.memory_bytes = bytes;
    event.descriptor = std::move(copy);
    return push_descriptor_event(std::move(event));
  }

  Status release_descriptor(MemoryId memory) override {
    ControlEvent event;
    event.kind = ControlEventKind::kReleased;
    event.memory = memory;
    return push_descriptor_event(std::move(event));
  }

  Result<std::optional<ControlEvent>> poll(std::int64_t timeout_ms) override { return wait_for_event(hub_->mutex, *inbox_, timeout_ms); }

  void wake() noexcept override {
    const std::lock_guard lock(hub_->mutex);
    inbox_->woken = true;
    inbox_->notify();
  }

 private:
  MemoryPeer* find() {
    if (state_->closed) return nullptr;
    const auto found = state_->peers.find(id_);
    return found == state_->peers.end() ? nullptr : &found->second;
  }

  Status gone() const { return Status(Code::kUnavailable, fmt::format("receiver '{}': the connection ended", endpoint_)); }

  Status push_descriptor_event(ControlEvent event) {
    event.peer = id_;
    event.credentials = {::getpid(), ::geteuid()};
    const std::lock_guard lock(hub_->mutex);
    const MemoryPeer* const peer = find();
    if (peer == nullptr || peer->dropped) return gone();
    if (!peer->descriptors) return Status(Code::kFailedPrecondition, fmt::format("'{}' has no descriptor socket", endpoint_));
    state_->inbox->push(std::move(event));
    return ok_status();
  }

  const HubState hub_;
  const std::shared_ptr<MemoryEndpoint> state_;  // shared: it outlives its listener for whoever still holds a connection
  const std::shared_ptr<Inbox> inbox_;           // shared: the listener pushes into it
  const PeerId id_;
  const std::string endpoint_;
};

}  // namespace

InMemoryHub::InMemoryHub(const ControlOptions& options) : state_(std::make_shared<State>(options)) {}

Result<std::unique_ptr<ControlListener>> InMemoryHub::listen(const std::string& name, bool descriptors) {
  auto inbox = make_inbox();
  if (!inbox.ok()) return inbox.status();
  auto endpoint = std::make_shared<MemoryEndpoint>();
  endpoint->name = name;
  endpoint->inbox = std::move(inbox).value();
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->endpoints.emplace(name, endpoint).second) {
      return Status(Code::kFailedPrecondition, fmt::format("listen on 'memory://{}': somebody serves it already", name));
    }
  }
  state_->listening.notify_all();
  return std::unique_ptr<ControlListener>(std::make_unique<InMemoryListener>(state_, std::move(endpoint), descriptors));
}

Result<std::unique_ptr<ControlConnection>> InMemoryHub::connect(const std::string& name) {
  auto inbox = make_inbox();
  if (!inbox.ok()) return inbox.status();
  const PeerId id = PeerId::random();
  std::unique_lock lock(state_->mutex);
  const bool found = state_->listening.wait_for(lock, std::chrono::milliseconds(state_->options.connect_timeout_ms),
                                                [&] { return state_->endpoints.contains(name); });
  if (!found) {
    return Status(Code::kDeadlineExceeded,
                  fmt::format("connect to 'memory://{}': nobody answers after {} ms", name, state_->options.connect_timeout_ms));
  }
  auto endpoint = state_->endpoints.at(name);
  endpoint->peers[id] = MemoryPeer{inbox.value(), false, false, false};
  return std::unique_ptr<ControlConnection>(
      std::make_unique<InMemoryConnection>(state_, std::move(endpoint), std::move(inbox).value(), id));
}

}  // namespace headrace
