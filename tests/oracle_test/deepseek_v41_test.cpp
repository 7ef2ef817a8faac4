#include "tests/oracle/deepseek_v41.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace headrace::oracle {
namespace {

using Bytes = std::vector<std::uint8_t>;

/// The smallest padded model: 128 rows, 512 with padding, 64 bytes in a row of w1 and of w2, 4 scales a row.
constexpr OracleModel kTiny{128, 128, 512, 2, 1};

/// Bytes with position p marked by `mark`.
Bytes marked(std::size_t bytes, std::size_t at, std::uint8_t mark = 0xEE) {
  Bytes result(bytes, 0);
  result.at(at) = mark;
  return result;
}

/// Where the one non-zero byte is.
std::size_t position(const Bytes& bytes) {
  std::size_t found = bytes.size();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == 0) continue;
    EXPECT_EQ(found, bytes.size()) << "two bytes are not zero";
    found = i;
  }
  return found;
}

TEST(OracleExperts, InterleavesGateAndUpRowsInTurnsOfEight) {
  const Bytes zero(128 * 64, 0);
  const auto gate = [&](std::size_t row, std::size_t column) {
    return position(l1_weight_slot(kTiny, marked(128 * 64, row * 64 + column), zero));
  };
  const auto up = [&](std::size_t row, std::size_t column) {
    return position(l1_weight_slot(kTiny, zero, marked(128 * 64, row * 64 + column)));
  };
  EXPECT_EQ(gate(0, 0), 0u);
  EXPECT_EQ(gate(7, 63), 7u * 64 + 63);
  EXPECT_EQ(up(0, 0), 8u * 64);
  EXPECT_EQ(up(7, 5), 15u * 64 + 5);
  EXPECT_EQ(gate(8, 1), 16u * 64 + 1);
  EXPECT_EQ(up(8, 0), 24u * 64);
  EXPECT_EQ(gate(127, 0), 247u * 64);
  EXPECT_EQ(up(127, 63), 255u * 64 + 63);
  EXPECT_EQ(l1_weight_slot(kTiny, zero, zero).size(), 1024u * 64);
}

TEST(OracleExperts, PutsFirstLayerScalesIntoWordsByPermutedRow) {
  const Bytes zero(128 * 4, 0);
  const auto gate = [&](std::size_t row, std::size_t group) {
    return position(l1_scale_slot(kTiny, marked(128 * 4, row * 4 + group), zero));
  };
  const auto up = [&](std::size_t row, std::size_t group) {
    return position(l1_scale_slot(kTiny, zero, marked(128 * 4, row * 4 + group)));
  };
  EXPECT_EQ(gate(0, 0), 0u);
  EXPECT_EQ(gate(0, 3), 3u);
  EXPECT_EQ(gate(1, 0), 4u * 4);         // row 1 of 1024: (1 & 31) << 2
  EXPECT_EQ(up(0, 0), 32u * 4);          // row 8: 8 << 2
  EXPECT_EQ(gate(8, 0), 64u * 4);        // row 16: 16 << 2
  EXPECT_EQ(up(8, 0), 96u * 4);          // row 24: 24 << 2
  EXPECT_EQ(gate(16, 2), 1u * 4 + 2);    // row 32: 32 >> 5
  EXPECT_EQ(gate(32, 0), 2u * 4);        // row 64
  EXPECT_EQ(gate(64, 1), 128u * 4 + 1);  // row 128: the second block of 128
  EXPECT_EQ(up(127, 3), 255u * 4 + 3);   // row 255: 128 + (31 << 2) + 3
  EXPECT_EQ(l1_scale_slot(kTiny, zero, zero).size(), 1024u * 4);
}

TEST(OracleExperts, StepsFirstLayerScaleColumnsByAllPaddedRows) {
  const OracleModel wide{256, 128, 512, 2, 1};  // 8 scales a row, 2 columns of words
  const Bytes zero(128 * 8, 0);
  EXPECT_EQ(position(l1_scale_slot(wide, marked(128 * 8, 4), zero)), 1024u * 4);
  EXPECT_EQ(position(l1_scale_slot(wide, zero, marked(128 * 8, 8 * 8 + 7))), (1024u + 96) * 4 + 3);
}

