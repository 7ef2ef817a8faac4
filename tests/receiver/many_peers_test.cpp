#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

class ManyPeers : public ReceiverFixture {};

TEST_F(ManyPeers, TheOneBeyondTheLimitIsRefusedByName) {
  start();
  std::vector<WireSender> peers;
  for (std::size_t i = 0; i < limits::kPeersMax; ++i) {
    peers.push_back(connect("s" + std::to_string(i)));
    ASSERT_EQ(peers.back().hello().job, "job") << i;
  }
  WireSender last = connect("last");
  wire::Hello hello;
  hello.protocol_min = hello.protocol_max = limits::kProtocolVersion;
  hello.job = "job";
  hello.sender = "last";
  hello.data_paths = {"inline"};
  last.send(hello);
  const auto refused = last.expect<wire::ErrorReport>();
  EXPECT_EQ(refused.failure.code, static_cast<std::uint32_t>(Code::kResourceExhausted));
  EXPECT_NE(refused.failure.message.find(std::to_string(limits::kPeersMax)), std::string::npos) << refused.failure.message;
}

}  // namespace
}  // namespace headrace
