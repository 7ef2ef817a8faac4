#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <fstream>

#include "core/transport/control.h"
#include "tests/core/transport/child_process.h"
#include "tests/core/transport/control_conformance.h"
#include "tests/core/transport/temporary_folder.h"

namespace headrace {
namespace {

struct ZmqIpcBackend {
  Result<std::unique_ptr<ControlListener>> listen(const ControlOptions& options) {
    return listen_zmq(endpoint(), (folder_.path() / "receiver.fds").string(), options);
  }
  Result<std::unique_ptr<ControlConnection>> connect(const ControlOptions& options) { return connect_zmq(endpoint(), options); }
  std::string endpoint() const { return "ipc://" + (folder_.path() / "receiver.ipc").string(); }

  TemporaryFolder folder_;
};

struct ZmqTcpBackend {
  Result<std::unique_ptr<ControlListener>> listen(const ControlOptions& options) {
    // A second listener has its own descriptor socket, so that it is the port that refuses it.
    auto listener = listen_zmq(endpoint_, (folder_.path() / (std::to_string(++listeners_) + ".fds")).string(), options);
    // Once only: a test may connect from another thread meanwhile.
    if (listener.ok() && endpoint_.ends_with(":0")) endpoint_ = listener.value()->endpoint();
    return listener;
  }
  Result<std::unique_ptr<ControlConnection>> connect(const ControlOptions& options) { return connect_zmq(endpoint_, options); }

  TemporaryFolder folder_;
  int listeners_ = 0;
  std::string endpoint_ = "tcp://127.0.0.1:0";
};

INSTANTIATE_TYPED_TEST_SUITE_P(ZmqIpc, ControlConformance, ZmqIpcBackend);
INSTANTIATE_TYPED_TEST_SUITE_P(ZmqTcp, ControlConformance, ZmqTcpBackend);

std::int64_t ms_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin).count();
}

/// The processes of both ends, over both kinds of endpoint, with and without a descriptor socket.
struct ProcessCase {
  bool tcp = false;
  bool descriptors = false;
};

class ZmqControlProcess : public ::testing::TestWithParam<ProcessCase> {
 protected:
  std::string endpoint() const { return GetParam().tcp ? "tcp://127.0.0.1:0" : "ipc://" + (folder_.path() / "r.ipc").string(); }
  std::string descriptor_path() const { return GetParam().descriptors ? (folder_.path() / "r.fds").string() : ""; }
  TemporaryFolder folder_;
};

