#include "examples/demo/make_checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <set>
#include <thread>

#include "core/checkpoint/checkpoint.h"
#include "examples/demo/demo_values.h"
#include "tests/core/checkpoint/temp_folder.h"
#include "tests/oracle/deepseek_v41.h"

namespace headrace {
namespace {

using testing::TempFolder;

/// All structure of a small model with 4 experts and one layer beyond the compressor's.
DemoModel tiny_model() {
  DemoModel model = demo_model(true);
  model.layers = 3;
  model.experts = 4;
  model.vocab = 64;
  return model;
}

TEST(DemoModel, HasTheTensorsOfV41WithoutTablesVisionAndDrafts) {
  const std::vector<TensorSpec> tensors = demo_tensors(demo_model(false));
  std::map<int, int> other_tensors;  // by layer, -1 for the top
  std::size_t experts = 0;
  for (const TensorSpec& tensor : tensors) {
    const bool in_layer = tensor.name.rfind("layers.", 0) == 0;
    if (tensor.name.find(".experts.") != std::string::npos) {
      ++experts;
    } else {
      ++other_tensors[in_layer ? std::stoi(tensor.name.substr(7)) : -1];
    }
  }
  EXPECT_EQ(experts, 92160u);
  std::map<int, int> expected{{-1, 3}};
  for (int layer = 0; layer < 40; ++layer) expected[layer] = 30;
  expected[1] = 34;
  expected[2] = expected[8] = 38;
  expected[14] = 42;
  expected[20] = 37;
  for (const int layer : {24, 28, 32, 36}) expected[layer] = 33;
  EXPECT_EQ(other_tensors, expected);
  EXPECT_EQ(tensors.size(), 93414u);
}

TEST(DemoModel, KeepsWithinItsSizes) {
  EXPECT_GT(demo_checkpoint_bytes(demo_model(false)), 2'400'000'000);
  EXPECT_LT(demo_checkpoint_bytes(demo_model(false)), 2'500'000'000);
  EXPECT_LT(demo_checkpoint_bytes(demo_model(true)), 500'000'000);
  // Live storage of four ranks: experts padded from 384 to 512 rows, everything else four times.
  const DemoModel small = demo_model(true);
  const std::int64_t expert_bytes = std::int64_t{small.layers} * small.experts * 156'672;
  const std::int64_t live = std::int64_t{small.layers} * small.experts * 208'896 + 4 * (demo_checkpoint_bytes(small) - expert_bytes);
  EXPECT_LT(demo_checkpoint_bytes(small) + live, std::int64_t{1} << 30);
}

TEST(DemoModel, MakesEveryShapeDivide) {
  const std::vector<TensorSpec> tensors = demo_tensors(demo_model(false));
  std::map<std::string, const TensorSpec*> by_name;
  for (const TensorSpec& tensor : tensors) by_name[tensor.name] = &tensor;
  for (const TensorSpec& tensor : tensors) {
    if (tensor.name.size() < 7 || tensor.name.substr(tensor.name.size() - 6) != ".scale") continue;
    const auto weight = by_name.find(tensor.name.substr(0, tensor.name.size() - 5) + "weight");
    ASSERT_NE(weight, by_name.end()) << tensor.name;
    const bool packed = weight->second->dtype == Dtype::kI8;
    EXPECT_EQ(weight->second->shape[0], tensor.shape[0] * (packed ? 1 : 32)) << tensor.name;
    EXPECT_EQ(weight->second->shape[1] * (packed ? 2 : 1), tensor.shape[1] * 32) << tensor.name;
    EXPECT_GT(tensor.shape[0] * tensor.shape[1], 0) << tensor.name;
  }
}

TEST(DemoCheckpoint, OpensStrictlyWithConfigAndIndex) {
  const TempFolder folder;
  const DemoModel model = tiny_model();
  std::int64_t last = 0;
  const Status status = make_demo_checkpoint(folder.path() / "demo", model, [&](std::int64_t done, std::int64_t total) {
    EXPECT_EQ(total, demo_checkpoint_bytes(model));
    EXPECT_LE(done, total);
    last = std::max(last, done);
  });
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_GT(last, 0);
  const auto checkpoint = Checkpoint::open(folder.path() / "demo");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(checkpoint.value().files().size(), 4u);
  EXPECT_EQ(checkpoint.value().total_bytes(), demo_checkpoint_bytes(model));
  for (const TensorSpec& tensor : demo_tensors(model)) {
    const CheckpointTensor* found = checkpoint.value().find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->dtype, tensor.dtype);
    EXPECT_EQ(found->shape, tensor.shape);
  }
  const JsonValue* config = checkpoint.value().config();
  ASSERT_NE(config, nullptr);
  EXPECT_EQ(*config->find("architectures")->as_array()->at(0).as_string(), "DeepseekV41ForCausalLM");
  EXPECT_EQ(config->find("text_config")->find("hidden_size")->as_int64(), 256);
  EXPECT_EQ(config->find("text_config")->find("compress_ratios")->as_array()->size(), 3u);
  EXPECT_EQ(*config->find("quantization_config")->find("expert_dtype")->as_string(), "fp4");
}

TEST(DemoCheckpoint, FillsEveryTensorWithItsOwnBytesOfAllValues) {
  const TempFolder folder;
  ASSERT_TRUE(make_demo_checkpoint(folder.path() / "demo", tiny_model()).ok());
  const auto checkpoint = Checkpoint::open(folder.path() / "demo");
  ASSERT_TRUE(checkpoint.ok());
  std::set<std::string> contents;
  for (const CheckpointTensor& tensor : checkpoint.value().tensors()) {
    const auto bytes = checkpoint.value().bytes(tensor).value();
    std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (bytes.size() >= 8192) {
      EXPECT_EQ(std::set<char>(text.begin(), text.end()).size(), 256u) << tensor.name;
    }
    EXPECT_TRUE(contents.insert(std::move(text)).second) << tensor.name << " has the bytes of another tensor";
  }
}

TEST(DemoCheckpoint, IsTheSameEachTimeItIsMade) {
  const TempFolder folder;
  for (const char* name : {"one", "two"}) ASSERT_TRUE(make_demo_checkpoint(folder.path() / name, tiny_model()).ok());
  const auto one = Checkpoint::open(folder.path() / "one");
  const auto two = Checkpoint::open(folder.path() / "two");
  ASSERT_TRUE(one.ok() && two.ok());
  for (const CheckpointTensor& tensor : one.value().tensors()) {
    const auto a = one.value().bytes(tensor).value();
    const auto b = two.value().bytes(*two.value().find(tensor.name)).value();
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << tensor.name;
  }
}

TEST(DemoCheckpoint, IsMadeOnceAndKept) {
  const TempFolder folder;
  const auto dir = folder.path() / "demo";
  ASSERT_TRUE(make_demo_checkpoint(dir, tiny_model()).ok());
  const auto made = std::filesystem::last_write_time(dir / "config.json");
  ASSERT_TRUE(make_demo_checkpoint(dir, tiny_model(), [](std::int64_t, std::int64_t) { ADD_FAILURE() << "it is made again"; }).ok());
  EXPECT_EQ(std::filesystem::last_write_time(dir / "config.json"), made);
  EXPECT_TRUE(demo_checkpoint_exists(dir, tiny_model()));
}

TEST(DemoCheckpoint, ReplacesAnotherModelOfItsOwnAndNothingElse) {
  const TempFolder folder;
  const auto dir = folder.path() / "demo";
  ASSERT_TRUE(make_demo_checkpoint(dir, tiny_model()).ok());
  DemoModel other = tiny_model();
  other.seed = 7;
  EXPECT_FALSE(demo_checkpoint_exists(dir, other));
  ASSERT_TRUE(make_demo_checkpoint(dir, other).ok());
  EXPECT_TRUE(demo_checkpoint_exists(dir, other));

  const TempFolder precious;
  precious.write("thesis.txt", "years of work");
  EXPECT_EQ(make_demo_checkpoint(precious.path(), other).code(), Code::kInvalidArgument);
  EXPECT_TRUE(std::filesystem::exists(precious.path() / "thesis.txt"));
}

TEST(DemoCheckpoint, TakesOverWhatAKilledRunLeft) {
  const TempFolder folder;
  const auto dir = folder.path() / "demo";
  std::filesystem::create_directory(folder.path() / "demo.partial");
  folder.write("demo.partial/left.safetensors", "half");
  ASSERT_TRUE(make_demo_checkpoint(dir, tiny_model()).ok());
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "demo.partial"));
  EXPECT_FALSE(std::filesystem::exists(dir / "left.safetensors"));
}

TEST(DemoCheckpoint, IsWholeWhenSeveralMakeItAtOnce) {
  const TempFolder folder;
  const auto dir = folder.path() / "demo";
  std::vector<Status> results(4);
  {
    std::vector<std::jthread> threads;
    for (Status& result : results) threads.emplace_back([&] { result = make_demo_checkpoint(dir, tiny_model()); });
  }
  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.message();
  EXPECT_TRUE(Checkpoint::open(dir).ok());
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "demo.partial"));
}