TEST(OracleExperts, PadsEachRowOfTheSecondLayer) {
  EXPECT_EQ(position(l2_weight_slot(kTiny, marked(128 * 64, 0))), 0u);
  EXPECT_EQ(position(l2_weight_slot(kTiny, marked(128 * 64, 63))), 63u);
  EXPECT_EQ(position(l2_weight_slot(kTiny, marked(128 * 64, 64))), 256u);
  EXPECT_EQ(position(l2_weight_slot(kTiny, marked(128 * 64, 127 * 64 + 9))), 127u * 256 + 9);
  EXPECT_EQ(l2_weight_slot(kTiny, Bytes(128 * 64)).size(), 128u * 256);
}

TEST(OracleExperts, PutsSecondLayerScalesIntoWordsByPermutedRow) {
  const auto at = [&](std::size_t row, std::size_t group) { return position(l2_scale_slot(kTiny, marked(128 * 4, row * 4 + group))); };
  EXPECT_EQ(at(0, 0), 0u);
  EXPECT_EQ(at(1, 1), 4u * 4 + 1);
  EXPECT_EQ(at(31, 0), 124u * 4);
  EXPECT_EQ(at(32, 0), 1u * 4);
  EXPECT_EQ(at(127, 3), 127u * 4 + 3);
  EXPECT_EQ(l2_scale_slot(kTiny, Bytes(128 * 4)).size(), 128u * 4 * 4);
  const OracleModel two_columns{128, 256, 512, 2, 1};
  EXPECT_EQ(position(l2_scale_slot(two_columns, marked(128 * 8, 4))), 128u * 4);
}

TEST(OracleExperts, LeavesPaddingZeroAndFillsAllElse) {
  const Bytes w(128 * 64, 0xFF);
  const Bytes scale(128 * 4, 0xFF);
  const Bytes l1 = l1_weight_slot(kTiny, w, w);
  EXPECT_EQ(std::count(l1.begin(), l1.begin() + 256 * 64, 0xFF), 256 * 64);
  EXPECT_EQ(std::count(l1.begin() + 256 * 64, l1.end(), 0), 768 * 64);
  const Bytes l1_scale = l1_scale_slot(kTiny, scale, scale);
  EXPECT_EQ(std::count(l1_scale.begin(), l1_scale.begin() + 256 * 4, 0xFF), 256 * 4);
  EXPECT_EQ(std::count(l1_scale.begin() + 256 * 4, l1_scale.end(), 0), 768 * 4);
  const Bytes l2 = l2_weight_slot(kTiny, w);
  EXPECT_EQ(std::count(l2.begin(), l2.end(), 0xFF), 128 * 64);
  EXPECT_EQ(std::count(l2.begin() + 64, l2.begin() + 256, 0), 192);
  const Bytes l2_scale = l2_scale_slot(kTiny, scale);
  EXPECT_EQ(std::count(l2_scale.begin(), l2_scale.begin() + 512, 0xFF), 512);
  EXPECT_EQ(std::count(l2_scale.begin() + 512, l2_scale.end(), 0), 1536);
}

TEST(OracleExperts, RefusesSourcesOfAnotherSize) {
  const Bytes w(128 * 64);
  EXPECT_THROW(l1_weight_slot(kTiny, w, Bytes(128 * 64 - 1)), std::runtime_error);
  EXPECT_THROW(l2_scale_slot(kTiny, w), std::runtime_error);
}

