#include <fcntl.h>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

#include "core/transport/control.h"
#include "core/transport/descriptor_socket.h"
#include "core/transport/wake_event.h"
#include "core/transport/zmq_error.h"
#include "core/transport/zmq_socket.h"

namespace headrace {
namespace {

constexpr std::int64_t kRetryMs = 10;
constexpr std::int64_t kRetryMsMax = 100;
constexpr int kNeverMs = 24 * 3'600'000;
constexpr int kMonitored = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                           ZMQ_EVENT_HANDSHAKE_FAILED_AUTH | ZMQ_EVENT_CLOSED | ZMQ_EVENT_DISCONNECTED;

/// The sockets of one connection. ZeroMQ would reconnect by itself, perhaps to another life of the receiver; this one never does.
struct Sockets {
  Sockets(zmq::context_t& context, const Endpoint& endpoint, const PeerId& id, const ControlOptions& options)
      : unmonitored(prepare(context, endpoint, id, options)), monitor(context, unmonitored, kMonitored), dealer(std::move(unmonitored)) {
    dealer.connect(endpoint.text);
  }

  static zmq::socket_t prepare(zmq::context_t& context, const Endpoint& endpoint, const PeerId& id, const ControlOptions& options) {
    zmq::socket_t socket(context, zmq::socket_type::dealer);
    set_common_options(socket, endpoint, options);
    // ZeroMQ throws unread messages away when it may not reconnect, so it may, later than any connection lives.
    socket.set(zmq::sockopt::reconnect_ivl, kNeverMs);
    socket.set(zmq::sockopt::routing_id, zmq::buffer(id.bytes));
    return socket;
  }

  zmq::socket_t unmonitored;  // the dealer until its monitor stands
  ZmqMonitor monitor;
  zmq::socket_t dealer;  // destroyed before its monitor
};

/// What poll(2) needs to know of a connection.
struct Readiness {
  UniqueFd epoll;
  UniqueFd timer;  // a loss that becomes due
  WakeEvent wake;
  WakeEvent kick;  // something became ready while another call looked

  static Result<Readiness> create() {
    auto wake = WakeEvent::create();
    if (!wake.ok()) return wake.status();
    auto kick = WakeEvent::create();
    if (!kick.ok()) return kick.status();
    Readiness ready{UniqueFd(::epoll_create1(EPOLL_CLOEXEC)), UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
                    std::move(wake).value(), std::move(kick).value()};
    if (!ready.epoll.valid() || !ready.timer.valid()) return errno_status(errno, "create the wait descriptors of a connection");
    for (const int fd : {ready.timer.get(), ready.wake.fd(), ready.kick.fd()}) HEADRACE_RETURN_IF_ERROR(ready.add(fd));
    return ready;
  }

  Status add(int fd) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) return errno_status(errno, "wait for a descriptor of a connection");
    return ok_status();
  }

  void remove(int fd) { ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, fd, nullptr); }
};

class ZmqConnection final : public ControlConnection {
 public:
  ZmqConnection(std::string endpoint, const PeerId& id, const ControlOptions& options, Readiness ready)
      : endpoint_(std::move(endpoint)),
        id_(id),
        limits_(message_limits(options)),
        queue_messages_max_(options.queue_messages_max),
        ready_(std::move(ready)) {}

  /// Tries until the handshake is done or `options.connect_timeout_ms` is over.
  Status connect(const Endpoint& endpoint, const ControlOptions& options) {
    const std::int64_t due = now_ns() + options.connect_timeout_ms * 1'000'000;
    std::int64_t pause_ms = kRetryMs;
    std::string reason = "nobody answers";
    do {
      sockets_ = std::make_unique<Sockets>(context_, endpoint, id_, options);
      if (shake_hands(due, reason)) return watch();
      sockets_.reset();
      pause(std::min(pause_ms, until_ms(due)));
      pause_ms = std::min(pause_ms + kRetryMs, kRetryMsMax);
    } while (now_ns() < due);
    return Status(Code::kDeadlineExceeded, fmt::format("connect to '{}': {} after {} ms", endpoint_, reason, options.connect_timeout_ms));
  }

  const std::string& endpoint() const noexcept override { return endpoint_; }
  const PeerId& id() const noexcept override { return id_; }
  int ready_fd() const noexcept override { return ready_.epoll.get(); }
  void wake() noexcept override { ready_.wake.set(); }

  Status send(std::span<const std::byte> message, std::span<const std::byte> attachment) override {
    HEADRACE_RETURN_IF_ERROR(check_message(limits_, message.size(), attachment.size(), fmt::format("send to '{}'", endpoint_)));
    HEADRACE_RETURN_IF_ERROR(check_connected());
    try {
      // ZeroMQ would keep the message for a reconnect that never comes.
      read_monitor();
      HEADRACE_RETURN_IF_ERROR(check_connected());
      const bool sent = send_frames(sockets_->dealer, std::nullopt, message, attachment);
      // Sending takes in what ZeroMQ's thread reported, so ready_fd() may have lost its reason to be readable.
      if ((sockets_->dealer.get(zmq::sockopt::events) & ZMQ_POLLIN) != 0) ready_.kick.set();
      if (sent) return ok_status();
    } catch (const zmq::error_t& error) {
      return zmq_status(error.num(), fmt::format("send to '{}'", endpoint_));
    }
    return Status(Code::kResourceExhausted, fmt::format("send to '{}': {} messages are queued", endpoint_, queue_messages_max_));
  }