TEST(DemoCheckpoint, LeavesNothingWhenAWriteFails) {
  const TempFolder folder;
  const auto dir = folder.path() / "demo";
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const Status status = make_demo_checkpoint(dir, tiny_model());
    ::_exit(status.native() == EFBIG && status.message().find("model-0000") != std::string::npos ? 0 : 1);
  }
  int exit_status = 0;
  ASSERT_EQ(::waitpid(child, &exit_status, 0), child);
  EXPECT_EQ(exit_status, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DemoCheckpoint, SaysWhatItNeedsWhenTheDiskIsTooSmall) {
  const TempFolder folder;
  DemoModel enormous = tiny_model();
  enormous.vocab = 2'000'000'000;  // 2 TB
  const Status status = make_demo_checkpoint(folder.path() / "demo", enormous);
  EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
  EXPECT_NE(status.message().find(std::to_string(demo_checkpoint_bytes(enormous) + (64 << 20))), std::string::npos) << status.message();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DemoValues, ChangeEveryByteFromVersionToVersion) {
  const std::vector<std::byte> base(1021, std::byte{0x5A});
  std::vector<std::byte> before = base;
  for (std::uint64_t version = 1; version <= 9; ++version) {
    std::vector<std::byte> now(base.size());
    apply_demo_version("layers.0.attn.wkv.weight", version, base, now.data());
    for (std::size_t o = 0; o < now.size(); ++o) {
      EXPECT_NE(now[o], before[o]) << version << " " << o;
      EXPECT_NE(now[o], base[o]) << version << " " << o;
    }
    before = now;
  }
}

