#include "core/transport/descriptor_socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include "core/base/clock.h"
#include "core/transport/endpoint.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

constexpr std::uint32_t kMagic = 0x31445248;  // "HRD1" in memory
constexpr std::size_t kTextMax = 1'024;       // of an answer
constexpr std::size_t kDatagramMax = 36 + kTextMax;
constexpr std::size_t kDescriptorsMax = 8;  // received at once, so as to close them; one is right
constexpr std::int64_t kHelloNs = 5'000'000'000;

template <class Number>
void put(std::vector<std::byte>& out, Number number) {
  for (std::size_t i = 0; i < sizeof number; ++i) out.push_back(static_cast<std::byte>(number >> (8 * i)));
}

template <class Number>
Number get(std::span<const std::byte> bytes, std::size_t offset) {
  Number number = 0;
  for (std::size_t i = 0; i < sizeof number; ++i) number |= static_cast<Number>(std::to_integer<Number>(bytes[offset + i]) << (8 * i));
  return number;
}

Status bad(std::string_view what) {
  return Status(Code::kCorruption, fmt::format("descriptor socket: {}", what));
}

Result<Datagram> decode_answer(std::span<const std::byte> bytes, Datagram datagram) {
  if (bytes.size() < 28) return bad("an answer is cut short");
  const auto code = get<std::uint32_t>(bytes, 16);
  const auto source = get<std::uint32_t>(bytes, 20);
  if (code > static_cast<std::uint32_t>(Code::kInternal) || source > static_cast<std::uint32_t>(ErrorSource::kUcx)) {
    return bad(fmt::format("an answer with code {} of source {}", code, source));
  }
  const auto native = static_cast<std::int32_t>(get<std::uint32_t>(bytes, 24));
  const auto text = bytes.subspan(28);
  datagram.status = code == 0 ? ok_status()
                              : Status(static_cast<Code>(code), std::string(reinterpret_cast<const char*>(text.data()), text.size()),
                                       static_cast<ErrorSource>(source), native);
  return datagram;
}

Result<PeerCredentials> read_credentials(int socket) {
  ucred kernel = {};
  socklen_t length = sizeof kernel;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &kernel, &length) != 0)
    return errno_status(errno, "descriptor socket: ask who the peer is");
  if (kernel.uid != ::geteuid() && kernel.uid != 0) {
    return Status(Code::kFailedPrecondition,
                  fmt::format("descriptor socket: the peer is user {}, expected {} or root", kernel.uid, ::geteuid()));
  }
  return PeerCredentials{kernel.pid, kernel.uid};
}

sockaddr_un socket_address(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), std::min(path.size() + 1, sizeof address.sun_path));
  return address;
}

std::vector<UniqueFd> take_descriptors(msghdr& message) {
  std::vector<UniqueFd> descriptors;
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr; control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
  return descriptors;
}

}  // namespace

std::vector<std::byte> encode_datagram(const Datagram& datagram) {
  std::vector<std::byte> out;
  put(out, kMagic);
  put(out, static_cast<std::uint32_t>(datagram.type));
  switch (datagram.type) {
    case DatagramType::kHello:
      for (const std::uint8_t byte : datagram.peer.bytes) out.push_back(std::byte{byte});
      break;
    case DatagramType::kMemory:
      put(out, datagram.memory.value);
      put(out, datagram.bytes);
      break;
    case DatagramType::kRelease: put(out, datagram.memory.value); break;
    case DatagramType::kAnswer: {
      put(out, datagram.memory.value);
      put(out, static_cast<std::uint32_t>(datagram.status.code()));
      put(out, static_cast<std::uint32_t>(datagram.status.source()));
      put(out, static_cast<std::uint32_t>(datagram.status.native()));
      const auto text = std::as_bytes(std::span(datagram.status.message())).first(std::min(kTextMax, datagram.status.message().size()));
      out.insert(out.end(), text.begin(), text.end());
      break;
    }
  }
  return out;
}

