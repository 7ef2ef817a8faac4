#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "core/transport/control.h"
#include "core/transport/descriptor_socket.h"
#include "core/transport/wake_event.h"
#include "core/transport/zmq_error.h"
#include "core/transport/zmq_socket.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

/// ROUTER. Every connection is known by ZeroMQ's descriptor number until its first message names the peer; from then on the monitor's
/// "disconnected" of that number is the loss of that peer.
class ZmqListener final : public ControlListener {
 public:
  ZmqListener(const Endpoint& endpoint, const ControlOptions& options, WakeEvent wake)
      : limits_(message_limits(options)),
        queue_messages_max_(options.queue_messages_max),
        wake_(std::move(wake)),
        monitor_watched_(prepare(context_, endpoint, options)),
        monitor_(context_, monitor_watched_, ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED),
        router_(std::move(monitor_watched_)) {
    router_.bind(endpoint.text);
    endpoint_ = router_.get(zmq::sockopt::last_endpoint);
    ipc_path_ = endpoint.path;
  }

  ~ZmqListener() override {
    // ZeroMQ leaves the file. While the router is bound it is still ours and not a successor's.
    if (!ipc_path_.empty()) ::unlink(ipc_path_.c_str());
  }

  void add_descriptors(std::unique_ptr<DescriptorListener> descriptors) {
    descriptors_ = std::move(descriptors);
    descriptor_path_ = descriptors_->path();
  }

  const std::string& endpoint() const noexcept override { return endpoint_; }
  const std::string& descriptor_path() const noexcept override { return descriptor_path_; }

  Status send(const PeerId& peer, std::span<const std::byte> message, std::span<const std::byte> attachment) override {
    HEADRACE_RETURN_IF_ERROR(check_message(limits_, message.size(), attachment.size(), "send to peer " + peer.hex()));
    const auto found = peers_.find(peer);
    if (found == peers_.end() || found->second.dropped) return unavailable(peer, "it is not connected");
    try {
      if (send_frames(router_, peer_bytes(peer), message, attachment)) return ok_status();
    } catch (const zmq::error_t& error) {
      return zmq_status(error.num(), "send to peer " + peer.hex());
    }
    return Status(Code::kResourceExhausted, fmt::format("send to peer {}: {} messages are queued", peer.hex(), queue_messages_max_));
  }

  Status acknowledge(const PeerId& peer, MemoryId memory, const Status& outcome) override {
    if (descriptors_ == nullptr) return Status(Code::kFailedPrecondition, "acknowledge memory: this listener has no descriptor socket");
    return descriptors_->answer(peer, memory, outcome);
  }

  void drop(const PeerId& peer) override {
    std::erase_if(losing_, [&](const Losing& losing) { return losing.peer == peer; });
    std::erase_if(pending_, [&](const ControlEvent& event) { return event.peer == peer; });
    if (descriptors_ != nullptr) descriptors_->close(peer);
    // ZeroMQ cannot close one connection of a ROUTER, so what still comes from it is thrown away until it ends by itself.
    if (const auto found = peers_.find(peer); found != peers_.end()) found->second.dropped = true;
  }

  Result<std::optional<ControlEvent>> poll(std::int64_t timeout_ms) override {
    const std::int64_t due = now_ns() + std::max<std::int64_t>(timeout_ms, 0) * 1'000'000;
    try {
      while (pending_.empty()) {
        const bool woken = wait_and_service(due);
        if (pending_.empty() && (woken || now_ns() >= due)) return std::optional<ControlEvent>();
      }
    } catch (const zmq::error_t& error) {
      return zmq_status(error.num(), fmt::format("poll '{}'", endpoint_));
    }
    std::optional<ControlEvent> event(std::move(pending_.front()));
    pending_.pop_front();
    return event;
  }

  void wake() noexcept override { wake_.set(); }

 private:
  struct Peer {
    int connection = -1;
    bool dropped = false;
  };

  static zmq::socket_t prepare(zmq::context_t& context, const Endpoint& endpoint, const ControlOptions& options) {
    zmq::socket_t socket(context, zmq::socket_type::router);
    set_common_options(socket, endpoint, options);
    socket.set(zmq::sockopt::router_mandatory, true);
    return socket;
  }

  static Status unavailable(const PeerId& peer, std::string_view why) {
    return Status(Code::kUnavailable, fmt::format("send to peer {}: {}", peer.hex(), why));
  }