TEST(DemoValues, AreWhatTheOracleSaysByteByByte) {
  std::vector<std::byte> base(77);
  for (std::size_t o = 0; o < base.size(); ++o) base[o] = static_cast<std::byte>(o * 7);
  for (const std::size_t bytes : {0u, 1u, 7u, 8u, 9u, 64u, 77u}) {
    for (const std::uint64_t version : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{1000}, ~std::uint64_t{0}}) {
      std::vector<std::byte> out(bytes);
      apply_demo_version("norm.weight", version, std::span(base).first(bytes), out.data());
      for (std::size_t o = 0; o < bytes; ++o) {
        const std::uint8_t expected = oracle::version_byte("norm.weight", version, o, std::to_integer<std::uint8_t>(base[o]));
        EXPECT_EQ(std::to_integer<std::uint8_t>(out[o]), expected) << version << " " << o;
        const auto mask = static_cast<std::byte>(demo_mask(demo_name_key("norm.weight"), version, o / 8) >> (8 * (o % 8)));
        EXPECT_EQ(out[o], base[o] ^ mask);
      }
    }
  }
}

TEST(DemoValues, ApplyInPlace) {
  std::vector<std::byte> bytes(40, std::byte{1});
  std::vector<std::byte> expected(40);
  apply_demo_version("a", 3, bytes, expected.data());
  apply_demo_version("a", 3, bytes, bytes.data());
  EXPECT_EQ(bytes, expected);
}

TEST(DemoCheckpoint, HasAPlaceForEveryTensorInTheOracle) {
  const TempFolder folder;
  ASSERT_TRUE(make_demo_checkpoint(folder.path() / "demo", tiny_model()).ok());
  const oracle::CheckpointBytes checkpoint(folder.path() / "demo");
  const oracle::OracleModel model = oracle::read_oracle_model(checkpoint, true);
  EXPECT_EQ(model.padded, 512u);
  EXPECT_EQ(oracle::read_oracle_model(checkpoint, false).padded, 384u);
  std::vector<std::vector<oracle::ExpectedStorage>> ranks;
  for (const std::uint64_t rank : {0u, 1u}) ranks.push_back(oracle::deepseek_v41_storages(checkpoint, model, rank, 2));
  EXPECT_EQ(oracle::wanted_wire_bytes(checkpoint, ranks), static_cast<std::uint64_t>(demo_checkpoint_bytes(tiny_model())));
  std::set<std::string> sources;
  for (const auto& storages : ranks) {
    for (const auto& storage : storages) sources.insert(storage.sources.begin(), storage.sources.end());
  }
  EXPECT_EQ(sources.size(), demo_tensors(tiny_model()).size());
}

}  // namespace
}  // namespace headrace
