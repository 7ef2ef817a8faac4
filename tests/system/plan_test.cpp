#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/checkpoint/json_text.h"
#include "examples/demo/make_checkpoint.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

void write_text(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

/// Keeps the headers of a checkpoint's files and cuts everything behind them.
void cut_data(const fs::path& from, const fs::path& to) {
  fs::create_directories(to);
  for (const fs::directory_entry& entry : fs::directory_iterator(from)) {
    const fs::path target = to / entry.path().filename();
    fs::copy_file(entry.path(), target);
    if (entry.path().extension() != ".safetensors") continue;
    std::ifstream file(target, std::ios::binary);
    std::uint64_t length = 0;
    for (int i = 0; i < 8; ++i) length |= static_cast<std::uint64_t>(file.get()) << (8 * i);
    fs::resize_file(target, 8 + length);
  }
}

class Plan : public ::testing::Test {
 protected:
  void SetUp() override {
    DemoModel model = demo_model(true);
    model.layers = 2;
    model.experts = 16;
    model.vocab = 256;
    ASSERT_TRUE(make_demo_checkpoint(checkpoint(), model).ok());
  }

  std::string checkpoint() const { return (files_.path() / "checkpoint").string(); }
  std::vector<std::string> plan_words(const std::string& dir) const {
    return {"plan", dir, "--variant", "padded", "--layout", "ep2", "--bucket-bytes", "1000000"};
  }

  PrivateRunDirectory run_directory_;
  ScratchDir files_;
};

TEST_F(Plan, SaysOfEveryRankWhatItsReceiptSaysAfterwards) {
  const JsonValue planned = run_json(plan_words(checkpoint()), 0);
  std::vector<std::string> words{"--job", "plan", "--config", checkpoint(), "--variant", "padded", "--layout", "ep2", "--rank", "0"};
  const Serve first(words);
  words.back() = "1";
  const Serve second(words);
  const JsonValue report = member(run_json({"push", checkpoint(), "--to", "plan", "--bucket-bytes", "1000000"}, 0), "report");
  expect_planned(planned, report);
  EXPECT_GT(number(list(planned, "ranks")[0], "buckets"), 3);
  EXPECT_GT(number(list(planned, "ranks")[0], "padding_bytes"), 0);
}

TEST_F(Plan, NeedsNoDataBehindTheHeaders) {
  const std::string cut = (files_.path() / "cut").string();
  cut_data(checkpoint(), cut);
  const std::vector<std::string> words = plan_words(cut);
  EXPECT_EQ(json_text(run_json(words, 0)), json_text(run_json(plan_words(checkpoint()), 0)));
  run_json({"push", cut, "--to", "nobody"}, 3);
}

TEST_F(Plan, KnowsNamesAndShapesFromTheConfigAlone) {
  const fs::path config = files_.path() / "config";
  fs::create_directories(config);
  fs::copy_file(fs::path(checkpoint()) / "config.json", config / "config.json");
  const JsonValue from_config = run_json(plan_words(config.string()), 0);
  const JsonValue from_headers = run_json(plan_words(checkpoint()), 0);
  ASSERT_EQ(list(from_config, "ranks").size(), 2u);
  for (std::size_t rank = 0; rank < 2; ++rank) expect_same_figures(list(from_config, "ranks")[rank], list(from_headers, "ranks")[rank]);
}

TEST_F(Plan, ShowsOneRankWhenItIsAskedForOne) {
  std::vector<std::string> words = plan_words(checkpoint());
  words.insert(words.end(), {"--rank", "1"});
  const JsonValue planned = run_json(words, 0);
  ASSERT_EQ(list(planned, "ranks").size(), 1u);
  EXPECT_EQ(number(list(planned, "ranks")[0], "rank"), 1);
  words.back() = "2";
  run_json(words, 3);
  words.back() = "first";
  run_json(words, 3);
}

TEST_F(Plan, RefusesWhatTheRanksWouldRefuseWithEveryDefect) {
  const std::string other = (files_.path() / "other").string();
  write_checkpoint(other, {{"stranger", Dtype::kF32, {2}}, {"norm.weight", Dtype::kBF16, {3}}}, 1);
  fs::copy_file(fs::path(checkpoint()) / "config.json", fs::path(other) / "config.json");
  const std::string message = text(member(run_json(plan_words(other), 3), "error"), "message");
  for (const char* part : {"norm.weight", "[3]", "stranger", "all 2 ranks"}) EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST_F(Plan, RefusesWhatIsNoModel) {
  run_json({"plan", "/nonexistent"}, 3);
  run_json({"plan", checkpoint(), "--layout", "ep0"}, 3);
  run_json({"plan", checkpoint(), "--layout", "ep3", "--family", "deepseek_v4"}, 3);
  run_json({"plan", files_.path().string()}, 3);
  const fs::path config = files_.path() / "lone";
  write_text(config / "config.json", "{}");
  run_json({"plan", config.string(), "--family", "dense"}, 3);
}

/// The true model: 40 layers of 384 experts over 4 ranks. Every rank has 96 of them a layer and all tensors that are no experts.
TEST(PlanOfV41, TakesItsTrueDimensionsFromTheConfig) {
  const PrivateRunDirectory run_directory;
  const fs::path config = run_directory.scratch() / "v41";
  write_text(config / "config.json", headrace::testing::v41_config());
  const JsonValue planned = run_json({"plan", config.string(), "--layout", "ep4"}, 0);
  ASSERT_EQ(list(planned, "ranks").size(), 4u);
  constexpr std::int64_t kExperts = 40 * 96 * 6;  // three weights and three scales of each
  std::int64_t applied = 0;
  for (const JsonValue& rank : list(planned, "ranks")) {
    EXPECT_EQ(number(rank, "expert_tensors"), kExperts);
    EXPECT_EQ(number(rank, "run_experts"), kExperts);
    // Four bits a weight and a scale of 8 bits for 32 of them, 3 matrices of 5120 x 2304.
    EXPECT_GE(number(rank, "wire_bytes"), std::int64_t{40} * 96 * 3 * (5120 * 2304 / 2 + 5120 * 2304 / 32));
    EXPECT_EQ(number(rank, "padding_bytes"), 0);
    applied += number(rank, "applied_bytes");
  }
  EXPECT_EQ(number(planned, "applied_bytes"), applied);
  EXPECT_LT(number(planned, "wire_bytes"), applied);
}

}  // namespace
}  // namespace headrace::system_test