  Status connect_descriptors(const std::string& path, std::int64_t timeout_ms) override {
    HEADRACE_RETURN_IF_ERROR(check_connected());
    if (descriptors_) return Status(Code::kFailedPrecondition, fmt::format("'{}' has a descriptor socket already", endpoint_));
    auto link = DescriptorLink::connect(path, timeout_ms);
    if (!link.ok()) return link.status();
    HEADRACE_RETURN_IF_ERROR(link.value().send({.type = DatagramType::kHello, .peer = id_, .memory = {}, .bytes = 0, .status = {}}));
    HEADRACE_RETURN_IF_ERROR(ready_.add(link.value().fd()));
    descriptors_.emplace(std::move(link).value());
    return ok_status();
  }

  Status send_descriptor(MemoryId memory, std::uint64_t bytes, int descriptor) override {
    if (descriptor < 0) return Status(Code::kInvalidArgument, fmt::format("offer memory {:#x}: no descriptor", memory.value));
    return send_datagram({.type = DatagramType::kMemory, .peer = id_, .memory = memory, .bytes = bytes, .status = {}}, descriptor);
  }

  Status release_descriptor(MemoryId memory) override {
    return send_datagram({.type = DatagramType::kRelease, .peer = id_, .memory = memory, .bytes = 0, .status = {}}, -1);
  }

  Result<std::optional<ControlEvent>> poll(std::int64_t timeout_ms) override {
    const std::int64_t due = now_ns() + std::max<std::int64_t>(timeout_ms, 0) * 1'000'000;
    ready_.kick.take();
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

 private:
  static void pause(std::int64_t ms) {
    zmq::poll(static_cast<zmq::pollitem_t*>(nullptr), 0, std::chrono::milliseconds(std::max<std::int64_t>(ms, 0)));
  }

  bool shake_hands(std::int64_t due, std::string& reason) {
    zmq::pollitem_t item = poll_item(sockets_->monitor.socket());
    while (true) {
      while (const auto event = sockets_->monitor.next()) {
        if (event->kind == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) return true;
        const bool closed = event->kind == ZMQ_EVENT_CLOSED;
        reason = closed ? "nobody answers" : "somebody answers who does not finish ZeroMQ's handshake";
        return false;
      }
      const std::int64_t left = until_ms(due);
      if (left == 0) return false;
      zmq::poll(&item, 1, std::chrono::milliseconds(left));
    }
  }

  Status watch() {
    HEADRACE_RETURN_IF_ERROR(ready_.add(sockets_->dealer.get(zmq::sockopt::fd)));
    HEADRACE_RETURN_IF_ERROR(ready_.add(sockets_->monitor.socket().get(zmq::sockopt::fd)));
    // The handshake's reader may have taken in more than it looked at.
    ready_.kick.set();
    return ok_status();
  }

  Status check_connected() const {
    if (losing_) return losing_->status;
    return lost_;
  }

  Status send_datagram(const Datagram& datagram, int descriptor) {
    HEADRACE_RETURN_IF_ERROR(check_connected());
    if (!descriptors_) return Status(Code::kFailedPrecondition, fmt::format("'{}' has no descriptor socket", endpoint_));
    return descriptors_->send(datagram, descriptor);
  }

  /// Waits for anything until `due`, then takes in what there is: at most one message. True when wake() was called.
  bool wait_and_service(std::int64_t due) {
    // Who waits elsewhere only looks: what is ready is taken in below, without asking first whether it is.
    if (const std::int64_t left = until_ms(losing_ ? std::min(due, losing_->due_ns) : due); left > 0) wait(left);
    if (sockets_ != nullptr) {
      read_monitor();
      if (descriptors_) read_descriptors();
      const bool drained = !read_message();
      report_loss(drained);
    }
    return ready_.wake.take();
  }

  void wait(std::int64_t ms) {
    std::vector<zmq::pollitem_t> items{poll_item(ready_.wake.fd())};
    if (sockets_ != nullptr) {
      items.push_back(poll_item(sockets_->dealer));
      items.push_back(poll_item(sockets_->monitor.socket()));
    }
    if (descriptors_) items.push_back(poll_item(descriptors_->fd()));
    try {
      zmq::poll(items, std::chrono::milliseconds(ms));
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR) throw;
    }
  }

  void read_monitor() {
    while (const auto event = sockets_->monitor.next()) {
      if (event->kind == ZMQ_EVENT_DISCONNECTED)
        lose(Status(Code::kUnavailable, fmt::format("receiver '{}': the connection ended", endpoint_)), 0);
    }
  }