TEST_P(ZmqControlProcess, TheReceiverSeesAKilledSenderWithinASecond) {
  ChildProcess sender([&](ChildProcess::Lines& lines) {
    auto connection = connect_zmq(lines.hear());
    if (!connection.ok() || !connection.value()->send(bytes_of("hello")).ok()) return 1;
    if (!descriptor_path().empty() && !connection.value()->connect_descriptors(descriptor_path(), kEventMs).ok()) return 2;
    lines.say("connected");
    lines.hear();
    return 0;
  });
  auto listener = listen_zmq(endpoint(), descriptor_path());
  ASSERT_TRUE(listener.ok()) << listener.status().to_string();
  sender.lines().say(listener.value()->endpoint());
  const ControlEvent hello = expect_event(*listener.value(), ControlEventKind::kMessage);
  ASSERT_EQ(sender.lines().hear(), "connected");
  const auto begin = std::chrono::steady_clock::now();
  sender.kill();
  const ControlEvent lost = expect_event(*listener.value(), ControlEventKind::kPeerLost);
  EXPECT_EQ(lost.peer, hello.peer);
  EXPECT_EQ(lost.status.code(), Code::kUnavailable);
  EXPECT_LT(ms_since(begin), 1'000);
}

TEST_P(ZmqControlProcess, TheSenderSeesAKilledReceiverWithinASecond) {
  ChildProcess receiver([&](ChildProcess::Lines& lines) {
    auto listener = listen_zmq(endpoint(), descriptor_path());
    if (!listener.ok()) return 1;
    lines.say(listener.value()->endpoint());
    auto event = listener.value()->poll(kEventMs);
    if (!event.ok() || !event.value()) return 2;
    lines.say("heard");
    lines.hear();
    return 0;
  });
  auto connection = connect_zmq(receiver.lines().hear());
  ASSERT_TRUE(connection.ok()) << connection.status().to_string();
  ASSERT_TRUE(connection.value()->send(bytes_of("hello")).ok());
  if (GetParam().descriptors) {
    ASSERT_TRUE(connection.value()->connect_descriptors(descriptor_path(), kEventMs).ok());
  }
  ASSERT_EQ(receiver.lines().hear(), "heard");
  const auto begin = std::chrono::steady_clock::now();
  receiver.kill();
  EXPECT_EQ(expect_event(*connection.value(), ControlEventKind::kPeerLost).status.code(), Code::kUnavailable);
  EXPECT_LT(ms_since(begin), 1'000);
  connection.value().reset();
  // The next life takes over what the killed one left.
  auto next = listen_zmq(endpoint(), descriptor_path());
  EXPECT_TRUE(next.ok()) << next.status().to_string();
}

INSTANTIATE_TEST_SUITE_P(Endpoints, ZmqControlProcess,
                         ::testing::Values(ProcessCase{false, false}, ProcessCase{false, true}, ProcessCase{true, false},
                                           ProcessCase{true, true}),
                         [](const auto& given) {
                           return std::string(given.param.tcp ? "Tcp" : "Ipc") + (given.param.descriptors ? "WithDescriptors" : "Alone");
                         });

TEST(ZmqControl, RefusesTcpBeyondLoopbackWithTheReason) {
  for (const std::string host : {"0.0.0.0", "10.0.0.1", "*", "example.com", "[::]", "128.0.0.1", "127.0.0.1.example.com"}) {
    const std::string endpoint = "tcp://" + host + ":5555";
    for (const Status& status : {listen_zmq(endpoint, "").status(), connect_zmq(endpoint).status()}) {
      EXPECT_EQ(status.code(), Code::kUnsupported) << endpoint;
      EXPECT_NE(status.message().find("not encrypted"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find(endpoint), std::string::npos) << status.message();
    }
  }
}

TEST(ZmqControl, RefusesMalformedEndpoints) {
  for (const std::string endpoint : {"", "ipc://", "ipc://relative", "ipc://*", "ipc://@abstract", "udp://127.0.0.1:1", "tcp://127.0.0.1",
                                     "tcp://:5", "tcp://127.0.0.1:", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:5x",
                                     "tcp://127.0.0.1:*", "tcp://::1:5", "/tmp/x", "IPC:///tmp/x"}) {
    EXPECT_EQ(listen_zmq(endpoint, "").status().code(), Code::kInvalidArgument) << endpoint;
    EXPECT_EQ(connect_zmq(endpoint).status().code(), Code::kInvalidArgument) << endpoint;
  }
  EXPECT_EQ(connect_zmq("tcp://127.0.0.1:0").status().code(), Code::kInvalidArgument);
}

TEST(ZmqControl, RefusesSocketPathsThatAreTooLongByName) {
  const TemporaryFolder folder;
  const std::string longest = folder.path().string() + "/" + std::string(107 - folder.path().string().size() - 1, 'x');
  ASSERT_EQ(longest.size(), 107U);
  EXPECT_TRUE(listen_zmq("ipc://" + longest, "").ok());
  EXPECT_TRUE(listen_zmq("tcp://127.0.0.1:0", longest).ok());
  for (const Status& status : {listen_zmq("ipc://" + longest + "y", "").status(), connect_zmq("ipc://" + longest + "y").status(),
                               listen_zmq("tcp://127.0.0.1:0", longest + "y").status()}) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(longest + "y"), std::string::npos) << status.message();
  }
}

TEST(ZmqControl, LeavesAFileThatIsNoSocketAlone) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "precious").string();
  std::ofstream(path) << "data";
  EXPECT_EQ(listen_zmq("ipc://" + path, "").status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(listen_zmq("tcp://127.0.0.1:0", path).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(std::filesystem::file_size(path), 4U);
}

TEST(ZmqControl, ItsSocketsAreForTheirOwnerOnlyAndGoWithIt) {
  const TemporaryFolder folder;
  const std::string ipc = (folder.path() / "r.ipc").string();
  const std::string fds = (folder.path() / "r.fds").string();
  {
    auto listener = listen_zmq("ipc://" + ipc, fds);
    ASSERT_TRUE(listener.ok()) << listener.status().to_string();
    for (const std::string& path : {ipc, fds}) {
      struct stat info = {};
      ASSERT_EQ(::lstat(path.c_str(), &info), 0);
      EXPECT_EQ(info.st_mode & 0777U, 0600U) << path;
    }
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(ZmqControl, AnswersLoopbackUnderItsOtherNames) {
  for (const std::string host : {"localhost", "127.1.2.3", "[::1]"}) {
    auto listener = listen_zmq("tcp://" + host + ":0", "");
    if (host == "[::1]" && !listener.ok()) continue;  // a machine without IPv6
    ASSERT_TRUE(listener.ok()) << listener.status().to_string();
    auto connection = connect_zmq(listener.value()->endpoint());
    EXPECT_TRUE(connection.ok()) << connection.status().to_string();
  }
}

TEST(ZmqControl, GivesUpOnSomebodyWhoDoesNotSpeakItsProtocol) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "mute").string();
  const UniqueFd mute(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(mute.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(mute.get(), 8), 0);
  const auto begin = std::chrono::steady_clock::now();
  ControlOptions options;
  options.connect_timeout_ms = 200;
  EXPECT_EQ(connect_zmq("ipc://" + path, options).status().code(), Code::kDeadlineExceeded);
  EXPECT_LT(ms_since(begin), 5'000);
}

TEST(ZmqControl, AProbeThatConnectsAndLeavesIsNoPeer) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "r.ipc").string();
  auto listener = listen_zmq("ipc://" + path, "");
  ASSERT_TRUE(listener.ok());
  // Each refused second listener probes the socket; descriptor numbers of probes are used again by real peers.
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(listen_zmq("ipc://" + path, "").ok());
    auto connection = connect_zmq("ipc://" + path);
    ASSERT_TRUE(connection.ok());
    ASSERT_TRUE(connection.value()->send(bytes_of("hello")).ok());
    const PeerId id = connection.value()->id();
    EXPECT_EQ(expect_event(*listener.value(), ControlEventKind::kMessage).peer, id);
    ASSERT_TRUE(listener.value()->send(id, bytes_of("welcome")).ok());
    EXPECT_EQ(expect_event(*connection.value(), ControlEventKind::kMessage).message, bytes_of("welcome"));
    connection.value().reset();
    EXPECT_EQ(expect_event(*listener.value(), ControlEventKind::kPeerLost).peer, id);
  }
}

TEST(ZmqControl, APeerThatSendsMoreThanAllowedIsLost) {
  const TemporaryFolder folder;
  const std::string endpoint = "ipc://" + (folder.path() / "r.ipc").string();
  ControlOptions options;
  options.message_bytes_max = 1'000;
  auto listener = listen_zmq(endpoint, "", options);
  auto connection = connect_zmq(endpoint);
  ASSERT_TRUE(listener.ok() && connection.ok());
  ASSERT_TRUE(connection.value()->send(bytes_of("hello")).ok());
  expect_event(*listener.value(), ControlEventKind::kMessage);
  ASSERT_TRUE(connection.value()->send(Bytes(1'001)).ok());
  EXPECT_EQ(expect_event(*listener.value(), ControlEventKind::kPeerLost).peer, connection.value()->id());
  EXPECT_EQ(expect_event(*connection.value(), ControlEventKind::kPeerLost).peer, connection.value()->id());
}

}  // namespace
}  // namespace headrace
