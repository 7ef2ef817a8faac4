#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

ChildProcess start_embedded_receiver(const std::string& job) {
  ChildOptions options;
  options.name = "embedded-receiver";
  options.words = {std::string(HEADRACE_BINARY_DIR) + "/examples/headrace-embedded-receiver", job};
  ChildProcess process = ChildProcess::start(options).value_or_throw();
  const std::optional<std::string> ready = process.read_line(60'000).value_or_throw();
  EXPECT_TRUE(ready && ready->starts_with("ready: ipc://")) << ready.value_or("nothing");
  return process;
}

std::string stop(ChildProcess& process) {
  process.send_signal(SIGTERM);
  std::string last = process.read_line(60'000).value_or_throw().value_or("nothing");
  EXPECT_EQ(process.wait(60'000).value_or_throw(), 0);
  return last;
}

/// The code that README.md shows.
TEST(Examples, BringTwoTensorsIntoOneParameterOfARunningEngineAndLeaveNothingBehind) {
  const PrivateRunDirectory run_directory;
  ChildProcess engine = start_embedded_receiver("examples");
  const Outcome sender = run_program({"examples/headrace-small-sender", "examples"});
  EXPECT_EQ(sender.code, 0) << sender.err;
  EXPECT_EQ(sender.out, "run-1/1: 256 bytes applied, proven\n");
  // Weights are 1 to 64, eight to a row: the last row sums to 57 + ... + 64.
  EXPECT_EQ(stop(engine), "run-1/1: first weight 1, last weight 64, last row sum 484");
  EXPECT_FALSE(std::filesystem::exists(run_directory.job("examples")));
}

TEST(Examples, AreRefusedAVersionThatIsServedAlready) {
  const PrivateRunDirectory run_directory;
  ChildProcess engine = start_embedded_receiver("examples");
  EXPECT_EQ(run_program({"examples/headrace-small-sender", "examples"}).code, 0);
  const Outcome again = run_program({"examples/headrace-small-sender", "examples"});
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("run-1/1"), std::string::npos) << again.err;
  stop(engine);
}

TEST(Examples, SayThatNoEngineIsThere) {
  const PrivateRunDirectory run_directory;
  const Outcome sender = run_program({"examples/headrace-small-sender", "nobody"});
  EXPECT_EQ(sender.code, 1);
  EXPECT_NE(sender.err.find("nobody"), std::string::npos) << sender.err;
}

}  // namespace
}  // namespace headrace::system_test