TEST(OracleNames, FollowsTheEnginesMapping) {
  const std::map<std::string, std::pair<std::string, int>> expected{
      {"embed.weight", {"model.embed_tokens.weight", 0}},
      {"head.weight", {"lm_head.weight", 0}},
      {"norm.weight", {"model.norm.weight", 0}},
      {"layers.3.attn.wq_a.weight", {"model.layers.3.attn.fused_wqa_wkv.weight", 0}},
      {"layers.3.attn.wkv.scale", {"model.layers.3.attn.fused_wqa_wkv.weight_scale", 1}},
      {"layers.3.attn.wq_b.scale", {"model.layers.3.attn.wq_b.weight_scale", 0}},
      {"layers.2.attn.compressor.wkv.weight", {"model.layers.2.attn.compressor.fused_wkv_wgate.weight", 0}},
      {"layers.2.attn.compressor.wgate.weight", {"model.layers.2.attn.compressor.fused_wkv_wgate.weight", 1}},
      {"layers.2.attn.compressor.norm.weight", {"model.layers.2.attn.compressor.norm.weight", 0}},
      {"layers.2.attn.indexer.wq_b.scale", {"model.layers.2.attn.indexer.wq_b.weight_scale", 0}},
      {"layers.1.engram.wkv.scale", {"model.layers.1.engram.wkv.weight_scale", 0}},
      {"layers.1.engram.q_weight", {"model.layers.1.engram.q_weight", 0}},
      {"layers.0.ffn.shared_experts.w1.weight", {"model.layers.0.ffn.shared_experts.gate_up_proj.weight", 0}},
      {"layers.0.ffn.shared_experts.w3.scale", {"model.layers.0.ffn.shared_experts.gate_up_proj.weight_scale", 1}},
      {"layers.0.ffn.shared_experts.w2.scale", {"model.layers.0.ffn.shared_experts.down_proj.weight_scale", 0}},
      {"layers.0.ffn.gate.weight", {"model.layers.0.ffn.gate.weight", 0}},
      {"layers.0.ffn.gate.bias", {"model.layers.0.ffn.gate.e_score_correction_bias", 0}},
      {"layers.0.ffn.gate.bias_vl", {"model.layers.0.ffn.gate.bias_vl", 0}},
      {"layers.0.hc_attn_scale", {"model.layers.0.hc_attn_scale", 0}},
      {"layers.0.attn.attn_sink", {"model.layers.0.attn.attn_sink", 0}},
  };
  for (const auto& [name, place] : expected) {
    EXPECT_EQ(runtime_place(name).name, place.first);
    EXPECT_EQ(runtime_place(name).shard, place.second) << name;
  }
}

/// A folder with a checkpoint of one layer of kTiny: byte o of the tensor number n is 37 n + o.
class TinyCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "headrace-oracle-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
    for (const char* expert : {"0", "1"}) {
      const std::string prefix = std::string("layers.0.ffn.experts.") + expert;
      for (const char* part : {".w1", ".w2", ".w3"}) {
        add(prefix + part + ".weight", "I8", {128, 64});
        add(prefix + part + ".scale", "F8_E8M0", {128, 4});
      }
    }
    add("layers.0.attn.wq_a.weight", "F8_E4M3", {32, 128});
    add("layers.0.attn.wkv.weight", "F8_E4M3", {64, 128});
    add("norm.weight", "BF16", {128});
    add("layers.0.ffn.gate.bias", "F32", {3});
    write();
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  void add(const std::string& name, const std::string& dtype, const std::vector<std::uint64_t>& shape) {
    std::size_t bytes = dtype == "F32" ? 4 : dtype == "BF16" ? 2 : 1;
    for (const std::uint64_t dim : shape) bytes *= dim;
    header_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {data_.size(), data_.size() + bytes}}};
    const std::size_t number = header_.size();
    for (std::size_t o = 0; o < bytes; ++o) data_.push_back(static_cast<char>(37 * number + o));
  }
  void write() const {
    std::ofstream file(dir_ / "model.safetensors", std::ios::binary);
    const std::string json = header_.dump();
    for (std::size_t i = 0; i < 8; ++i) file.put(static_cast<char>(json.size() >> (8 * i)));
    file << json;
    file.write(data_.data(), static_cast<std::streamsize>(data_.size()));
  }

  std::filesystem::path dir_;
  nlohmann::json header_;
  std::vector<char> data_;
};