Result<Datagram> decode_datagram(std::span<const std::byte> bytes) {
  if (bytes.size() < 8) return bad(fmt::format("a datagram of {} bytes", bytes.size()));
  if (const auto magic = get<std::uint32_t>(bytes, 0); magic != kMagic) return bad(fmt::format("a datagram with magic {:#010x}", magic));
  const auto type = get<std::uint32_t>(bytes, 4);
  Datagram datagram;
  datagram.type = static_cast<DatagramType>(type);
  const auto expect = [&](std::size_t size) { return bytes.size() == size; };
  if (type < 1 || type > 4) return bad(fmt::format("a datagram of type {}", type));
  if (datagram.type == DatagramType::kHello) {
    if (!expect(24)) return bad(fmt::format("a hello of {} bytes, expected 24", bytes.size()));
    std::memcpy(datagram.peer.bytes.data(), bytes.data() + 8, 16);
    return datagram;
  }
  if (bytes.size() < 16) return bad(fmt::format("a datagram of type {} with {} bytes", type, bytes.size()));
  datagram.memory = MemoryId{get<std::uint64_t>(bytes, 8)};
  if (datagram.type == DatagramType::kAnswer) return decode_answer(bytes, datagram);
  const std::size_t size = datagram.type == DatagramType::kMemory ? 24 : 16;
  if (!expect(size)) return bad(fmt::format("a datagram of type {} with {} bytes, expected {}", type, bytes.size(), size));
  if (datagram.type == DatagramType::kMemory) datagram.bytes = get<std::uint64_t>(bytes, 16);
  return datagram;
}

Result<DescriptorLink> DescriptorLink::connect(const std::string& path, std::int64_t timeout_ms) {
  HEADRACE_RETURN_IF_ERROR(check_socket_path(path));
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return errno_status(errno, "create a descriptor socket");
  // A connect waits only where the listener's backlog is full.
  const timeval patience = {.tv_sec = static_cast<time_t>(std::max<std::int64_t>(timeout_ms, 1) / 1'000),
                            .tv_usec = static_cast<suseconds_t>(std::max<std::int64_t>(timeout_ms, 1) % 1'000 * 1'000)};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  const sockaddr_un address = socket_address(path);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const Status reason = errno_status(errno, fmt::format("connect to descriptor socket '{}'", path));
    return Status(Code::kUnavailable, reason.message(), reason.source(), reason.native());
  }
  auto credentials = read_credentials(socket.get());
  if (!credentials.ok()) return Status(Code::kUnavailable, fmt::format("'{}': {}", path, credentials.status().message()));
  return DescriptorLink(std::move(socket), credentials.value());
}

Result<DescriptorLink> DescriptorLink::accept(UniqueFd socket) {
  auto credentials = read_credentials(socket.get());
  if (!credentials.ok()) return credentials.status();
  return DescriptorLink(std::move(socket), credentials.value());
}

Status DescriptorLink::send(const Datagram& datagram, int descriptor) {
  std::vector<std::byte> bytes = encode_datagram(datagram);
  iovec vector = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  msghdr message = {};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return ok_status();
  if (errno == EAGAIN || errno == ETOOMANYREFS) {
    return Status(Code::kResourceExhausted, "descriptor socket: the peer does not read", ErrorSource::kErrno, errno);
  }
  return errno_status(errno, "descriptor socket: send");
}

Result<std::optional<DescriptorLink::Received>> DescriptorLink::receive() {
  // One byte more than the longest datagram, so that a longer one is seen as such.
  std::array<std::byte, kDatagramMax + 1> bytes{};
  iovec vector = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kDescriptorsMax * sizeof(int))> control{};
  msghdr message = {};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return std::optional<Received>();
  if (got < 0 && errno != ECONNRESET) return errno_status(errno, "descriptor socket: receive");
  if (got <= 0) return Status(Code::kUnavailable, "descriptor socket: the peer hung up");
  Received received;
  received.descriptors = take_descriptors(message);
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
    return bad("a datagram that is too long, or has more descriptors than can be taken");
  auto datagram = decode_datagram(std::span(bytes).first(static_cast<std::size_t>(got)));
  if (!datagram.ok()) return datagram.status();
  received.datagram = std::move(datagram).value();
  return std::optional<Received>(std::move(received));
}

Result<std::unique_ptr<DescriptorListener>> DescriptorListener::bind(const std::string& path) {
  HEADRACE_RETURN_IF_ERROR(check_socket_path(path));
  auto answers = socket_answers(path, SOCK_SEQPACKET);
  if (!answers.ok()) return answers.status();
  if (answers.value()) return Status(Code::kFailedPrecondition, fmt::format("descriptor socket '{}' is served already", path));
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return errno_status(errno, "create a descriptor socket");
  ::unlink(path.c_str());
  const sockaddr_un address = socket_address(path);
  // Mode 0600 from the first instant: a socket file takes the mode of its socket.
  ::fchmod(socket.get(), 0600);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return errno_status(errno, fmt::format("bind descriptor socket '{}'", path));
  }
  if (::listen(socket.get(), 128) != 0) return errno_status(errno, fmt::format("listen on descriptor socket '{}'", path));
  UniqueFd spare(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!spare.valid()) return errno_status(errno, fmt::format("a spare descriptor for descriptor socket '{}'", path));
  return std::unique_ptr<DescriptorListener>(new DescriptorListener(std::move(socket), std::move(spare), path));
}