  void read_descriptors() {
    while (true) {
      auto received = descriptors_->receive();
      if (received.ok() && !received.value()) return;
      Status status = received.status();
      if (status.ok() && received.value()->datagram.type != DatagramType::kAnswer) {
        status = Status(Code::kCorruption, "descriptor socket: a datagram that a sender does not take");
      }
      if (!status.ok()) {
        descriptors_.reset();
        const bool hangup = status.code() == Code::kUnavailable;
        lose(Status(status.code(), fmt::format("receiver '{}': {}", endpoint_, status.message())), hangup ? now_ns() + kHangupGraceNs : 0);
        return;
      }
      ControlEvent event;
      event.kind = ControlEventKind::kAcknowledged;
      event.peer = id_;
      event.memory = received.value()->datagram.memory;
      event.status = received.value()->datagram.status;
      pending_.push_back(std::move(event));
    }
  }

  /// False when there was none.
  bool read_message() {
    std::vector<zmq::message_t> frames;
    if (!receive_frames(sockets_->dealer, frames)) return false;
    const std::size_t attachment_bytes = frames.size() == 2 ? frames[1].size() : 0;
    Status status =
        frames.size() > 2
            ? Status(Code::kCorruption, fmt::format("receiver '{}': a message of {} frames, expected 1 or 2", endpoint_, frames.size()))
            : check_message(limits_, frames[0].size(), attachment_bytes, fmt::format("receiver '{}'", endpoint_));
    if (!status.ok()) {
      lose(Status(Code::kCorruption, status.message()), 0);
      return true;
    }
    ControlEvent event;
    event.peer = id_;
    event.message = to_bytes(frames[0]);
    if (frames.size() == 2) event.attachment = to_bytes(frames[1]);
    pending_.push_back(std::move(event));
    return true;
  }

  void lose(Status status, std::int64_t due) {
    if (!lost_.ok()) return;
    if (losing_) {
      losing_->due_ns = std::min(losing_->due_ns, due);
    } else {
      losing_ = Losing{id_, std::move(status), due, 0};
    }
    // Readable as soon as the loss is due, for whoever waits on ready_fd().
    const std::int64_t wait_ns = std::max<std::int64_t>(losing_->due_ns - now_ns(), 1);
    const itimerspec when = {.it_interval = {}, .it_value = {.tv_sec = wait_ns / 1'000'000'000, .tv_nsec = wait_ns % 1'000'000'000}};
    ::timerfd_settime(ready_.timer.get(), 0, &when, nullptr);
  }

  void report_loss(bool drained) {
    if (!losing_ || !drained || losing_->due_ns > now_ns()) return;
    ControlEvent event;
    event.kind = ControlEventKind::kPeerLost;
    event.peer = id_;
    event.status = losing_->status;
    lost_ = std::move(losing_->status);
    losing_.reset();
    descriptors_.reset();
    ready_.remove(sockets_->dealer.get(zmq::sockopt::fd));
    ready_.remove(sockets_->monitor.socket().get(zmq::sockopt::fd));
    sockets_.reset();
    const itimerspec never = {};
    ::timerfd_settime(ready_.timer.get(), 0, &never, nullptr);
    pending_.push_back(std::move(event));
  }

  const std::string endpoint_;
  const PeerId id_;
  const MessageLimits limits_;
  const std::int32_t queue_messages_max_;
  Readiness ready_;
  zmq::context_t context_{1};
  std::unique_ptr<Sockets> sockets_;  // null once kPeerLost is queued
  std::optional<DescriptorLink> descriptors_;
  std::optional<Losing> losing_;
  Status lost_;  // not ok from then on
  std::deque<ControlEvent> pending_;
};

}  // namespace

Result<std::unique_ptr<ControlConnection>> connect_zmq(const std::string& endpoint, const ControlOptions& options) {
  auto parsed = parse_endpoint(endpoint);
  if (!parsed.ok()) return parsed.status();
  if (parsed.value().kind == EndpointKind::kTcp && parsed.value().port == 0) {
    return Status(Code::kInvalidArgument, fmt::format("connect to '{}': port 0 can only be listened on", endpoint));
  }
  if (options.queue_messages_max <= 0)
    return Status(Code::kInvalidArgument, fmt::format("connect to '{}': a queue of {} messages", endpoint, options.queue_messages_max));
  auto ready = Readiness::create();
  if (!ready.ok()) return ready.status();
  if (Status room = check_room_for_zmq(); !room.ok())
    return Status(room.code(), fmt::format("connect to '{}': {}", endpoint, room.message()), room.source(), room.native());
  try {
    auto connection = std::make_unique<ZmqConnection>(endpoint, PeerId::random(), options, std::move(ready).value());
    HEADRACE_RETURN_IF_ERROR(connection->connect(parsed.value(), options));
    return std::unique_ptr<ControlConnection>(std::move(connection));
  } catch (const zmq::error_t& error) {
    return zmq_status(error.num(), fmt::format("connect to '{}'", endpoint));
  }
}

}  // namespace headrace