TEST_F(TinyCheckpoint, GivesEveryStorageOfARankAndNoOther) {
  const CheckpointBytes checkpoint(dir_);
  const std::vector<ExpectedStorage> storages = deepseek_v41_storages(checkpoint, kTiny, 1, 2);
  std::map<std::string, std::uint64_t> sizes;
  for (const ExpectedStorage& storage : storages) sizes[storage.name] = storage.bytes;
  const std::map<std::string, std::uint64_t> expected{
      {"model.layers.0.ffn.experts.w13_weight", 1024 * 64},    {"model.layers.0.ffn.experts.w13_weight_scale", 1024 * 4},
      {"model.layers.0.ffn.experts.w2_weight", 128 * 256},     {"model.layers.0.ffn.experts.w2_weight_scale", 128 * 16},
      {"model.layers.0.attn.fused_wqa_wkv.weight", 96 * 128},  {"model.norm.weight", 256},
      {"model.layers.0.ffn.gate.e_score_correction_bias", 12},
  };
  EXPECT_EQ(sizes, expected);
  EXPECT_EQ(storages.size(), expected.size());
  const std::uint64_t dense = 96 * 128 + 256 + 12;
  EXPECT_EQ(applied_bytes(storages), dense + 3 * 128 * 68);
  EXPECT_EQ(wanted_wire_bytes(checkpoint, {storages}), dense + 3 * 128 * 68);
  EXPECT_EQ(wanted_wire_bytes(checkpoint, {storages, deepseek_v41_storages(checkpoint, kTiny, 0, 2)}), dense + 2 * 3 * 128 * 68);
}

TEST_F(TinyCheckpoint, TakesTheExpertsOfTheRank) {
  const CheckpointBytes checkpoint(dir_);
  const auto storages = deepseek_v41_storages(checkpoint, kTiny, 1, 2);
  const Bytes live = storages[0].expected(0);
  EXPECT_EQ(live[0], checkpoint.at("layers.0.ffn.experts.1.w1.weight").bytes[0]);
  EXPECT_EQ(live[8 * 64 + 5], checkpoint.at("layers.0.ffn.experts.1.w3.weight").bytes[5]);
  const auto both = deepseek_v41_storages(checkpoint, kTiny, 0, 1);
  EXPECT_EQ(both[0].bytes, 2u * 1024 * 64);
  EXPECT_EQ(both[0].expected(0)[1024 * 64 + 16 * 64], checkpoint.at("layers.0.ffn.experts.1.w1.weight").bytes[8 * 64]);
}

TEST_F(TinyCheckpoint, ConcatenatesStackedTensors) {
  const CheckpointBytes checkpoint(dir_);
  for (const ExpectedStorage& storage : deepseek_v41_storages(checkpoint, kTiny, 0, 1)) {
    if (storage.name != "model.layers.0.attn.fused_wqa_wkv.weight") continue;
    const Bytes live = storage.expected(0);
    EXPECT_EQ(live[0], checkpoint.at("layers.0.attn.wq_a.weight").bytes[0]);
    EXPECT_EQ(live[32 * 128 - 1], checkpoint.at("layers.0.attn.wq_a.weight").bytes[32 * 128 - 1]);
    EXPECT_EQ(live[32 * 128], checkpoint.at("layers.0.attn.wkv.weight").bytes[0]);
    EXPECT_EQ(live[96 * 128 - 1], checkpoint.at("layers.0.attn.wkv.weight").bytes[64 * 128 - 1]);
    return;
  }
  FAIL() << "the stacked storage is missing";
}

