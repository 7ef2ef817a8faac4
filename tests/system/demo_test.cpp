#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

/// Runs the small demo. Its checkpoint is kept in the build folder, where the next run finds it.
Outcome run_demo(std::vector<std::string> arguments) {
  std::vector<std::string> words{"examples/headrace-demo",
                                 "--programs",
                                 HEADRACE_BINARY_DIR,
                                 "--work",
                                 std::string(HEADRACE_BINARY_DIR) + "/demo",
                                 "--small",
                                 "--json",
                                 "-"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run_program(words);
}

TEST(Demo, ProvesThreeUpdatesATornOneAndTheWayBack) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "minutes under ThreadSanitizer; the same programs run there with a flipped bit";
#endif
  const PrivateRunDirectory run_directory;
  const Outcome outcome = run_demo({});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const JsonValue document = parse_json(outcome.out).value_or_throw();
  EXPECT_EQ(text(document, "schema"), "headrace.demo/1");
  EXPECT_EQ(member(document, "verified").as_bool(), true);
  EXPECT_EQ(number(document, "ranks"), 4);
  EXPECT_EQ(number(document, "senders"), 2);
  const JsonValue::Array& steps = *member(document, "steps").as_array();
  ASSERT_EQ(steps.size(), 3u);
  for (const JsonValue& step : steps) {
    EXPECT_EQ(member(step, "fingerprints_equal").as_bool(), true);
    EXPECT_EQ(number(step, "engram_calls"), 0);
    for (const char* key : {"wire_bytes", "applied_bytes", "tensors", "expert_tensors", "batches", "copies", "runs"}) {
      EXPECT_GT(number(step, key), 0) << key;
    }
    for (const char* key : {"ms", "gbps", "ns_per_tensor", "experts_per_run"}) EXPECT_GT(*member(step, key).as_double(), 0.0) << key;
    for (const char* phase : {"manifest", "transfer", "prepare", "commit"})
      EXPECT_TRUE(member(member(step, "phases_ms"), phase).as_double());
  }
  const JsonValue& oracle = member(document, "oracle");
  EXPECT_GT(number(oracle, "bytes_compared"), 3 * number(steps[0], "applied_bytes"));
  EXPECT_EQ(number(oracle, "bytes_different"), 0);
  const JsonValue& fault = member(document, "fault");
  EXPECT_EQ(member(fault, "injected").as_bool(), true);
  EXPECT_EQ(text(fault, "state_after"), "torn");
  EXPECT_EQ(member(fault, "served_while_torn").as_bool(), false);
  EXPECT_EQ(member(fault, "recovered").as_bool(), true);
  EXPECT_GT(number(document, "receiver_extra_bytes_max"), 0);
  EXPECT_TRUE(!fs::exists(run_directory.scratch() / "headrace") || fs::is_empty(run_directory.scratch() / "headrace"));
}

TEST(Demo, FailsWhenOneBitOfALiveRankIsFlipped) {
  const PrivateRunDirectory run_directory;
  const Outcome outcome = run_demo({"--poke"});
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  const JsonValue document = parse_json(outcome.out).value_or_throw();
  EXPECT_EQ(member(document, "verified").as_bool(), false);
  EXPECT_EQ(number(member(document, "oracle"), "bytes_different"), 1);
}

TEST(Demo, ReadsRegisteredWeightsInPlace) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "minutes under ThreadSanitizer; the same programs run there with a flipped bit";
#endif
  const PrivateRunDirectory run_directory;
  const Outcome outcome = run_demo({"--registered"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

}  // namespace
}  // namespace headrace::system_test
