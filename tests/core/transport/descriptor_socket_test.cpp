#include "core/transport/descriptor_socket.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>

#include "tests/core/transport/control_conformance.h"
#include "tests/core/transport/temporary_folder.h"

namespace headrace {
namespace {

/// A datagram as core/transport/descriptor_socket.h describes it, put together by hand.
Bytes datagram(std::uint32_t magic, std::uint32_t type, const Bytes& body) {
  Bytes bytes;
  for (const std::uint32_t number : {magic, type}) {
    for (unsigned shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<std::byte>(number >> shift));
  }
  bytes.insert(bytes.end(), body.begin(), body.end());
  return bytes;
}

Bytes number64(std::uint64_t number) {
  Bytes bytes;
  for (unsigned shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<std::byte>(number >> shift));
  return bytes;
}

Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr std::uint32_t kMagic = 0x31445248;

class DescriptorSocket : public ::testing::Test {
 protected:
  void SetUp() override {
    auto listener = DescriptorListener::bind(path());
    ASSERT_TRUE(listener.ok()) << listener.status().to_string();
    listener_ = std::move(listener).value();
    socket_ = connect();
  }

  std::string path() const { return (folder_.path() / "r.fds").string(); }

  UniqueFd connect() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path().c_str(), sizeof address.sun_path - 1);
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return socket;
  }

