#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "examples/demo/judge.h"
#include "examples/demo/make_checkpoint.h"
#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kRanks = 4;

/// Two layers of DeepSeek-V4.1 with its true hidden and expert widths, and as many experts as fit beside four ranks: 0.7 GB.
DemoModel slice_of_v41() {
  DemoModel model = demo_model(true);
  model.layers = 2;
  model.experts = 16;
  model.hidden = 5120;
  model.moe_intermediate = 2304;
  model.vocab = 512;
  return model;
}

bool is_sanitized() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

/// The checkpoint is kept in the build folder, where the next run finds it.
class TrueSize : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (is_sanitized()) GTEST_SKIP() << "minutes under a sanitizer; the same code runs there on narrow models";
    checkpoint_ = fs::path(HEADRACE_BINARY_DIR) / "demo" / "slice";
    fs::create_directories(checkpoint_.parent_path());
    const Status made = make_demo_checkpoint(checkpoint_, slice_of_v41());
    ASSERT_TRUE(made.ok()) << made.to_string();
  }

  std::vector<std::string> model_words() const { return {"--variant", GetParam(), "--layout", "ep4"}; }

  const PrivateRunDirectory run_directory_;
  fs::path checkpoint_;
};

std::string variant_name(const ::testing::TestParamInfo<const char*>& info) {
  return info.param;
}

TEST_P(TrueSize, LandsWhereTheOracleSaysInEveryByteOfFourRanks) {
  std::vector<std::string> plan_words{"plan", checkpoint_.string()};
  for (const std::string& word : model_words()) plan_words.push_back(word);
  const JsonValue planned = run_json(plan_words, 0);

  std::vector<std::unique_ptr<Serve>> engine;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    std::vector<std::string> words{"--job", "slice", "--config", checkpoint_.string(), "--rank", std::to_string(rank)};
    for (const std::string& word : model_words()) words.push_back(word);
    engine.push_back(std::make_unique<Serve>(words));
  }
  const JsonValue report = member(run_json({"push", checkpoint_.string(), "--to", "slice"}, 0), "report");
  EXPECT_EQ(member(report, "proven").as_bool(), true);
  expect_planned(planned, report);
  run_json({"verify", checkpoint_.string(), "slice"}, 0);

  const bool padded = std::string(GetParam()) == "padded";
  Judge judge =
      Judge::open({.checkpoint = checkpoint_, .job = "slice", .ranks = kRanks, .layout = Judge::experts_divided(padded)}).value_or_throw();
  EXPECT_EQ(number(report, "wire_bytes"), static_cast<std::int64_t>(judge.wire_bytes()));
  const Status found = judge.find_storages();
  ASSERT_TRUE(found.ok()) << found.to_string();
  const oracle::Comparison compared = judge.compare(0, [](std::uint64_t, std::uint64_t) {}).value_or_throw();
  EXPECT_TRUE(compared.equal()) << compared.to_string();
  EXPECT_EQ(compared.bytes_compared, judge.live_bytes());
  const Status fingerprints = judge.compare_fingerprints(0);
  EXPECT_TRUE(fingerprints.ok()) << fingerprints.to_string();
  for (const auto& rank : engine) EXPECT_EQ(rank->stop(SIGTERM), 0);
}

INSTANTIATE_TEST_SUITE_P(ExpertWidth, TrueSize, ::testing::Values("plain", "padded"), variant_name);

}  // namespace
}  // namespace headrace::system_test
