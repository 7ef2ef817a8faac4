#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/checkpoint/safetensors.h"
#include "examples/demo/judge.h"
#include "tests/oracle/bert.h"
#include "tests/oracle/checkpoint_bytes.h"
#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kAllBytes = 90'856'960;
constexpr std::int64_t kPositionIds = 4'096;  // which an engine with stacked parameters counts by itself

/// The model that `./run test` fetches; empty when it was not fetched.
fs::path minilm() {
  const char* file = std::getenv("HEADRACE_MINILM");
  const fs::path path = file != nullptr ? fs::path(file) : fs::path(HEADRACE_SOURCE_DIR) / "build/minilm/model.safetensors";
  return fs::exists(path) ? path.parent_path() : fs::path();
}

/// The same checkpoint with all its float32 tensors rounded, and without what is no float32.
void write_rounded(const fs::path& dir, const oracle::CheckpointBytes& checkpoint) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (tensor.dtype == "F32") specs.push_back({name, Dtype::kBF16, Shape(tensor.shape.begin(), tensor.shape.end())});
  }
  const SafetensorsHeader header = write_safetensors_header(specs).value_or_throw();
  std::ofstream file(dir / "model.safetensors", std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(header.bytes.data()), static_cast<std::streamsize>(header.bytes.size()));
  for (const TensorInfo& tensor : header.tensors) {
    const std::vector<std::uint8_t> rounded = oracle::bfloat16_of(checkpoint.at(tensor.name).bytes);
    file.write(reinterpret_cast<const char*>(rounded.data()), static_cast<std::streamsize>(rounded.size()));
  }
}

/// Lines of `headrace fingerprint`, without that of the position ids.
std::string fingerprints(const std::string& source) {
  const Outcome outcome = run_program({"headrace", "fingerprint", source});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::string lines;
  for (std::size_t at = 0; at < outcome.out.size();) {
    const std::size_t end = outcome.out.find('\n', at) + 1;
    const std::string line = outcome.out.substr(at, end - at);
    if (line.find("position_ids") == std::string::npos) lines += line;
    at = end;
  }
  return lines;
}

/// A copy of the model in which one bit of one tensor is another must be told from what is served, at `offset` of the live tensor.
void expect_change_found(const fs::path& model, std::int64_t flipped, std::int64_t offset) {
  const std::string name = "encoder.layer.3.attention.self.query.weight";
  const ScratchDir changed;
  fs::copy_file(model / "model.safetensors", changed.path() / "model.safetensors");
  flip_byte(changed.path() / "model.safetensors", name, flipped);
  const JsonValue verified = run_json({"verify", changed.path().string(), "minilm"}, 1);
  ASSERT_EQ(list(verified, "differences").size(), 1u);
  const JsonValue& difference = list(verified, "differences")[0];
  EXPECT_EQ(text(difference, "name"), name);
  EXPECT_EQ(number(difference, "offset"), offset);
}

TEST(RealModel, GoesFromDiskIntoARunningRankAndAChangedTensorIsFoundByName) {
  const fs::path model = minilm();
  if (model.empty()) GTEST_SKIP() << "all-MiniLM-L6-v2 is not there: ./run test fetches it, or set HEADRACE_MINILM";
  const PrivateRunDirectory run_directory;
  Serve serve({"--job", "minilm", "--checkpoint", model.string(), "--family", "dense"});
  const JsonValue report = member(run_json({"push", model.string(), "--to", "minilm"}, 0), "report");
  EXPECT_EQ(number(report, "wire_bytes"), kAllBytes);
  EXPECT_EQ(member(report, "proven").as_bool(), true);

  const Outcome disk = run_program({"headrace", "fingerprint", model.string()});
  const Outcome live = run_program({"headrace", "fingerprint", "minilm"});
  EXPECT_EQ(disk.code, 0) << disk.err;
  EXPECT_EQ(disk.out, live.out);
  run_json({"verify", model.string(), "minilm"}, 0);
  expect_change_found(model, 100'003, 100'003);
  EXPECT_EQ(serve.stop(SIGTERM), 0);
}

struct Division {
  int ranks = 1;
  std::string dtype = "f32";

  bool rounded() const { return dtype == "bf16"; }
  std::vector<std::string> words() const {
    return {"--family", "dense", "--variant", "stacked", "--layout", "tp" + std::to_string(ranks), "--dtype", dtype};
  }
};

