#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "examples/demo/judge.h"
#include "tests/oracle/parallel_rows.h"
#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

using oracle::CheckpointBytes;
using oracle::ExpectedStorage;
using Bytes = std::vector<std::uint8_t>;

constexpr std::int64_t kExperts = 4;
constexpr std::int64_t kHidden = 64;
constexpr std::int64_t kWidth = 32;  // of an expert
const std::string kLayer = "model.layers.0.mlp.";

std::string name_of(std::int64_t expert, const std::string& projection) {
  std::string name = kLayer + "experts.";
  return name.append(std::to_string(expert)).append(".").append(projection).append(".weight");
}

void write_experts(const std::filesystem::path& dir) {
  std::vector<MadeTensor> tensors{{kLayer + "gate.weight", Dtype::kBF16, {kExperts, kHidden}}};
  for (std::int64_t expert = 0; expert < kExperts; ++expert) {
    for (const char* projection : {"gate_proj", "up_proj"})
      tensors.push_back({name_of(expert, projection), Dtype::kBF16, {kWidth, kHidden}});
    tensors.push_back({name_of(expert, "down_proj"), Dtype::kBF16, {kHidden, kWidth}});
  }
  write_checkpoint(dir, tensors, 5);
  std::ofstream(dir / "config.json") << R"({"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 64, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32, "num_experts": 4})";
}

/// BF16 numbers as F32: their bytes are the upper ones. What is no number becomes a quiet one.
Bytes widened(const Bytes& halves) {
  Bytes floats;
  for (std::size_t i = 0; i < halves.size(); i += 2) {
    const std::uint8_t low = halves[i];
    const std::uint8_t high = halves[i + 1];
    const bool nan = (high & 0x7F) == 0x7F && (low & 0x80) != 0 && (low & 0x7F) != 0;
    floats.insert(floats.end(), {0, 0, nan ? static_cast<std::uint8_t>(low | 0x40) : low, high});
  }
  return floats;
}

/// One parameter of gate and up, one of down, experts one after the other, and the router as it is.
std::vector<ExpectedStorage> expert_storages(const CheckpointBytes& files, std::uint32_t rank, std::uint32_t ranks) {
  const std::vector<std::int64_t> share = oracle::even_share(kWidth, ranks, rank);
  ExpectedStorage w13{kLayer + "experts.w13_weight", {}, 0, 0, {}};
  ExpectedStorage w2{kLayer + "experts.w2_weight", {}, 0, 0, {}};
  ExpectedStorage router{kLayer + "gate.weight", {}, 0, 0, {}};
  const auto append = [](ExpectedStorage& storage, const std::string& source, const Bytes& halves) {
    Bytes floats = widened(halves);
    storage.sources.push_back(source);
    storage.source_bytes += halves.size();
    storage.bytes += floats.size();
    storage.pieces.push_back({floats.size(), [floats](std::uint64_t) { return floats; }});
  };
  for (std::int64_t expert = 0; expert < kExperts; ++expert) {
    for (const char* projection : {"gate_proj", "up_proj"}) {
      const std::string name = name_of(expert, projection);
      append(w13, name, oracle::gather_rows(files.at(name).bytes, kHidden * 2, share));
    }
    const std::string down = name_of(expert, "down_proj");
    append(w2, down, oracle::gather_columns(files.at(down).bytes, kWidth * 2, 2, share));
  }
  append(router, router.name, oracle::gather_rows(files.at(router.name).bytes, kHidden * 2, oracle::even_share(kExperts, 1, 0)));
  return {w13, w2, router};
}

TEST(ConvertedExperts, AreDividedWidenedAndProvenOnTwoRanks) {
  const PrivateRunDirectory run_directory;
  const ScratchDir files;
  write_experts(files.path());
  const std::string checkpoint = files.path().string();
  const std::vector<std::string> model{"--layout", "tp2", "--dtype", "f32"};
  std::vector<std::string> words{"plan", checkpoint};
  words.insert(words.end(), model.begin(), model.end());
  const JsonValue planned = run_json(words, 0);
  EXPECT_EQ(text(planned, "family"), "fused_moe");

  std::vector<std::unique_ptr<Serve>> engine;
  for (const char* rank : {"0", "1"}) {
    words = {"--job", "experts", "--checkpoint", checkpoint, "--rank", rank};
    words.insert(words.end(), model.begin(), model.end());
    engine.push_back(std::make_unique<Serve>(words));
  }
  expect_planned(planned, member(run_json({"push", checkpoint, "--to", "experts"}, 0), "report"));
  const JsonValue verified = run_json({"verify", checkpoint, "experts"}, 0);
  EXPECT_EQ(list(verified, "converted").size(), static_cast<std::size_t>(3 * kExperts + 1));

  Judge judge = Judge::open({.checkpoint = files.path(), .job = "experts", .ranks = 2, .layout = expert_storages}).value_or_throw();
  const Status found = judge.find_storages();
  ASSERT_TRUE(found.ok()) << found.to_string();
  const oracle::Comparison compared = judge.compare(0, [](std::uint64_t, std::uint64_t) {}).value_or_throw();
  EXPECT_TRUE(compared.equal()) << compared.to_string();
  EXPECT_EQ(compared.bytes_compared, static_cast<std::uint64_t>(4 * (kExperts * 3 * kWidth * kHidden + 2 * kExperts * kHidden)));
}

}  // namespace
}  // namespace headrace::system_test