  void send(const Bytes& bytes, const std::vector<int>& descriptors = {}) {
    Bytes copy = bytes;
    iovec vector = {copy.data(), copy.size()};
    std::vector<char> control(CMSG_SPACE(std::max<std::size_t>(1, descriptors.size()) * sizeof(int)));
    msghdr message = {};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    if (!descriptors.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
    }
    ASSERT_EQ(::sendmsg(socket_.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  void hello() { send(datagram(kMagic, 1, Bytes(16, std::byte{0x42}))); }
  void service() { listener_->service(events_, lost_); }

  /// Whether our end was closed; waits for it or for an answer.
  bool closed() {
    char byte = 0;
    pollfd item = {socket_.get(), POLLIN, 0};
    return ::poll(&item, 1, 1'000) == 1 && ::recv(socket_.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }

  TemporaryFolder folder_;
  std::unique_ptr<DescriptorListener> listener_;
  UniqueFd socket_;
  std::vector<ControlEvent> events_;
  std::vector<DescriptorListener::Lost> lost_;
};

TEST_F(DescriptorSocket, TakesTheDatagramsThatItsFormatDescribes) {
  const UniqueFd memory = sealed_memory(4'096);
  hello();
  send(datagram(kMagic, 2, number64(0x1122334455667788) + number64(4'096)), {memory.get()});
  send(datagram(kMagic, 3, number64(5)));
  service();
  ASSERT_EQ(events_.size(), 2U);
  EXPECT_EQ(events_[0].kind, ControlEventKind::kDescriptor);
  EXPECT_EQ(events_[0].peer.hex(), "42424242424242424242424242424242");
  EXPECT_EQ(events_[0].memory.value, 0x1122334455667788U);
  EXPECT_EQ(events_[0].memory_bytes, 4'096U);
  EXPECT_EQ(inode_of(events_[0].descriptor.get()), inode_of(memory.get()));
  EXPECT_EQ(events_[1].kind, ControlEventKind::kReleased);
  EXPECT_EQ(events_[1].memory.value, 5U);
  EXPECT_TRUE(lost_.empty());
}

TEST_F(DescriptorSocket, RefusesMemoryWithNoneOrTwoDescriptorsAndClosesThem) {
  const UniqueFd memory = sealed_memory(4'096);
  hello();
  service();
  const std::size_t before = open_descriptors();
  for (const std::vector<int>& descriptors : {std::vector<int>{}, std::vector<int>{memory.get(), memory.get()}}) {
    send(datagram(kMagic, 2, number64(9) + number64(4'096)), descriptors);
    service();
    Bytes answer(2'000);
    const ssize_t got = ::recv(socket_.get(), answer.data(), answer.size(), 0);
    ASSERT_GT(got, 28);
    EXPECT_EQ(answer[4], std::byte{4});
    EXPECT_EQ(answer[8], std::byte{9});
    EXPECT_EQ(answer[16], static_cast<std::byte>(Code::kInvalidArgument));
    const std::string text(reinterpret_cast<const char*>(answer.data()) + 28, static_cast<std::size_t>(got) - 28);
    EXPECT_NE(text.find(std::to_string(descriptors.size()) + " descriptors"), std::string::npos) << text;
  }
  EXPECT_TRUE(events_.empty());
  EXPECT_TRUE(lost_.empty());
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(DescriptorSocket, ClosesConnectionsThatBreakTheRules) {
  const UniqueFd memory = sealed_memory(4'096);
  const Bytes peer(16, std::byte{0x42});
  const std::vector<Bytes> wrong = {
      datagram(kMagic + 1, 3, number64(1)),
      datagram(kMagic, 0, number64(1)),
      datagram(kMagic, 5, number64(1)),
      datagram(kMagic, 1, peer),
      datagram(kMagic, 2, number64(1)),
      datagram(kMagic, 3, number64(1) + number64(1)),
      datagram(kMagic, 4, number64(1) + Bytes(12)),
      Bytes(3),
      Bytes(20'000),
  };
  const std::size_t before = open_descriptors();
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    SCOPED_TRACE("datagram " + std::to_string(i));
    lost_.clear();
    hello();
    send(wrong[i], {memory.get()});
    service();
    ASSERT_EQ(lost_.size(), 1U);
    EXPECT_EQ(lost_[0].peer.hex(), "42424242424242424242424242424242");
    EXPECT_EQ(lost_[0].status.code(), Code::kCorruption);
    EXPECT_TRUE(closed());
    socket_ = connect();
  }
  EXPECT_TRUE(events_.empty());
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(DescriptorSocket, ClosesAConnectionWithManyDescriptorsAndKeepsNone) {
  const UniqueFd memory = sealed_memory(4'096);
  hello();
  service();
  const std::size_t before = open_descriptors();
  send(datagram(kMagic, 2, number64(1) + number64(4'096)), std::vector<int>(100, memory.get()));
  service();
  EXPECT_EQ(lost_.size(), 1U);
  EXPECT_EQ(open_descriptors(), before - 1);
}

TEST_F(DescriptorSocket, WantsTheHelloFirst) {
  send(datagram(kMagic, 3, number64(1)));
  service();
  EXPECT_TRUE(closed());
  EXPECT_TRUE(events_.empty());
  EXPECT_TRUE(lost_.empty());
}

TEST_F(DescriptorSocket, ASecondConnectionCannotSpeakForAPeer) {
  hello();
  service();
  const UniqueFd first = std::move(socket_);
  socket_ = connect();
  hello();
  service();
  EXPECT_TRUE(closed());
  EXPECT_TRUE(lost_.empty());
}

TEST_F(DescriptorSocket, ReportsAHangUp) {
  hello();
  service();
  EXPECT_TRUE(lost_.empty());
  socket_.reset();
  service();
  ASSERT_EQ(lost_.size(), 1U);
  EXPECT_EQ(lost_[0].status.code(), Code::kUnavailable);
}

TEST_F(DescriptorSocket, TurnsPeersAwayWhenItHasNoDescriptorsLeft) {
  service();
  struct rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const UniqueFd second = connect();
  std::vector<UniqueFd> all;
  const struct rlimit few = {64, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  do {
    all.emplace_back(::dup(second.get()));
  } while (all.back().valid());
  service();
  service();
  all.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  char byte = 0;
  EXPECT_EQ(::recv(second.get(), &byte, 1, MSG_DONTWAIT), 0) << "it hears a hang-up instead of waiting";
  pollfd waiting = {0, POLLIN, 0};
  std::vector<int> fds;
  listener_->append_fds(fds);
  waiting.fd = fds.front();
  EXPECT_EQ(::poll(&waiting, 1, 0), 0) << "nobody waits at the door any more";
  socket_ = connect();
  hello();
  send(datagram(kMagic, 3, number64(5)));
  service();
  EXPECT_EQ(events_.size(), 1U) << "whoever comes later is served";
}

TEST_F(DescriptorSocket, DoesNotTakeOverALiveSocket) {
  EXPECT_EQ(DescriptorListener::bind(path()).status().code(), Code::kFailedPrecondition);
  hello();
  send(datagram(kMagic, 3, number64(5)));
  service();
  EXPECT_EQ(events_.size(), 1U);
}

TEST(DescriptorDatagram, DecodesWhatItEncodes) {
  Datagram answer;
  answer.type = DatagramType::kAnswer;
  answer.memory = MemoryId{77};
  answer.status = Status(Code::kResourceExhausted, std::string(5'000, 'x'), ErrorSource::kErrno, -3);
  auto decoded = decode_datagram(encode_datagram(answer));
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  EXPECT_EQ(decoded.value().memory, MemoryId{77});
  EXPECT_EQ(decoded.value().status.code(), Code::kResourceExhausted);
  EXPECT_EQ(decoded.value().status.native(), -3);
  EXPECT_EQ(decoded.value().status.message(), std::string(1'024, 'x'));
}

TEST(DescriptorDatagram, NeverReadsBeyondWhatItIsGiven) {
  const Bytes bytes = numbered_bytes(2'000, 5);
  for (std::uint32_t type = 0; type < 6; ++type) {
    for (std::size_t size = 0; size < 64; ++size) {
      // On the heap in its exact size, so that AddressSanitizer sees a read past the end.
      const Bytes exact = datagram(kMagic, type, Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)));
      for (std::size_t cut = 0; cut <= exact.size(); ++cut)
        (void)decode_datagram(Bytes(exact.begin(), exact.begin() + static_cast<std::ptrdiff_t>(cut))).ok();
    }
  }
  EXPECT_FALSE(decode_datagram({}).ok());
}

}  // namespace
}  // namespace headrace
