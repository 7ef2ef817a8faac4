#include "receiver/weight_index.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <set>

#include "receiver/models/deepseek_v4_names.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/vllm_scan_reference.h"

namespace headrace {
namespace {

using testing::LoaderAnswer;
using testing::VllmLoader;

#ifdef HEADRACE_SANITIZED
constexpr std::size_t kEvery = 16;  // the reference scans over a thousand entries a name
#else
constexpr std::size_t kEvery = 1;
#endif

std::set<std::string> as_set(const std::vector<std::string>& list) {
  return {list.begin(), list.end()};
}

WeightIndex index_of(const std::string& config, std::int32_t ep, std::int32_t rank) {
  ModelRequest request;
  request.family = "deepseek_v4";
  request.parallel.ep = ep;
  request.rank = rank;
  return WeightIndex(build_deepseek_v4(request, testing::json(config)).value_or_throw());
}

/// The V4.1 index of one rank of four, the reference loader, and what the two must agree on.
class V41 : public ::testing::Test {
 protected:
  static constexpr std::int32_t kRank = 2;

  struct Shared {
    WeightIndex index = index_of(testing::v41_config(), 4, kRank);
    VllmLoader loader{true, 384, as_set(testing::v41_runtime_params())};
    std::set<std::string> tables = as_set(testing::v41_table_params());
    std::vector<testing::InventoryTensor> inventory = testing::v41_inventory();
    /// (param, shard) that tensors of the checkpoint go to.
    std::set<std::pair<std::string, std::string>> destinations;
  };
  static void SetUpTestSuite() {
    shared_ = new Shared;
    for (const auto& tensor : shared_->inventory) {
      if (tensor.name.find(".experts.") != std::string::npos && tensor.name.find(".experts.0.") == std::string::npos) continue;
      const LoaderAnswer answer = shared_->loader.load(tensor.name);
      if (answer.kind == LoaderAnswer::Kind::kLoaded) shared_->destinations.emplace(answer.param, answer.shard);
    }
  }
  static void TearDownTestSuite() {
    delete shared_;
    shared_ = nullptr;
  }

  /// Whether the index says of `name` what the loader does with it.
  static ::testing::AssertionResult agrees(const std::string& name) { return agrees(name, shared_->loader.load(name)); }
  static ::testing::AssertionResult agrees(const std::string& name, const LoaderAnswer& wanted) {
    const Resolution found = shared_->index.resolve(name);
    Resolution::Kind kind = Resolution::Kind::kUnknown;
    std::vector<std::int32_t> slots;
    if (wanted.kind == LoaderAnswer::Kind::kDropped || shared_->tables.contains(wanted.param)) {
      kind = Resolution::Kind::kDropped;
    } else if (wanted.kind == LoaderAnswer::Kind::kLoaded && shared_->destinations.contains({wanted.param, wanted.shard})) {
      const bool local = wanted.expert < 0 || wanted.expert / 96 == kRank;
      kind = local ? Resolution::Kind::kPlaced : Resolution::Kind::kNotLocal;
      if (local) slots.push_back(wanted.expert < 0 ? 0 : wanted.expert % 96);
    }
    const auto fail = [&](const std::string& what) {
      return ::testing::AssertionFailure() << "\"" << name.substr(0, 200) << "\" (" << name.size() << " bytes): " << what
                                           << "; loader says " << static_cast<int>(wanted.kind) << " " << wanted.param.substr(0, 200) << " "
                                           << wanted.shard << " " << wanted.expert;
    };
    if (found.kind != kind) return fail("kind " + std::to_string(static_cast<int>(found.kind)));
    if (kind == Resolution::Kind::kDropped || kind == Resolution::Kind::kUnknown) return ::testing::AssertionSuccess();
    const TensorRule& rule = shared_->index.rule(found.rule);
    // A tensor that is a whole parameter has no shard in either.
    if (rule.param != wanted.param || rule.shard != wanted.shard) return fail("rule " + rule.param + " " + rule.shard);
    if (found.expert != wanted.expert) return fail("expert " + std::to_string(found.expert));
    if (!std::equal(found.slots.begin(), found.slots.end(), slots.begin(), slots.end())) return fail("slots");
    return ::testing::AssertionSuccess();
  }

