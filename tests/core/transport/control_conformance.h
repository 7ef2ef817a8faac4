#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/transport/control.h"

namespace headrace {

inline constexpr std::int64_t kEventMs = 10'000;

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of(const std::string& text) {
  const auto view = std::as_bytes(std::span(text));
  return Bytes(view.begin(), view.end());
}

/// `count` bytes that differ by seed and by place.
inline Bytes numbered_bytes(std::size_t count, std::uint32_t seed) {
  Bytes bytes(count);
  std::uint32_t state = seed * 2'654'435'761U + 1;
  for (std::byte& byte : bytes) {
    state = state * 1'664'525U + 1'013'904'223U;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

template <class End>
std::optional<ControlEvent> next_event(End& end, std::int64_t timeout_ms = kEventMs) {
  auto event = end.poll(timeout_ms);
  EXPECT_TRUE(event.ok()) << event.status().to_string();
  return event.ok() ? std::move(event).value() : std::nullopt;
}

/// The next event, which must be of `kind`.
template <class End>
ControlEvent expect_event(End& end, ControlEventKind kind) {
  auto event = next_event(end);
  EXPECT_TRUE(event.has_value()) << "no event within " << kEventMs << " ms";
  if (!event) return ControlEvent{};
  EXPECT_EQ(static_cast<int>(event->kind), static_cast<int>(kind)) << event->status.to_string();
  return std::move(*event);
}

inline std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

inline UniqueFd sealed_memory(std::size_t bytes) {
  UniqueFd fd(::memfd_create("test", MFD_ALLOW_SEALING | MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  return fd;
}

inline std::uint64_t inode_of(int fd) {
  struct stat info = {};
  EXPECT_EQ(::fstat(fd, &info), 0);
  return info.st_ino;
}

/// What every control channel promises. `Backend` is default constructible with
///   Result<std::unique_ptr<ControlListener>> listen(const ControlOptions&);  // with descriptor socket; always at the same endpoint
///   Result<std::unique_ptr<ControlConnection>> connect(const ControlOptions&);  // to the endpoint of the latest listener
/// where both get the same options.
template <class Backend>
class ControlConformance : public ::testing::Test {
 protected:
  void start(const ControlOptions& options = {}) {
    options_ = options;
    auto listener = backend_.listen(options);
    ASSERT_TRUE(listener.ok()) << listener.status().to_string();
    listener_ = std::move(listener).value();
    connection_ = connect();
  }

  std::unique_ptr<ControlConnection> connect() {
    auto connection = backend_.connect(options_);
    EXPECT_TRUE(connection.ok()) << connection.status().to_string();
    return connection.ok() ? std::move(connection).value() : nullptr;
  }

  /// The listener knows a peer from its first message on.
  void introduce(ControlConnection& connection) {
    const Status sent = connection.send(bytes_of("hello"));
    ASSERT_TRUE(sent.ok()) << sent.to_string();
    EXPECT_EQ(expect_event(*listener_, ControlEventKind::kMessage).peer, connection.id());
  }

  void start_with_descriptors() {
    start();
    introduce(*connection_);
    const Status status = connection_->connect_descriptors(listener_->descriptor_path(), kEventMs);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }

  Backend backend_;
  ControlOptions options_;
  std::unique_ptr<ControlListener> listener_;
  std::unique_ptr<ControlConnection> connection_;
};

TYPED_TEST_SUITE_P(ControlConformance);

TYPED_TEST_P(ControlConformance, KeepsTheOrderAndTheBytesOfMessages) {
  this->start();
  constexpr std::uint32_t kMessages = 500;
  for (std::uint32_t i = 0; i < kMessages; ++i) ASSERT_TRUE(this->connection_->send(numbered_bytes(i * 7 % 301, i)).ok());
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    const ControlEvent event = expect_event(*this->listener_, ControlEventKind::kMessage);
    EXPECT_EQ(event.peer, this->connection_->id());
    ASSERT_EQ(event.message, numbered_bytes(i * 7 % 301, i)) << i;
    EXPECT_TRUE(event.attachment.empty());
    ASSERT_TRUE(this->listener_->send(event.peer, numbered_bytes(i % 50, i + 1)).ok());
  }
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    ASSERT_EQ(expect_event(*this->connection_, ControlEventKind::kMessage).message, numbered_bytes(i % 50, i + 1)) << i;
  }
}

TYPED_TEST_P(ControlConformance, CarriesLargeAndEmptyMessagesWithAttachments) {
  this->start();
  for (const std::size_t message_bytes : {std::size_t{0}, std::size_t{1}, std::size_t{3} << 20}) {
    for (const std::size_t attachment_bytes : {std::size_t{0}, std::size_t{1}, (std::size_t{9} << 20) + 1}) {
      const Bytes message = numbered_bytes(message_bytes, 1);
      const Bytes attachment = numbered_bytes(attachment_bytes, 2);
      ASSERT_TRUE(this->connection_->send(message, attachment).ok());
      const ControlEvent there = expect_event(*this->listener_, ControlEventKind::kMessage);
      EXPECT_TRUE(there.message == message && there.attachment == attachment) << message_bytes << " " << attachment_bytes;
      ASSERT_TRUE(this->listener_->send(there.peer, message, attachment).ok());
      const ControlEvent back = expect_event(*this->connection_, ControlEventKind::kMessage);
      EXPECT_TRUE(back.message == message && back.attachment == attachment) << message_bytes << " " << attachment_bytes;
    }
  }
}

TYPED_TEST_P(ControlConformance, RefusesMessagesOverTheLimit) {
  ControlOptions options;
  options.message_bytes_max = 1'000;
  this->start(options);
  EXPECT_EQ(this->connection_->send(Bytes(1'001)).code(), Code::kInvalidArgument);
  EXPECT_EQ(this->connection_->send(Bytes(1), Bytes(1'001)).code(), Code::kInvalidArgument);
  EXPECT_TRUE(this->connection_->send(Bytes(1'000), Bytes(1'000)).ok());
  const ControlEvent event = expect_event(*this->listener_, ControlEventKind::kMessage);
  EXPECT_EQ(this->listener_->send(event.peer, Bytes(1'001)).code(), Code::kInvalidArgument);
}

TYPED_TEST_P(ControlConformance, TellsPeersApart) {
  this->start();
  const auto other = this->connect();
  ASSERT_NE(other, nullptr);
  EXPECT_NE(other->id(), this->connection_->id());
  this->introduce(*this->connection_);
  this->introduce(*other);
  ASSERT_TRUE(this->listener_->send(other->id(), bytes_of("for the other")).ok());
  ASSERT_TRUE(this->listener_->send(this->connection_->id(), bytes_of("for the first")).ok());
  EXPECT_EQ(expect_event(*this->connection_, ControlEventKind::kMessage).message, bytes_of("for the first"));
  EXPECT_EQ(expect_event(*other, ControlEventKind::kMessage).message, bytes_of("for the other"));
}

TYPED_TEST_P(ControlConformance, ReportsAClosedConnectionOnceAndAfterItsLastMessage) {
  this->start();
  const auto other = this->connect();
  this->introduce(*other);
  this->introduce(*this->connection_);
  const PeerId gone = this->connection_->id();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(this->connection_->send(bytes_of("last words")).ok());
  this->connection_.reset();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(expect_event(*this->listener_, ControlEventKind::kMessage).message, bytes_of("last words"));
  const ControlEvent lost = expect_event(*this->listener_, ControlEventKind::kPeerLost);
  EXPECT_EQ(lost.peer, gone);
  EXPECT_EQ(lost.status.code(), Code::kUnavailable);
  EXPECT_EQ(this->listener_->send(gone, bytes_of("too late")).code(), Code::kUnavailable);
  // The other peer is untouched, and nothing more is said of the lost one.
  ASSERT_TRUE(other->send(bytes_of("still here")).ok());
  EXPECT_EQ(expect_event(*this->listener_, ControlEventKind::kMessage).peer, other->id());
  EXPECT_FALSE(next_event(*this->listener_, 200).has_value());
}

TYPED_TEST_P(ControlConformance, ReportsAClosedListenerOnceAndAfterItsLastMessage) {
  this->start_with_descriptors();
  ASSERT_TRUE(this->listener_->send(this->connection_->id(), bytes_of("last words")).ok());
  this->listener_.reset();
  EXPECT_EQ(expect_event(*this->connection_, ControlEventKind::kMessage).message, bytes_of("last words"));
  EXPECT_EQ(expect_event(*this->connection_, ControlEventKind::kPeerLost).status.code(), Code::kUnavailable);
  EXPECT_EQ(this->connection_->send(bytes_of("too late")).code(), Code::kUnavailable);
  EXPECT_EQ(this->connection_->release_descriptor(MemoryId{1}).code(), Code::kUnavailable);
  EXPECT_FALSE(next_event(*this->connection_, 200).has_value());
}

TYPED_TEST_P(ControlConformance, NeverTalksToALaterLifeOfTheListener) {
  this->start();
  this->introduce(*this->connection_);
  this->listener_.reset();
  auto reborn = this->backend_.listen(this->options_);
  ASSERT_TRUE(reborn.ok()) << reborn.status().to_string();
  EXPECT_EQ(expect_event(*this->connection_, ControlEventKind::kPeerLost).status.code(), Code::kUnavailable);
  EXPECT_EQ(this->connection_->send(bytes_of("whom to?")).code(), Code::kUnavailable);
  EXPECT_FALSE(next_event(*reborn.value(), 200).has_value());
}

TYPED_TEST_P(ControlConformance, NamesTheEndpointWhereNobodyAnswers) {
  this->start();
  const std::string endpoint = this->connection_->endpoint();
  this->connection_.reset();
  this->listener_.reset();
  this->options_.connect_timeout_ms = 100;
  const auto connection = this->backend_.connect(this->options_);
  EXPECT_EQ(connection.status().code(), Code::kDeadlineExceeded);
  EXPECT_NE(connection.status().message().find(endpoint), std::string::npos) << connection.status().message();
}

TYPED_TEST_P(ControlConformance, WaitsForAListenerThatComesLater) {
  this->start();
  this->connection_.reset();
  this->listener_.reset();
  std::unique_ptr<ControlConnection> late;
  std::jthread connecting([&] { late = this->connect(); });
  auto listener = this->backend_.listen(this->options_);
  ASSERT_TRUE(listener.ok()) << listener.status().to_string();
  connecting.join();
  ASSERT_NE(late, nullptr);
  ASSERT_TRUE(late->send(bytes_of("hello")).ok());
  EXPECT_EQ(expect_event(*listener.value(), ControlEventKind::kMessage).message, bytes_of("hello"));
}

TYPED_TEST_P(ControlConformance, RefusesASecondListenerAndLeavesTheFirstAlone) {
  this->start();
  const auto second = this->backend_.listen(this->options_);
  EXPECT_EQ(second.status().code(), Code::kFailedPrecondition) << second.status().to_string();
  this->introduce(*this->connection_);
  const auto other = this->connect();
  ASSERT_NE(other, nullptr);
  this->introduce(*other);
}

TYPED_TEST_P(ControlConformance, SaysWhenAQueueIsFullAndGoesOnOnceItIsRead) {
  ControlOptions options;
  options.queue_messages_max = 4;
  this->start(options);
  const std::size_t size = std::size_t{1} << 18;
  std::uint32_t sent = 0;
  Status status;
  while (sent < 10'000) {
    status = this->connection_->send(numbered_bytes(size, sent));
    if (!status.ok()) break;
    ++sent;
  }
  ASSERT_EQ(status.code(), Code::kResourceExhausted) << status.to_string();
  EXPECT_GE(sent, 4U);
  for (std::uint32_t i = 0; i < sent; ++i)
    EXPECT_TRUE(expect_event(*this->listener_, ControlEventKind::kMessage).message == numbered_bytes(size, i)) << i;
  // Room is reported by ZeroMQ's own thread, so it may take a moment.
  const auto due = std::chrono::steady_clock::now() + std::chrono::milliseconds(kEventMs);
  do {
    status = this->connection_->send(bytes_of("again"));
  } while (status.code() == Code::kResourceExhausted && std::chrono::steady_clock::now() < due);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(expect_event(*this->listener_, ControlEventKind::kMessage).message, bytes_of("again"));
}

TYPED_TEST_P(ControlConformance, AFullPeerDoesNotHoldUpAnother) {
  ControlOptions options;
  options.queue_messages_max = 4;
  this->start(options);
  const auto other = this->connect();
  this->introduce(*this->connection_);
  this->introduce(*other);
  Status status;
  for (int i = 0; i < 10'000 && status.ok(); ++i) status = this->listener_->send(this->connection_->id(), Bytes(std::size_t{1} << 18));
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  ASSERT_TRUE(this->listener_->send(other->id(), bytes_of("through")).ok());
  EXPECT_EQ(expect_event(*other, ControlEventKind::kMessage).message, bytes_of("through"));
}

TYPED_TEST_P(ControlConformance, AnotherThreadWakesAPoll) {
  this->start();
  const auto begin = std::chrono::steady_clock::now();
  {
    std::jthread waker([&] { this->listener_->wake(); });
    EXPECT_FALSE(next_event(*this->listener_, 60'000).has_value());
  }
  {
    std::jthread waker([&] { this->connection_->wake(); });
    EXPECT_FALSE(next_event(*this->connection_, 60'000).has_value());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TYPED_TEST_P(ControlConformance, ADescriptorWaitSeesEveryReply) {
  this->start();
  this->introduce(*this->connection_);
  const auto readable = [&](int timeout_ms) {
    pollfd item = {this->connection_->ready_fd(), POLLIN, 0};
    return ::poll(&item, 1, timeout_ms) == 1;
  };
  while (next_event(*this->connection_, 0)) {
  }
  EXPECT_FALSE(readable(0));
  for (int round = 0; round < 200; ++round) {
    ASSERT_TRUE(this->listener_->send(this->connection_->id(), bytes_of("reply")).ok());
    // A send in between takes in what arrived and must not hide it.
    ASSERT_TRUE(this->connection_->send(bytes_of("question")).ok());
    std::optional<ControlEvent> event;
    while (!event) {
      ASSERT_TRUE(readable(static_cast<int>(kEventMs))) << "round " << round;
      event = next_event(*this->connection_, 0);
    }
    EXPECT_EQ(event->message, bytes_of("reply"));
    while (next_event(*this->connection_, 0)) {
    }
    expect_event(*this->listener_, ControlEventKind::kMessage);
  }
  this->connection_->wake();
  EXPECT_TRUE(readable(0));
  EXPECT_FALSE(next_event(*this->connection_, 60'000).has_value());
  this->listener_.reset();
  std::optional<ControlEvent> lost;
  while (!lost) {
    ASSERT_TRUE(readable(static_cast<int>(kEventMs)));
    lost = next_event(*this->connection_, 0);
  }
  EXPECT_EQ(lost->kind, ControlEventKind::kPeerLost);
}

TYPED_TEST_P(ControlConformance, ADroppedPeerIsHeardNoMore) {
  this->start();
  const auto other = this->connect();
  this->introduce(*this->connection_);
  this->introduce(*other);
  this->listener_->drop(this->connection_->id());
  EXPECT_EQ(this->listener_->send(this->connection_->id(), bytes_of("no")).code(), Code::kUnavailable);
  ASSERT_TRUE(this->connection_->send(bytes_of("unheard")).ok());
  this->connection_.reset();
  ASSERT_TRUE(other->send(bytes_of("heard")).ok());
  EXPECT_EQ(expect_event(*this->listener_, ControlEventKind::kMessage).message, bytes_of("heard"));
  EXPECT_FALSE(next_event(*this->listener_, 200).has_value());
}

TYPED_TEST_P(ControlConformance, HandsOverDescriptorsAndTheirAnswers) {
  this->start_with_descriptors();
  const UniqueFd memory = sealed_memory(12'288);
  ASSERT_TRUE(this->connection_->send_descriptor(MemoryId{71}, 12'288, memory.get()).ok());
  const ControlEvent offered = expect_event(*this->listener_, ControlEventKind::kDescriptor);
  EXPECT_EQ(offered.peer, this->connection_->id());
  EXPECT_EQ(offered.memory, MemoryId{71});
  EXPECT_EQ(offered.memory_bytes, 12'288U);
  EXPECT_EQ(offered.credentials.pid, ::getpid());
  EXPECT_EQ(offered.credentials.uid, ::geteuid());
  EXPECT_EQ(inode_of(offered.descriptor.get()), inode_of(memory.get()));
  EXPECT_NE(::fcntl(offered.descriptor.get(), F_GETFD) & FD_CLOEXEC, 0);
  ASSERT_TRUE(this->listener_->acknowledge(offered.peer, offered.memory, ok_status()).ok());
  const ControlEvent taken = expect_event(*this->connection_, ControlEventKind::kAcknowledged);
  EXPECT_EQ(taken.memory, MemoryId{71});
  EXPECT_TRUE(taken.status.ok());

  ASSERT_TRUE(this->connection_->send_descriptor(MemoryId{72}, 1, memory.get()).ok());
  EXPECT_EQ(expect_event(*this->listener_, ControlEventKind::kDescriptor).memory, MemoryId{72});
  const Status refusal(Code::kInvalidArgument, "memory 72: 1 byte announced, 12288 found", ErrorSource::kErrno, 22);
  ASSERT_TRUE(this->listener_->acknowledge(this->connection_->id(), MemoryId{72}, refusal).ok());
  const ControlEvent refused = expect_event(*this->connection_, ControlEventKind::kAcknowledged);
  EXPECT_EQ(refused.memory, MemoryId{72});
  EXPECT_EQ(refused.status.code(), refusal.code());
  EXPECT_EQ(refused.status.message(), refusal.message());
  EXPECT_EQ(refused.status.source(), refusal.source());
  EXPECT_EQ(refused.status.native(), refusal.native());

  ASSERT_TRUE(this->connection_->release_descriptor(MemoryId{71}).ok());
  EXPECT_EQ(expect_event(*this->listener_, ControlEventKind::kReleased).memory, MemoryId{71});
}

TYPED_TEST_P(ControlConformance, DescriptorsNeedTheirSocketFirst) {
  this->start();
  this->introduce(*this->connection_);
  const UniqueFd memory = sealed_memory(4096);
  EXPECT_EQ(this->connection_->send_descriptor(MemoryId{1}, 4096, memory.get()).code(), Code::kFailedPrecondition);
  EXPECT_EQ(this->listener_->acknowledge(this->connection_->id(), MemoryId{1}, ok_status()).code(), Code::kUnavailable);
  EXPECT_EQ(this->connection_->connect_descriptors("/nowhere/at/all", 100).code(), Code::kUnavailable);
  ASSERT_TRUE(this->connection_->connect_descriptors(this->listener_->descriptor_path(), 100).ok());
  EXPECT_EQ(this->connection_->connect_descriptors(this->listener_->descriptor_path(), 100).code(), Code::kFailedPrecondition);
  EXPECT_FALSE(this->connection_->send_descriptor(MemoryId{1}, 4096, -1).ok());
}

TYPED_TEST_P(ControlConformance, ManyConnectionsLeaveNoDescriptorOpen) {
  this->start();
  this->introduce(*this->connection_);
  const UniqueFd memory = sealed_memory(4096);
  const std::size_t before = open_descriptors();
  for (int i = 0; i < 100; ++i) {
    auto connection = this->connect();
    ASSERT_NE(connection, nullptr);
    this->introduce(*connection);
    ASSERT_TRUE(connection->connect_descriptors(this->listener_->descriptor_path(), kEventMs).ok());
    ASSERT_TRUE(connection->send_descriptor(MemoryId{1}, 4096, memory.get()).ok());
    expect_event(*this->listener_, ControlEventKind::kDescriptor);
    connection.reset();
    expect_event(*this->listener_, ControlEventKind::kPeerLost);
  }
  // ZeroMQ closes its own ends on its own thread.
  const auto due = std::chrono::steady_clock::now() + std::chrono::milliseconds(kEventMs);
  while (open_descriptors() > before && std::chrono::steady_clock::now() < due) next_event(*this->listener_, 1);
  EXPECT_EQ(open_descriptors(), before);
}

REGISTER_TYPED_TEST_SUITE_P(ControlConformance, KeepsTheOrderAndTheBytesOfMessages, CarriesLargeAndEmptyMessagesWithAttachments,
                            RefusesMessagesOverTheLimit, TellsPeersApart, ReportsAClosedConnectionOnceAndAfterItsLastMessage,
                            ReportsAClosedListenerOnceAndAfterItsLastMessage, NeverTalksToALaterLifeOfTheListener,
                            NamesTheEndpointWhereNobodyAnswers, WaitsForAListenerThatComesLater,
                            RefusesASecondListenerAndLeavesTheFirstAlone, SaysWhenAQueueIsFullAndGoesOnOnceItIsRead,
                            AFullPeerDoesNotHoldUpAnother, AnotherThreadWakesAPoll, ADescriptorWaitSeesEveryReply,
                            ADroppedPeerIsHeardNoMore, HandsOverDescriptorsAndTheirAnswers, DescriptorsNeedTheirSocketFirst,
                            ManyConnectionsLeaveNoDescriptorOpen);

}  // namespace headrace