TEST_F(TinyCheckpoint, FindsOneWrongByteWhereverItIs) {
  const CheckpointBytes checkpoint(dir_);
  for (const ExpectedStorage& storage : deepseek_v41_storages(checkpoint, kTiny, 0, 1)) {
    Bytes live = storage.expected(5);
    EXPECT_TRUE(storage.compare(5, live).equal());
    for (const std::size_t at : {std::size_t{0}, live.size() / 2, live.size() - 1}) {
      live[at] ^= 0x40;
      const Comparison result = storage.compare(5, live);
      EXPECT_EQ(result.bytes_compared, storage.bytes);
      EXPECT_EQ(result.bytes_different, 1u);
      ASSERT_TRUE(result.first.has_value());
      EXPECT_EQ(result.first->storage, storage.name);
      EXPECT_EQ(result.first->offset, at);
      EXPECT_EQ(result.first->actual, live[at]);
      EXPECT_EQ(result.first->expected, live[at] ^ 0x40);
      live[at] ^= 0x40;
    }
    EXPECT_THROW(storage.compare(5, std::span(live).first(live.size() - 1)), std::runtime_error);
  }
}

TEST_F(TinyCheckpoint, SeesEveryByteThatIsStillOfTheVersionBefore) {
  const CheckpointBytes checkpoint(dir_);
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    for (const std::uint64_t version : {1u, 2u, 3u, 4u}) {
      const ExpectedStorage storage = plain_storage(checkpoint, name);
      EXPECT_EQ(storage.compare(version, storage.expected(version - 1)).bytes_different, storage.bytes) << name;
    }
  }
}

TEST_F(TinyCheckpoint, SaysTheSameByteByByteAsForWholeTensors) {
  const CheckpointBytes checkpoint(dir_);
  const CheckpointBytes::Tensor& tensor = checkpoint.at("layers.0.ffn.gate.bias");
  const Bytes whole = version_bytes(tensor, 2);
  ASSERT_EQ(whole.size(), 12u);
  for (std::uint64_t o = 0; o < whole.size(); ++o) EXPECT_EQ(whole[o], version_byte(tensor.name, 2, o, tensor.bytes[o]));
  EXPECT_EQ(version_bytes(tensor, 0), Bytes(tensor.bytes.begin(), tensor.bytes.end()));
}

TEST_F(TinyCheckpoint, GivesEachTensorItsOwnStorageInTheDenseFamily) {
  const CheckpointBytes checkpoint(dir_);
  const auto storages = dense_storages(checkpoint);
  EXPECT_EQ(storages.size(), checkpoint.tensors().size());
  EXPECT_EQ(applied_bytes(storages), data_.size());
}

TEST_F(TinyCheckpoint, RefusesACheckpointThatDoesNotFitTheModel) {
  const CheckpointBytes checkpoint(dir_);
  EXPECT_THROW(deepseek_v41_storages(checkpoint, OracleModel{128, 128, 512, 1, 1}, 0, 1), std::runtime_error);
  EXPECT_THROW(deepseek_v41_storages(checkpoint, OracleModel{128, 128, 512, 3, 1}, 0, 1), std::runtime_error);
  EXPECT_THROW(deepseek_v41_storages(checkpoint, OracleModel{128, 128, 512, 2, 2}, 0, 1), std::runtime_error);
  EXPECT_THROW(deepseek_v41_storages(checkpoint, OracleModel{100, 128, 512, 2, 1}, 0, 1), std::runtime_error);
  EXPECT_THROW(deepseek_v41_storages(checkpoint, OracleModel{128, 320, 512, 2, 1}, 0, 1), std::runtime_error);
  EXPECT_THROW(deepseek_v41_storages(checkpoint, kTiny, 0, 3), std::runtime_error);
}

TEST(Oracle, IncludesNothingOfWhatItJudges) {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(HEADRACE_SOURCE_DIR) / "tests" / "oracle")) {
    std::ifstream file(entry.path());
    ++files;
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("#include \"", 0) != 0) continue;
      EXPECT_EQ(line.rfind("#include \"tests/oracle/", 0), 0u) << entry.path() << ": " << line;
    }
  }
  EXPECT_GE(files, 6u);
}

}  // namespace
}  // namespace headrace::oracle