void PrintTo(const Division& division, std::ostream* out) {
  *out << division.ranks << " ranks, " << division.dtype;
}

std::string division_name(const ::testing::TestParamInfo<Division>& info) {
  return "tp" + std::to_string(info.param.ranks) + "_" + info.param.dtype;
}

class RealModelStacked : public ::testing::TestWithParam<Division> {
 protected:
  void SetUp() override {
    if (model_.empty()) GTEST_SKIP() << "all-MiniLM-L6-v2 is not there: ./run test fetches it, or set HEADRACE_MINILM";
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      std::vector<std::string> words{"--job", "minilm", "--checkpoint", model_.string(), "--rank", std::to_string(rank)};
      for (const std::string& word : GetParam().words()) words.push_back(word);
      engine_.push_back(std::make_unique<Serve>(words));
    }
  }

  JsonValue plan() const {
    std::vector<std::string> words{"plan", model_.string()};
    for (const std::string& word : GetParam().words()) words.push_back(word);
    return run_json(words, 0);
  }

  /// Every byte of every rank.
  void expect_oracles_bytes() const {
    Judge::Options options{.checkpoint = model_, .job = "minilm", .ranks = static_cast<std::uint32_t>(GetParam().ranks)};
    options.layout = [rounded = GetParam().rounded()](const oracle::CheckpointBytes& files, std::uint32_t rank, std::uint32_t ranks) {
      return oracle::bert_storages(files, ranks, rank, rounded);
    };
    Judge judge = Judge::open(options).value_or_throw();
    const Status found = judge.find_storages();
    ASSERT_TRUE(found.ok()) << found.to_string();
    const oracle::Comparison compared = judge.compare(0, [](std::uint64_t, std::uint64_t) {}).value_or_throw();
    EXPECT_TRUE(compared.equal()) << compared.to_string();
    EXPECT_GE(compared.bytes_compared, static_cast<std::uint64_t>(kAllBytes - kPositionIds) / (GetParam().rounded() ? 2 : 1));
  }

  const PrivateRunDirectory run_directory_;
  const fs::path model_ = minilm();
  std::vector<std::unique_ptr<Serve>> engine_;
};

TEST_P(RealModelStacked, HoldsEveryByteThatTheFormulasSayAndTheFingerprintsOfTheFile) {
  const JsonValue planned = plan();
  const JsonValue report = member(run_json({"push", model_.string(), "--to", "minilm"}, 0), "report");
  EXPECT_EQ(number(report, "wire_bytes"), kAllBytes - kPositionIds);
  EXPECT_EQ(member(report, "proven").as_bool(), true);
  expect_planned(planned, report);
  const std::int64_t converted = GetParam().rounded() ? 103 : 0;
  for (const JsonValue& rank : list(planned, "ranks"))
    EXPECT_EQ(number(rank, "converted"), GetParam().rounded() ? number(rank, "tensors") : 0);
  expect_oracles_bytes();

  const JsonValue verified = run_json({"verify", model_.string(), "minilm"}, 0);
  EXPECT_EQ(number(verified, "equal"), 103);
  EXPECT_EQ(list(verified, "converted").size(), static_cast<std::size_t>(converted));
  ASSERT_EQ(list(verified, "not_served").size(), 1u);
  EXPECT_EQ(*list(verified, "not_served")[0].as_string(), "embeddings.position_ids");
  const ScratchDir rounded;
  if (GetParam().rounded()) write_rounded(rounded.path(), oracle::CheckpointBytes(model_));
  EXPECT_EQ(fingerprints("minilm"), fingerprints(GetParam().rounded() ? rounded.path().string() : model_.string()));

  // The highest byte of element 100,000, which of two ranks the second has.
  expect_change_found(model_, 400'003, GetParam().rounded() ? 200'001 : 400'003);
  for (const auto& rank : engine_) EXPECT_EQ(rank->stop(SIGTERM), 0);
}

INSTANTIATE_TEST_SUITE_P(Divisions, RealModelStacked,
                         ::testing::Values(Division{1, "f32"}, Division{1, "bf16"}, Division{2, "f32"}, Division{2, "bf16"}),
                         division_name);

}  // namespace
}  // namespace headrace::system_test
