#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/checkpoint/safetensors.h"
#include "tests/system/program.h"

// The program where the system gives it less than it needs: a named error and an exit code, never a signal, nothing left behind.
namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

class HardTimes : public ::testing::Test {
 protected:
  void SetUp() override { write_checkpoint(weights(), {{"weight", Dtype::kF32, {64, 1024}}}, 1); }

  fs::path weights() const { return files_.path() / "weights"; }
  std::vector<std::string> serve_words() const { return {"--job", "job", "--checkpoint", weights().string(), "--family", "dense"}; }

  /// A line of sh in which $H is the program and $W the checkpoint. Its standard error comes with its output unless it goes elsewhere.
  ChildProcess start(const std::string& line) const {
    ChildOptions options;
    options.name = line;
    options.words = {"/bin/sh", "-c", "H='" HEADRACE_BINARY_DIR "/headrace'; W='" + weights().string() + "'; exec 2>&1; " + line};
    return ChildProcess::start(options).value_or_throw();
  }
  static Outcome end_of(ChildProcess& child) {
    Outcome outcome;
    while (true) {
      const auto line = child.read_line(30'000);
      if (!line.ok()) break;
      if (!line.value()) throw std::runtime_error(child.name() + " does not end");
      outcome.out += *line.value() + "\n";
    }
    outcome.code = child.wait(30'000).value_or_throw();
    return outcome;
  }
  Outcome run(const std::string& line) const {
    ChildProcess child = start(line);
    return end_of(child);
  }

  PrivateRunDirectory run_directory_;
  ScratchDir files_;
};

TEST_F(HardTimes, TooFewDescriptorsAreANamedError) {
#ifdef HEADRACE_SANITIZED
  GTEST_SKIP() << "the sanitizers need descriptors of their own to look at memory, and report what they cannot see";
#endif
  const Serve serve(serve_words());
  for (int limit = 5; limit <= 14; ++limit) {
    for (const std::string verb : {"push $W --to job", "serve --job other --checkpoint $W --family dense"}) {
      const Outcome outcome = run("ulimit -n " + std::to_string(limit) + "; exec $H " + verb);
      EXPECT_EQ(outcome.code, 3) << limit << " for " << verb << ": " << outcome.out;
      EXPECT_NE(outcome.out.find("headrace: "), std::string::npos) << limit << " for " << verb << ": " << outcome.out;
    }
  }
  EXPECT_FALSE(fs::exists(run_directory_.job("other"))) << "nothing is left of a start that failed";
}

TEST_F(HardTimes, AFileSizeLimitDoesNotEndAServeByASignal) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the runtime of ThreadSanitizer makes files of its own";
#endif
  const Outcome outcome = run("ulimit -f 0; exec $H serve --job job --checkpoint $W --family dense");
  EXPECT_EQ(outcome.code, 3) << outcome.out;
  EXPECT_NE(outcome.out.find("file size limit"), std::string::npos) << outcome.out;
  EXPECT_FALSE(fs::exists(run_directory_.job("job"))) << "nothing is left of a start that failed";
}

TEST_F(HardTimes, AFullDiskUnderItsOutputIsAnErrorAndUnderItsLogIsNone) {
  const Outcome silent = run("exec $H push $W --to nobody 2>/dev/full");
  EXPECT_EQ(silent.code, 4) << "the exit code of the failure itself";
  const Outcome lost = run("exec $H fingerprint $W >/dev/full");
  EXPECT_EQ(lost.code, 3);
}

TEST_F(HardTimes, ACheckpointThatIsShortenedWhileItIsReadIsANamedError) {
  // A hole of one GiB: quick to make, and long enough to read.
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  const fs::path file = weights() / "model.safetensors";
  const std::vector<TensorSpec> hole{{"hole", Dtype::kU8, {kBytes}}};
  const SafetensorsHeader header = write_safetensors_header(hole).value_or_throw();
  std::ofstream(file, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(header.bytes.data()), static_cast<std::streamsize>(header.bytes.size()));
  fs::resize_file(file, header.bytes.size() + static_cast<std::uintmax_t>(kBytes));
  ChildProcess reader = start("exec $H fingerprint $W --threads 1");
  const auto mapped = [&] {
    std::ifstream maps("/proc/" + std::to_string(reader.pid()) + "/maps");
    const std::string text(std::istreambuf_iterator<char>(maps), {});
    return text.find("model.safetensors") != std::string::npos;
  };
  const auto due = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!mapped() && std::chrono::steady_clock::now() < due) std::this_thread::yield();
  fs::resize_file(file, 4'096);
  const Outcome outcome = end_of(reader);
  EXPECT_EQ(outcome.code, 4) << outcome.out;
  EXPECT_NE(outcome.out.find("shortened"), std::string::npos) << outcome.out;
}

}  // namespace
}  // namespace headrace::system_test