  /// Waits for anything until `due`, then takes in what there is: at most one message. True when wake() was called.
  bool wait_and_service(std::int64_t due) {
    std::vector<zmq::pollitem_t> items{poll_item(router_), poll_item(monitor_.socket()), poll_item(wake_.fd())};
    std::vector<int> fds;
    if (descriptors_ != nullptr) descriptors_->append_fds(fds);
    for (const int fd : fds) items.push_back(poll_item(fd));
    std::int64_t until = due;
    for (const Losing& losing : losing_) until = std::min(until, losing.due_ns);
    try {
      zmq::poll(items, std::chrono::milliseconds(until_ms(until)));
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR) throw;
    }
    const auto ready = [](const zmq::pollitem_t& item) { return item.revents != 0; };
    if (ready(items[1])) read_monitor();
    if (std::any_of(items.begin() + 3, items.end(), ready)) read_descriptors();
    const bool drained = !read_message();
    report_losses(drained);
    return ready(items[2]) && wake_.take();
  }

  void read_monitor() {
    while (const auto event = monitor_.next()) {
      if (event->kind == ZMQ_EVENT_ACCEPTED) {
        connections_[event->value] = std::nullopt;
      } else if (event->kind == ZMQ_EVENT_DISCONNECTED) {
        const auto found = connections_.find(event->value);
        if (found == connections_.end()) continue;
        if (found->second) disconnected(*found->second);
        connections_.erase(found);
      }
    }
  }

  void disconnected(const PeerId& peer) {
    const auto found = peers_.find(peer);
    if (found == peers_.end()) return;
    if (found->second.dropped) {
      forget(peer);
    } else {
      lose(peer, Status(Code::kUnavailable, fmt::format("peer {}: its connection to '{}' ended", peer.hex(), endpoint_)), 0);
    }
  }

  void read_descriptors() {
    std::vector<ControlEvent> events;
    std::vector<DescriptorListener::Lost> lost;
    descriptors_->service(events, lost);
    for (ControlEvent& event : events) pending_.push_back(std::move(event));
    for (DescriptorListener::Lost& link : lost) {
      const bool hangup = link.status.code() == Code::kUnavailable;
      lose(link.peer, Status(link.status.code(), fmt::format("peer {}: {}", link.peer.hex(), link.status.message())),
           hangup ? now_ns() + kHangupGraceNs : 0);
    }
  }

  /// False when there was none.
  bool read_message() {
    std::vector<zmq::message_t> frames;
    if (!receive_frames(router_, frames)) return false;
    for (Losing& losing : losing_) --losing.other_messages_max;
    PeerId peer;
    if (frames[0].size() != peer.bytes.size()) return true;
    std::memcpy(peer.bytes.data(), frames[0].data(), peer.bytes.size());
    if (!admit(peer, frames.size() > 1 ? zmq_msg_get(frames[1].handle(), ZMQ_SRCFD) : -1)) return true;
    if (frames.size() < 2 || frames.size() > 3) {
      lose(peer, Status(Code::kCorruption, fmt::format("peer {}: a message of {} frames, expected 1 or 2", peer.hex(), frames.size() - 1)),
           0);
      return true;
    }
    const std::size_t attachment_bytes = frames.size() == 3 ? frames[2].size() : 0;
    if (Status status = check_message(limits_, frames[1].size(), attachment_bytes, "peer " + peer.hex()); !status.ok()) {
      lose(peer, Status(Code::kCorruption, status.message()), 0);
      return true;
    }
    ControlEvent event;
    event.peer = peer;
    event.message = to_bytes(frames[1]);
    if (frames.size() == 3) event.attachment = to_bytes(frames[2]);
    pending_.push_back(std::move(event));
    return true;
  }

  /// Whether a message of this peer is to be delivered; learns which connection a new peer has.
  bool admit(const PeerId& peer, int connection) {
    if (const auto found = peers_.find(peer); found != peers_.end()) return !found->second.dropped;
    if (std::find(gone_.begin(), gone_.end(), peer) != gone_.end()) return false;
    // Descriptor numbers are used again: what the monitor has to say about the number's former owner must come first.
    read_monitor();
    peers_[peer] = Peer{connection, false};  // whether there are too many is for the receiver to say, by name
    const auto found = connections_.find(connection);
    if (found == connections_.end()) {
      disconnected(peer);
    } else {
      if (found->second) disconnected(*found->second);
      found->second = peer;
    }
    return true;
  }

  void lose(const PeerId& peer, Status status, std::int64_t due) {
    if (std::find(gone_.begin(), gone_.end(), peer) != gone_.end()) return;
    if (const auto found = peers_.find(peer); found != peers_.end() && found->second.dropped) return;
    for (Losing& losing : losing_) {
      if (losing.peer != peer) continue;
      losing.due_ns = std::min(losing.due_ns, due);
      return;
    }
    const auto others = static_cast<std::int64_t>(peers_.size() + 1) * queue_messages_max_;
    losing_.push_back({peer, std::move(status), due, others});
  }

  void report_losses(bool drained) {
    const std::int64_t now = now_ns();
    std::vector<Losing> waiting;
    for (Losing& losing : losing_) {
      if (losing.due_ns > now || (!drained && losing.other_messages_max > 0)) {
        waiting.push_back(std::move(losing));
        continue;
      }
      ControlEvent event;
      event.kind = ControlEventKind::kPeerLost;
      event.peer = losing.peer;
      event.status = std::move(losing.status);
      forget(losing.peer);
      pending_.push_back(std::move(event));
    }
    losing_ = std::move(waiting);
  }

  void forget(const PeerId& peer) {
    peers_.erase(peer);
    if (descriptors_ != nullptr) descriptors_->close(peer);
    gone_.push_back(peer);
    if (gone_.size() > limits::kPeersMax) gone_.pop_front();
  }

  const MessageLimits limits_;
  const std::int32_t queue_messages_max_;
  WakeEvent wake_;
  std::string endpoint_;
  std::string ipc_path_;  // empty for tcp
  std::string descriptor_path_;
  // Destroyed from the bottom up: the router before its monitor, both before the context.
  zmq::context_t context_{1};
  zmq::socket_t monitor_watched_;  // the router until its monitor stands
  ZmqMonitor monitor_;
  zmq::socket_t router_;
  std::unique_ptr<DescriptorListener> descriptors_;
  std::map<int, std::optional<PeerId>> connections_;  // open connections by descriptor number
  std::map<PeerId, Peer> peers_;                      // who has sent a message and is not lost
  std::deque<PeerId> gone_;                           // lost of late: stragglers of theirs are thrown away
  std::vector<Losing> losing_;
  std::deque<ControlEvent> pending_;
};

}  // namespace