DescriptorListener::~DescriptorListener() {
  ::unlink(path_.c_str());
}

void DescriptorListener::append_fds(std::vector<int>& fds) const {
  fds.push_back(socket_.get());
  for (const Link& link : links_) fds.push_back(link.link.fd());
}

void DescriptorListener::accept_all() {
  while (true) {
    UniqueFd socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if ((errno == EMFILE || errno == ENFILE) && turn_away()) continue;
      return;
    }
    const std::int64_t now = SteadyClock().now_ns();
    std::erase_if(links_, [&](const Link& link) { return !link.peer && now - link.accepted_ns > kHelloNs; });
    if (links_.size() >= limits::kPeersMax) continue;
    if (auto link = DescriptorLink::accept(std::move(socket)); link.ok())
      links_.push_back({std::move(link).value(), std::nullopt, now, false});
  }
}

/// Whoever cannot be accepted would make the socket readable for ever, and its peer wait: it is told by a hang-up instead.
bool DescriptorListener::turn_away() {
  spare_.reset();
  const bool taken = UniqueFd(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)).valid();
  spare_ = UniqueFd(::fcntl(socket_.get(), F_DUPFD_CLOEXEC, 0));
  return taken;
}

void DescriptorListener::service(std::vector<ControlEvent>& events, std::vector<Lost>& lost) {
  accept_all();
  for (Link& link : links_) {
    Status status = read_all(link, events);
    link.closed = !status.ok();
    if (link.closed && link.peer) lost.push_back({*link.peer, std::move(status)});
  }
  std::erase_if(links_, [](const Link& link) { return link.closed; });
}

Status DescriptorListener::read_all(Link& link, std::vector<ControlEvent>& events) {
  while (true) {
    auto received = link.link.receive();
    if (!received.ok()) return received.status();
    if (!received.value()) return ok_status();
    HEADRACE_RETURN_IF_ERROR(handle(link, std::move(*received.value()), events));
  }
}

Status DescriptorListener::handle(Link& link, DescriptorLink::Received received, std::vector<ControlEvent>& events) {
  const Datagram& datagram = received.datagram;
  if (datagram.type == DatagramType::kHello) {
    if (link.peer || find(datagram.peer) != nullptr) return bad("a second hello of one peer");
    link.peer = datagram.peer;
    return ok_status();
  }
  if (!link.peer) return bad("a datagram before the hello");
  ControlEvent event;
  event.peer = *link.peer;
  event.memory = datagram.memory;
  event.credentials = link.link.credentials();
  switch (datagram.type) {
    case DatagramType::kMemory:
      if (received.descriptors.size() != 1) {
        const Status refusal(Code::kInvalidArgument, fmt::format("memory {:#x} came with {} descriptors, expected 1", datagram.memory.value,
                                                                 received.descriptors.size()));
        return link.link.send({.type = DatagramType::kAnswer, .peer = {}, .memory = datagram.memory, .bytes = 0, .status = refusal});
      }
      event.kind = ControlEventKind::kDescriptor;
      event.memory_bytes = datagram.bytes;
      event.descriptor = std::move(received.descriptors.front());
      break;
    case DatagramType::kRelease: event.kind = ControlEventKind::kReleased; break;
    case DatagramType::kHello:
    case DatagramType::kAnswer: return bad("a datagram that a receiver does not take");
  }
  events.push_back(std::move(event));
  return ok_status();
}

DescriptorListener::Link* DescriptorListener::find(const PeerId& peer) {
  const auto found = std::find_if(links_.begin(), links_.end(), [&](const Link& link) { return link.peer == peer; });
  return found == links_.end() ? nullptr : &*found;
}

Status DescriptorListener::answer(const PeerId& peer, MemoryId memory, const Status& outcome) {
  Link* const link = find(peer);
  if (link == nullptr)
    return Status(Code::kUnavailable, fmt::format("answer for memory {:#x}: peer {} has no descriptor socket", memory.value, peer.hex()));
  return link->link.send({.type = DatagramType::kAnswer, .peer = {}, .memory = memory, .bytes = 0, .status = outcome});
}

void DescriptorListener::close(const PeerId& peer) {
  std::erase_if(links_, [&](const Link& link) { return link.peer == peer; });
}

}  // namespace headrace