  static Shared* shared_;
};
V41::Shared* V41::shared_ = nullptr;

TEST_F(V41, InventoryIsThePublishedOne) {
  std::int64_t bytes = 0;
  std::map<Dtype, int> dtypes;
  std::set<std::string> names;
  for (const auto& tensor : shared_->inventory) {
    bytes += byte_count(tensor.dtype, tensor.shape).value();
    ++dtypes[tensor.dtype];
    names.insert(tensor.name);
  }
  EXPECT_EQ(names.size(), 96085U);
  EXPECT_EQ(shared_->inventory.size(), 96085U);
  EXPECT_EQ(bytes, 510'286'023'000);
  EXPECT_EQ(dtypes[Dtype::kI8], 47232);
  EXPECT_EQ(dtypes[Dtype::kF8E8M0], 47589);
  EXPECT_EQ(dtypes[Dtype::kF8E4M3], 357);
  EXPECT_EQ(dtypes[Dtype::kBF16], 520);
  EXPECT_EQ(dtypes[Dtype::kF32], 387);
}

TEST_F(V41, AgreesWithTheLoaderOnEveryNameOfTheCheckpoint) {
  int dropped = 0;
  int kept = 0;
  std::set<std::string> params;
  for (std::size_t i = 0; i < shared_->inventory.size(); i += kEvery) {
    const std::string& name = shared_->inventory[i].name;
    const LoaderAnswer answer = shared_->loader.load(name);
    ASSERT_NE(answer.kind, LoaderAnswer::Kind::kRefused) << name;
    answer.kind == LoaderAnswer::Kind::kDropped ? ++dropped : ++kept;
    if (answer.kind == LoaderAnswer::Kind::kLoaded) params.insert(answer.param);
    ASSERT_TRUE(agrees(name, answer));
  }
  if (kEvery != 1) return;
  EXPECT_EQ(dropped, 2667);
  EXPECT_EQ(kept, 93418);
  EXPECT_EQ(params.size(), 1255U);
  EXPECT_EQ(std::count_if(params.begin(), params.end(), [](const std::string& p) { return p.find(".experts.") != std::string::npos; }),
            160);
}

TEST_F(V41, FastPathAnswersAsItsOwnScanDoes) {
  const NameScan& scan = shared_->index.layout().scan;
  for (std::size_t i = 0; i < shared_->inventory.size(); i += 13 * kEvery) {
    const std::string& name = shared_->inventory[i].name;
    const ScanAnswer answer = scan(name);
    const Resolution found = shared_->index.resolve(name);
    if (answer.kind != ScanAnswer::Kind::kParam) {
      ASSERT_EQ(found.kind, Resolution::Kind::kDropped) << name;
      continue;
    }
    ASSERT_EQ(answer.param, shared_->index.rule(found.rule).param) << name;
    ASSERT_EQ(answer.shard, shared_->index.rule(found.rule).shard) << name;
    ASSERT_EQ(answer.expert, found.expert) << name;
  }
}

TEST_F(V41, AgreesWithTheLoaderOnOtherSpellings) {
  for (const std::string name :
       {"model.layers.3.ffn.experts.200.w1.weight", "layers.3.ffn.experts.200.w1.weight_scale", "model.layers.3.ffn.experts.7.w2.scale",
        "model.layers.0.attn.wq_a.weight", "model.layers.0.attn.wkv.weight_scale", "layers.0.attn.wo_b.weight_scale",
        "model.embed_tokens.weight", "model.embed.weight", "model.norm.weight", "model.layers.5.ffn.gate.e_score_correction_bias",
        "layers.5.ffn.shared_experts.down_proj.weight", "model.layers.5.ffn.shared_experts.w2.weight_scale"}) {
    EXPECT_TRUE(agrees(name));
    const Resolution::Kind kind = shared_->index.resolve(name).kind;
    EXPECT_TRUE(kind == Resolution::Kind::kPlaced || kind == Resolution::Kind::kNotLocal) << name;
  }
}

TEST_F(V41, KnowsNoStackedParameterAlreadyPutTogether) {
  const std::string name = "model.layers.0.attn.fused_wqa_wkv.weight";
  EXPECT_EQ(shared_->loader.load(name).kind, LoaderAnswer::Kind::kLoaded);
  EXPECT_EQ(shared_->loader.load(name).shard, "");
  EXPECT_EQ(shared_->index.resolve(name).kind, Resolution::Kind::kUnknown);
}

TEST_F(V41, DropsEngramTablesAsOutOfScope) {
  for (const std::string name : {"layers.1.engram.embed.weight", "layers.14.engram.embed.scale"}) {
    EXPECT_EQ(shared_->index.resolve(name).kind, Resolution::Kind::kDropped);
    EXPECT_EQ(shared_->loader.load(name).kind, LoaderAnswer::Kind::kLoaded);
  }
  EXPECT_EQ(shared_->index.resolve("layers.2.engram.embed.weight").kind, Resolution::Kind::kUnknown);
}

TEST_F(V41, AgreesWithTheLoaderOnAdversarialNames) {
  const std::string nul(1, '\0');
  std::vector<std::string> names{
      "", ".", "..", "experts", "experts.", ".experts.", "layers", "layers.", "layers.3", "layers.3.ffn.experts.", "w1", "scale", ".scale",
      // digits inside longer numbers, leading zeros, signs, ids out of range
      "layers.3.ffn.experts.1111.w1.weight", "layers.3.ffn.experts.0011.w1.weight", "layers.3.ffn.experts.011.w1.weight",
      "layers.3.ffn.experts.00.w1.weight", "layers.3.ffn.experts.383.w1.weight", "layers.3.ffn.experts.384.w1.weight",
      "layers.3.ffn.experts.-1.w1.weight", "layers.3.ffn.experts.+1.w1.weight", "layers.3.ffn.experts. 1.w1.weight",
      "layers.3.ffn.experts.1 .w1.weight", "layers.3.ffn.experts.1e1.w1.weight", "layers.3.ffn.experts.0x1.w1.weight",
      "layers.3.ffn.experts.4294967297.w1.weight", "layers.3.ffn.experts.18446744073709551617.w1.weight",
      "layers.03.ffn.experts.11.w1.weight", "layers.40.ffn.experts.11.w1.weight", "layers.33.ffn.experts.11.w1.weight",
      "xlayers.3.ffn.experts.11.w1.weight", "layers.3.ffn.1experts.11.w1.weight", "layers.3.ffn.experts1.w1.weight",
      "layers.3.ffn.experts..w1.weight", "layers.3.ffn.experts.1.1.w1.weight",
      // two `experts.`
      "layers.3.ffn.experts.5.w1.experts.6.w1.weight", "layers.3.ffn.experts.6.w1.experts.5.w1.weight",
      "layers.3.ffn.experts.5.w1.experts.5.w1.weight", "layers.3.ffn.experts.experts.5.w1.weight",
      "layers.3.experts.5.w1.ffn.experts.5.w1.weight", "experts.5.w1.layers.3.ffn.experts.7.w1.weight",
      "layers.3.ffn.experts.w13_experts.5.w1.weight", "layers.3.ffn.experts.5.w1.w1.weight", "layers.3.ffn.experts.5.w1.w2.weight",
      // base_layer forms
      "layers.3.ffn.experts.5.w1.base_layer.weight", "layers.3.ffn.experts.5.w1.base_layer.scale",
      "layers.3.ffn.experts.base_layer.5.w1.weight", "layers.0.attn.wq_a.base_layer.weight", "layers.0.attn.wq_a.base_layer.scale",
      "layers.0.attn.wo_b.base_layer.weight", "embed.base_layer.weight", "base_layer.embed.weight",
      // scales
      "layers.3.ffn.experts.5.w1.scale.scale", "layers.3.ffn.experts.5.w1.weight.scale", "layers.3.ffn.experts.5.w4.scale",
      "layers.3.ffn.experts.5.w1.weight_scale_inv", "layers.3.ffn.experts.5.w1.scale\n", "layers.3.ffn.experts.5.w1.weight\n",
      "layers.0.attn.wo_b.scale\n", "layers.0.attn.wo_b.scale.", "layers.0.attn.wo_bscale", "layers.0.attn.wo_b.weight_scale.scale",
      "layers.0.attn.q_norm.scale", "engram.embed.scale", "layers.1.xengram.embed.scale", "layers.1.engram.embed.scale.scale",
      "layers.1.engram.embed_tokens.weight", "layers.1.engram.embed_tokens.scale", "layers.1.engram.embed.weight.__rows_0",
      // parameters named directly
      "model.layers.3.ffn.experts.w13_weight", "layers.3.ffn.experts.w2_weight_scale", "layers.0.ffn.shared_experts.gate_up_proj.weight",
      // lookalikes
      "layers.3.ffn.shared_experts.5.w1.weight", "layers.3.ffn.shared_experts.w1.w1.weight", "layers.3.ffn.shared_experts.w4.weight",
      "layers.3.ffn.shared_experts.w13.weight", "layers.3.ffn.sharedexperts.w1.weight", "layers.3.ffn.shared_experts.w2w2.weight",
      "layers.3.ffn.shared_experts.experts.5.w1.weight", "layers.5.ffn.gate.bias_vl", "layers.5.ffn.gate.bias_vl.bias",
      "layers.5.ffn.gate.bias", "layers.5.ffn.gate.bias.", "layers.5.ffn.gate.biases", "layers.5.attn.compressor.wkv.weight",
      "layers.20.attn.compressor.wgate.weight", "layers.20.attn.compressor.wkv.weight", "layers.5.attn.attn_sink.weight", "head.weight",
      "lm_head.weight", "xhead.weight", "embed.embed.weight", "embed_tokens.weight", "norm.norm.weight", "hc_head_fn",
      "layers.layers.3.ffn.experts.5.w1.weight", "model.model.norm.weight",
      // dropped substrings anywhere
      "mtp.0.ffn.experts.5.w1.weight", "layers.3.mtp.0", "xmtp.", "mtp", "mtp_0.weight", "vision.", "television.x", "aligner.w1.weight",
      "image_start", "ximage_", "layers.3.ffn.experts.5.w1.weight.image_", "mtp.engram.embed.scale", "layers.3.ffn.mtp.experts.5.w1.weight",
      // trailing dots, NUL, unicode
      "layers.3.ffn.experts.5.w1.weight.", "layers.3.ffn.experts.5.w1.weight..", ".layers.3.ffn.experts.5.w1.weight",
      "layers.3.ffn.experts.5.w1.", "layers.3.ffn.experts.5.w1", "layers.3.ffn.experts.5.", "layers.3.ffn.experts.5",
      "layers.3.ffn.experts.5.w1.weight" + nul, "layers.3.ffn.experts.5" + nul + ".w1.weight", nul, "head.weight" + nul,
      nul + "head.weight", "layers.3.ffn.experts.\xEF\xBC\x95.w1.weight", "layers.3.ffn.experts.\xEF\xBC\x95.w1.scale",
      "layers.3.ffn.experts.\xD9\xA5.w1.scale", "layers.\xEF\xBC\x93.ffn.experts.5.w1.weight", "layers.3.ffn.experts.5\xCC\x81.w1.weight",
      "\xFF\xFE", "layers.3.ffn.\xD0\xB5xperts.5.w1.weight"};
  for (const std::string& name : names) EXPECT_TRUE(agrees(name));
}

std::string repeat(const std::string& part, std::size_t bytes) {
  std::string text;
  while (text.size() < bytes) text += part;
  return text;
}

TEST_F(V41, AgreesWithTheLoaderOnNamesOf64KiBInBoundedTime) {
  constexpr std::size_t kLong = 65536;
  const std::clock_t begin = std::clock();  // processor time: a busy machine must not fail the test
  for (const std::string& name :
       {std::string(kLong, 'a'), std::string(kLong, '.'), std::string(kLong, '1'), repeat("experts.", kLong), repeat(".experts.1", kLong),
        repeat("1.", kLong), "layers.3.ffn.experts." + std::string(kLong, '1') + ".w1.weight",
        "layers.3.ffn.experts." + std::string(kLong, '0') + "5.w1.scale", "layers.3.ffn." + repeat("experts.", kLong) + "5.w1.weight",
        repeat("layers.3.ffn.experts.5.w1.", kLong) + "weight", repeat(".experts.5.w1", kLong) + ".scale",
        repeat("layers.0.attn.wq_a.", kLong) + "weight", repeat("mt", kLong) + "mtp.", repeat(".scale", kLong)}) {
    EXPECT_TRUE(agrees(name));
    EXPECT_EQ(shared_->index.nearest(name, 3).size(), 3U);
  }
  // The scan is a thousand searches of 64 KiB; anything that grows with the square of the name would take minutes.
  EXPECT_LT((std::clock() - begin) / CLOCKS_PER_SEC, 60);
}

/// A name of the checkpoint with a few random edits.
std::string mutated(std::string name) {
  static const std::vector<std::string> kPieces{"experts.",
                                                ".experts.",
                                                "0",
                                                "11",
                                                ".",
                                                "w1",
                                                ".w2.",
                                                "w3",
                                                ".scale",
                                                ".weight",
                                                "layers.",
                                                "model.",
                                                "mtp.",
                                                "_scale",
                                                "base_layer.",
                                                "image_",
                                                "\n",
                                                "shared_",
                                                "attn.wkv",
                                                "attn.",
                                                ".ffn.gate.bias",
                                                "_vl",
                                                "384",
                                                "embed.",
                                                "head.weight",
                                                "w13_",
                                                "-",
                                                std::string(1, '\0'),
                                                "\xEF\xBC\x91",
                                                "compressor.wkv",
                                                "engram."};
  const int edits = *rc::gen::inRange(0, 4);
  for (int i = 0; i < edits; ++i) {
    const auto at = *rc::gen::inRange<std::size_t>(0, name.size() + 1);
    const auto length = *rc::gen::inRange<std::size_t>(0, std::min<std::size_t>(name.size() - at, 9) + 1);
    switch (*rc::gen::inRange(0, 4)) {
      case 0: name.insert(at, *rc::gen::elementOf(kPieces)); break;
      case 1: name.erase(at, length); break;
      case 2: name.insert(at, name.substr(at, length)); break;
      case 3: name.replace(at, length, *rc::gen::elementOf(kPieces)); break;
      default: break;
    }
  }
  return name;
}

TEST_F(V41, AgreesWithTheLoaderOnMutatedNames) {
  // Half of the names are no experts, which are few among all.
  std::vector<std::string> others;
  for (const auto& tensor : shared_->inventory) {
    if (tensor.name.find(".experts.") == std::string::npos) others.push_back(tensor.name);
  }
  EXPECT_TRUE(rc::check([&] {
    for (int i = 0; i < 100; ++i) {
      const bool expert = *rc::gen::arbitrary<bool>();
      const std::size_t pick = *rc::gen::inRange<std::size_t>(0, expert ? shared_->inventory.size() : others.size());
      const std::string name = mutated(expert ? shared_->inventory[pick].name : others[pick]);
      const ::testing::AssertionResult result = agrees(name);
      if (!result) RC_FAIL(result.message());
    }
  }));
}

TEST(WeightIndexOfV4, AgreesWithTheLoaderOnEveryExpertName) {
  struct Model {
    std::string config;
    int layers;
    int experts;
    int ep;
  };
  for (const Model& model : {Model{testing::v4_flash_config(), 43, 256, 4}, Model{testing::v4_pro_config(), 61, 384, 8}}) {
    const int rank = model.ep - 1;
    const int local = model.experts / model.ep;
    const WeightIndex index = index_of(model.config, model.ep, rank);
    const VllmLoader loader(false, model.experts, as_set(testing::expert_params(model.layers)));
    const std::vector<std::string> names = testing::expert_names(model.layers, model.experts);
    EXPECT_EQ(names.size(), model.layers == 43 ? 66048U : 140544U);
    for (std::size_t i = 0; i < names.size(); i += kEvery) {
      const LoaderAnswer wanted = loader.load(names[i]);
      const Resolution found = index.resolve(names[i]);
      ASSERT_EQ(wanted.kind, LoaderAnswer::Kind::kLoaded) << names[i];
      ASSERT_EQ(index.rule(found.rule).param, wanted.param) << names[i];
      ASSERT_EQ(index.rule(found.rule).shard, wanted.shard) << names[i];
      ASSERT_EQ(found.expert, wanted.expert) << names[i];
      ASSERT_EQ(found.kind, wanted.expert / local == rank ? Resolution::Kind::kPlaced : Resolution::Kind::kNotLocal) << names[i];
      if (found.kind != Resolution::Kind::kPlaced) continue;
      ASSERT_EQ(found.slots.size(), 1U) << names[i];
      ASSERT_EQ(found.slots[0], wanted.expert % local) << names[i];
    }
  }
}

TEST(WeightIndexOfV4, SpellsScalesAndTheHeadAsV4Does) {
  const WeightIndex index = index_of(testing::v4_flash_config(), 4, 0);
  const auto param = [&](std::string_view name) {
    const Resolution found = index.resolve(name);
    return found.kind == Resolution::Kind::kPlaced ? index.rule(found.rule).param : std::string();
  };
  EXPECT_EQ(param("layers.9.attn.wkv.scale"), "model.layers.9.attn.fused_wqa_wkv.weight_scale_inv");
  EXPECT_EQ(param("model.layers.9.attn.wkv.weight_scale_inv"), "model.layers.9.attn.fused_wqa_wkv.weight_scale_inv");
  EXPECT_EQ(param("layers.9.attn.wkv.weight_scale"), "");
  EXPECT_EQ(param("hc_head_base"), "model.hc_head_base");
  EXPECT_EQ(param("model.hc_head_base"), "model.hc_head_base");
  EXPECT_EQ(param("layers.0.ffn.gate.tid2eid"), "model.layers.0.ffn.gate.tid2eid");
  EXPECT_EQ(param("layers.0.ffn.experts.3.w2.scale"), "model.layers.0.ffn.experts.w2_weight_scale");
}

TEST(WeightIndex, FindsEveryReplicaOfAnExpert) {
  ModelRequest request;
  ModelLayout layout = build_deepseek_v4(request, testing::json(testing::v41_tiny_config(128, 128, 4))).value_or_throw();
  layout.experts[0] = ExpertMap::from_physical(4, {3, 1, 3, 0, 2, 2, 2, 2}, {0, 1, 2, 3}).value_or_throw();
  const WeightIndex index(std::move(layout));
  const Resolution three = index.resolve("layers.0.ffn.experts.3.w1.weight");
  EXPECT_EQ(std::vector<std::int32_t>(three.slots.begin(), three.slots.end()), (std::vector<std::int32_t>{0, 2}));
  EXPECT_EQ(index.resolve("layers.0.ffn.experts.2.w1.weight").kind, Resolution::Kind::kNotLocal);
}

// The fallback only matters where modules are LoRA-wrapped, which this family's own parameters never are.
TEST(DeepseekV4Scan, FallsBackToTheWrappedModuleForStackedAndPlainNames) {
  const std::vector<std::string> params{"model.layers.0.attn.fused_wqa_wkv.base_layer.weight", "model.layers.0.attn.wo_b.base_layer.weight",
                                        "model.layers.0.attn.wq_b.weight", "model.layers.0.attn.wq_b.base_layer.weight",
                                        "model.layers.0.ffn.experts.base_layer.w13_weight"};
  const NameScan scan =
      deepseek_v4_scan({.experts = 4, .linear_scale = "weight_scale", .hc_head = false}, {params.begin(), params.end()}, {});
  const VllmLoader loader(true, 4, as_set(params));
  for (const std::string name :
       {"layers.0.attn.wq_a.weight", "layers.0.attn.wkv.weight", "layers.0.attn.wo_b.weight", "layers.0.attn.wq_b.weight",
        "layers.0.attn.wo_a.weight", "layers.0.ffn.experts.1.w1.weight", "layers.0.attn.wo_b.base_layer.weight"}) {
    const ScanAnswer mine = scan(name);
    const LoaderAnswer wanted = loader.load(name);
    EXPECT_EQ(mine.kind == ScanAnswer::Kind::kParam, wanted.kind == LoaderAnswer::Kind::kLoaded) << name;
    EXPECT_EQ(mine.param, wanted.param) << name;
    EXPECT_EQ(mine.shard, wanted.shard) << name;
    EXPECT_EQ(mine.expert, wanted.expert) << name;
  }
  EXPECT_EQ(scan("layers.0.attn.wkv.weight").param, "model.layers.0.attn.fused_wqa_wkv.base_layer.weight");
  EXPECT_EQ(scan("layers.0.attn.wq_b.weight").param, "model.layers.0.attn.wq_b.weight");
}

// No parameter of a real model has such a name, so only made-up ones tell one replacement from all.
TEST(DeepseekV4Scan, ReplacesEveryOccurrenceOfAPart) {
  const std::vector<std::string> params{"attn.fused_wqa_wkv.attn.fused_wqa_wkv.weight", "x.experts.w13_y.experts.w13_weight",
                                        "a.shared_experts.down_proj.b.shared_experts.down_proj.weight"};
  const NameScan scan =
      deepseek_v4_scan({.experts = 4, .linear_scale = "weight_scale", .hc_head = false}, {params.begin(), params.end()}, {});
  EXPECT_EQ(scan("attn.wkv.attn.wkv.weight").param, params[0]);
  EXPECT_EQ(scan("x.experts.3.w3.y.experts.3.w3.weight").param, params[1]);
  EXPECT_EQ(scan("x.experts.3.w3.y.experts.2.w3.weight").kind, ScanAnswer::Kind::kUnknown);
  EXPECT_EQ(scan("a.shared_experts.w2.b.shared_experts.w2.weight").param, params[2]);
}

TEST(WeightIndex, ListsWhatARankNeedsAndNothingElse) {
  const WeightIndex index = index_of(testing::v41_config(), 4, 1);
  const std::vector<std::string> target{"target"};
  const auto needed = index.needed(target);
  EXPECT_EQ(needed.size(), 1254U + 23040U);
  std::set<std::string> names;
  for (const WeightIndex::Needed& need : needed) {
    names.insert(need.name);
    const Resolution found = index.resolve(need.name);
    ASSERT_EQ(found.kind, Resolution::Kind::kPlaced) << need.name;
    ASSERT_EQ(found.rule, need.rule) << need.name;
    ASSERT_EQ(found.expert, need.expert) << need.name;
    if (need.expert >= 0) {
      ASSERT_EQ(need.expert / 96, 1) << need.name;
    }
  }
  EXPECT_EQ(names.size(), needed.size());
  EXPECT_FALSE(names.contains("layers.1.engram.embed.weight"));
  EXPECT_TRUE(index.needed(std::vector<std::string>{"draft"}).empty());
  EXPECT_TRUE(index.needed({}).empty());
}

TEST(WeightIndex, SuggestsTheNameThatWasMeant) {
  const WeightIndex index = index_of(testing::v41_config(), 4, 0);
  const auto best = [&](std::string_view name) { return index.nearest(name, 1).at(0); };
  EXPECT_EQ(best("layers.3.ffn.experts.17.w1.wieght"), "layers.3.ffn.experts.17.w1.weight");
  EXPECT_EQ(best("layers.3.ffn.expert.17.w2.scale"), "layers.3.ffn.experts.17.w2.scale");
  EXPECT_EQ(best("layers.12.attn.wq_c.weight"), "layers.12.attn.wq_a.weight");
  EXPECT_EQ(best("heads.weight"), "head.weight");
  EXPECT_EQ(best("layers.5.ffn.gate.bias_v"), "layers.5.ffn.gate.bias_vl");
  EXPECT_EQ(index.nearest("", 2).size(), 2U);
  EXPECT_TRUE(index.nearest("x", 0).empty());
}

}  // namespace
}  // namespace headrace