Result<std::unique_ptr<ControlListener>> listen_zmq(const std::string& endpoint, const std::string& descriptor_path,
                                                    const ControlOptions& options) {
  auto parsed = parse_endpoint(endpoint);
  if (!parsed.ok()) return parsed.status();
  if (options.queue_messages_max <= 0)
    return Status(Code::kInvalidArgument, fmt::format("listen on '{}': a queue of {} messages", endpoint, options.queue_messages_max));
  if (parsed.value().kind == EndpointKind::kIpc) {
    auto answers = socket_answers(parsed.value().path, SOCK_STREAM);
    if (!answers.ok()) return answers.status();
    if (answers.value()) return Status(Code::kFailedPrecondition, fmt::format("listen on '{}': somebody serves it already", endpoint));
  }
  auto wake = WakeEvent::create();
  if (!wake.ok()) return wake.status();
  std::unique_ptr<DescriptorListener> descriptors;
  if (!descriptor_path.empty()) {
    auto bound = DescriptorListener::bind(descriptor_path);
    if (!bound.ok()) return bound.status();
    descriptors = std::move(bound).value();
  }
  if (Status room = check_room_for_zmq(); !room.ok())
    return Status(room.code(), fmt::format("listen on '{}': {}", endpoint, room.message()), room.source(), room.native());
  try {
    auto listener = std::make_unique<ZmqListener>(parsed.value(), options, std::move(wake).value());
    if (descriptors != nullptr) listener->add_descriptors(std::move(descriptors));
    if (parsed.value().kind == EndpointKind::kIpc) ::chmod(parsed.value().path.c_str(), 0600);
    return std::unique_ptr<ControlListener>(std::move(listener));
  } catch (const zmq::error_t& error) {
    return zmq_status(error.num(), fmt::format("listen on '{}'", endpoint));
  }
}

}  // namespace headrace
