#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "receiver/models/family.h"
#include "tests/receiver/deepseek_inventory.h"

namespace headrace {
namespace {

using testing::replaced;

Result<ModelLayout> build(const std::string& config, const std::string& variant = "plain", std::int32_t ep = 1, std::int32_t rank = 0) {
  ModelRequest request;
  request.family = "deepseek_v4";
  request.variant = variant;
  request.parallel.ep = ep;
  request.rank = rank;
  return build_deepseek_v4(request, testing::json(config));
}

const StorageSpec& storage(const ModelLayout& layout, const std::string& name) {
  const auto found = std::find_if(layout.storages.begin(), layout.storages.end(), [&](const StorageSpec& s) { return s.name == name; });
  if (found == layout.storages.end()) throw std::runtime_error("no storage " + name);
  return *found;
}

const TensorRule& named(const ModelLayout& layout, const std::string& name) {
  const auto found = std::find_if(layout.named.begin(), layout.named.end(), [&](const NamedRule& r) { return r.name == name; });
  if (found == layout.named.end()) throw std::runtime_error("no rule " + name);
  return found->rule;
}

// --- What the family knows of ---

TEST(DeepseekV4, HasExactlyTheTextTensorsOfTheV41Inventory) {
  const ModelLayout layout = build(testing::v41_config(), "plain", 4, 1).value_or_throw();
  std::map<std::string, const TensorRule*> rules;
  for (const NamedRule& rule : layout.named) EXPECT_TRUE(rules.emplace(rule.name, &rule.rule).second) << rule.name;
  for (const ExpertRule& rule : layout.expert_rules) {
    for (int e = 0; e < 384; ++e) rules.emplace(rule.prefix + std::to_string(e) + "." + rule.suffix, &rule.rule);
  }
  EXPECT_EQ(rules.size(), 1254U + 92160U);
  std::size_t seen = 0;
  for (const testing::InventoryTensor& tensor : testing::v41_inventory()) {
    const bool outside = tensor.name.starts_with("mtp.") || tensor.name.starts_with("vision.") || tensor.name.starts_with("aligner.") ||
                         tensor.name.starts_with("image_") || tensor.name.find("engram.embed.") != std::string::npos;
    const auto found = rules.find(tensor.name);
    EXPECT_EQ(found == rules.end(), outside) << tensor.name;
    if (found == rules.end()) continue;
    ++seen;
    EXPECT_EQ(found->second->dtypes.front(), tensor.dtype) << tensor.name;
    EXPECT_EQ(found->second->shape, tensor.shape) << tensor.name;
  }
  EXPECT_EQ(seen, rules.size());
}

TEST(DeepseekV4, HasOneStorageForEachRuntimeParameterOfV41ButTheTables) {
  const ModelLayout layout = build(testing::v41_config(), "plain", 4).value_or_throw();
  std::set<std::string> expected;
  for (const std::string& name : testing::v41_runtime_params()) expected.insert(name);
  for (const std::string& name : testing::v41_table_params()) expected.erase(name);
  EXPECT_EQ(expected.size(), 1251U);
  std::set<std::string> actual;
  for (const StorageSpec& s : layout.storages) EXPECT_TRUE(actual.insert(s.name).second) << s.name;
  EXPECT_EQ(actual, expected);
}

TEST(DeepseekV4, CountsTheTensorsOfThePublishedV4Checkpoints) {
  // 29 tensors a layer, 4 for a compressor, 7 for an indexer with its own compressor, 6 at the top.
  const ModelLayout flash = build(testing::v4_flash_config()).value_or_throw();
  EXPECT_EQ(flash.named.size(), 43U * 29 + 41 * 4 + 21 * 7 + 6);
  EXPECT_EQ(flash.expert_rules.size() * 256, 66048U);
  const ModelLayout pro = build(testing::v4_pro_config()).value_or_throw();
  EXPECT_EQ(pro.named.size(), 2229U);
  EXPECT_EQ(pro.expert_rules.size() * 384, 140544U);
}

TEST(DeepseekV4, KnowsV4sHashLayersCompressorsAndHead) {
  const ModelLayout pro = build(testing::v4_pro_config()).value_or_throw();
  EXPECT_EQ(named(pro, "layers.2.ffn.gate.tid2eid").shape, (Shape{129280, 6}));
  EXPECT_EQ(named(pro, "layers.2.ffn.gate.tid2eid").dtypes.front(), Dtype::kI64);
  EXPECT_THROW(named(pro, "layers.2.ffn.gate.bias"), std::runtime_error);
  EXPECT_THROW(named(pro, "layers.3.ffn.gate.tid2eid"), std::runtime_error);
  EXPECT_THROW(named(pro, "layers.3.ffn.gate.bias_vl"), std::runtime_error);
  EXPECT_EQ(named(pro, "layers.3.ffn.gate.bias").param, "model.layers.3.ffn.gate.e_score_correction_bias");
  EXPECT_EQ(named(pro, "layers.0.attn.compressor.ape").shape, (Shape{128, 512}));
  EXPECT_EQ(named(pro, "layers.2.attn.compressor.ape").shape, (Shape{4, 1024}));
  EXPECT_EQ(named(pro, "layers.2.attn.compressor.wgate.weight").shape, (Shape{1024, 7168}));
  EXPECT_EQ(named(pro, "layers.60.attn.indexer.compressor.wkv.weight").shape, (Shape{256, 7168}));
  EXPECT_EQ(named(pro, "layers.60.attn.indexer.compressor.wkv.weight").param,
            "model.layers.60.attn.indexer.compressor.fused_wkv_wgate.weight");
  EXPECT_EQ(named(pro, "layers.60.attn.indexer.wq_b.scale").shape, (Shape{64, 12}));
  EXPECT_EQ(named(pro, "hc_head_fn").shape, (Shape{4, 28672}));
  EXPECT_EQ(named(pro, "hc_head_fn").param, "model.hc_head_fn");
  EXPECT_EQ(named(pro, "layers.0.attn.wo_a.scale").param, "model.layers.0.attn.wo_a.weight_scale_inv");
  EXPECT_EQ(named(pro, "layers.0.attn.wo_a.weight").shape, (Shape{16384, 4096}));
}

TEST(DeepseekV4, StacksProjectionsRowAfterRow) {
  const ModelLayout layout = build(testing::v41_config()).value_or_throw();
  const StorageSpec& fused = storage(layout, "model.layers.0.attn.fused_wqa_wkv.weight");
  EXPECT_EQ(fused.shape, (Shape{1792, 5120}));
  EXPECT_EQ(named(layout, "layers.0.attn.wq_a.weight").placements.at(0).copy, StridedCopy::flat(0, 0, 1280 * 5120));
  EXPECT_EQ(named(layout, "layers.0.attn.wkv.weight").placements.at(0).copy, StridedCopy::flat(0, 1280 * 5120, 512 * 5120));
  EXPECT_EQ(named(layout, "layers.0.attn.wkv.weight").shard, "1");
  EXPECT_EQ(named(layout, "layers.0.attn.wkv.scale").placements.at(0).copy, StridedCopy::flat(0, 40 * 160, 16 * 160));
  EXPECT_EQ(storage(layout, "model.layers.20.attn.compressor.fused_wkv_wgate.weight").shape, (Shape{512, 5120}));
  EXPECT_EQ(storage(layout, "model.layers.14.attn.compressor.fused_wkv_wgate.weight").shape, (Shape{1024, 5120}));
  EXPECT_EQ(named(layout, "layers.14.attn.compressor.wgate.weight").placements.at(0).copy,
            StridedCopy::flat(0, 2 * 512 * 5120, 2 * 512 * 5120));
}

TEST(DeepseekV4, HoldsScalesAsBytes) {
  const ModelLayout layout = build(testing::v41_config()).value_or_throw();
  EXPECT_EQ(storage(layout, "model.layers.0.attn.wo_b.weight_scale").dtype, Dtype::kU8);
  EXPECT_EQ(named(layout, "layers.0.attn.wo_b.scale").dtypes, (std::vector<Dtype>{Dtype::kF8E8M0, Dtype::kU8}));
  for (const ExpertRule& rule : layout.expert_rules) {
    const bool scale = rule.suffix.ends_with(".scale");
    EXPECT_EQ(rule.rule.dtypes, (scale ? std::vector<Dtype>{Dtype::kF8E8M0, Dtype::kU8} : std::vector<Dtype>{Dtype::kI8, Dtype::kU8}));
  }
}

TEST(DeepseekV4, ShapesTheExpertStoragesAsTheKernelHasThem) {
  const ModelLayout plain = build(testing::v41_config(), "plain", 4).value_or_throw();
  const std::string p = "model.layers.7.ffn.experts.";
  EXPECT_EQ(storage(plain, p + "w13_weight").shape, (Shape{96, 4608, 2560}));
  const ModelLayout padded = build(testing::v41_config(), "padded", 4).value_or_throw();
  EXPECT_EQ(storage(padded, p + "w13_weight").shape, (Shape{96, 5120, 2560}));
  EXPECT_EQ(storage(padded, p + "w13_weight").bytes, 96 * std::int64_t{13107200});
  EXPECT_EQ(storage(padded, p + "w13_weight_scale").shape, (Shape{96, 5120, 40}));
  EXPECT_EQ(storage(padded, p + "w13_weight_scale").strides, (std::vector<std::int64_t>{5120 * 40, 1, 5120}));
  EXPECT_EQ(storage(padded, p + "w13_weight_scale").bytes, 96 * std::int64_t{819200});
  EXPECT_EQ(storage(padded, p + "w2_weight").bytes, 96 * std::int64_t{6553600});
  EXPECT_EQ(storage(padded, p + "w2_weight_scale").strides, (std::vector<std::int64_t>{5120 * 20, 1, 5120}));
  EXPECT_EQ(storage(padded, p + "w2_weight_scale").bytes, 96 * std::int64_t{409600});
  EXPECT_TRUE(plain.constants.empty());
  EXPECT_EQ(padded.constants.size(), 4U * 40);
  EXPECT_TRUE(build(testing::v4_flash_config(), "padded").value_or_throw().constants.empty()) << "2048 is padded already";
}

// --- Every byte of every storage ---

/// All parts that write one storage, in terms of one slot, and the slot's size and step.
void prove_storages(const ModelLayout& layout) {
  std::vector<std::vector<LayoutPart>> parts(layout.storages.size());
  std::vector<std::int64_t> slot_stride(layout.storages.size(), 0);
  for (const NamedRule& rule : layout.named) {
    for (const Placement& p : rule.rule.placements) parts[p.storage].push_back({p.copy});
  }
  for (const ExpertRule& rule : layout.expert_rules) {
    for (const Placement& p : rule.rule.placements) {
      parts[p.storage].push_back({p.copy});
      slot_stride[p.storage] = p.slot_stride;
      const std::int64_t source = byte_count(rule.rule.dtypes.front(), rule.rule.shape).value();
      EXPECT_EQ(p.copy.src_bytes(), source) << rule.prefix << rule.suffix;
      EXPECT_TRUE(validate(p.copy, source, p.slot_stride).ok()) << rule.prefix << rule.suffix;
    }
  }
  const std::int64_t slots = layout.experts.front().local_slots();
  for (const ConstantRule& rule : layout.constants) {
    if (slot_stride[rule.storage] == 0) {
      parts[rule.storage].push_back({rule.copy, true});
      continue;
    }
    ASSERT_EQ(rule.copy.dims[0].count, slots);
    ASSERT_EQ(rule.copy.dims[0].dst_stride, slot_stride[rule.storage]);
    const auto inner = rule.copy.loops().subspan(1);
    parts[rule.storage].push_back({StridedCopy::make(0, rule.copy.dst_offset, rule.copy.run_bytes, inner), true});
  }
  std::set<std::string> proven;  // layers are alike: prove one storage of each leaf and size
  for (std::size_t s = 0; s < parts.size(); ++s) {
    const StorageSpec& spec = layout.storages[s];
    const std::size_t layer = spec.name.find("layers.");
    const std::string leaf = layer == std::string::npos ? spec.name : spec.name.substr(spec.name.find('.', layer + 7));
    if (!proven.insert(leaf + to_string(spec.shape)).second) continue;
    const bool expert = slot_stride[s] != 0;
    const std::int64_t slot_bytes = expert ? spec.bytes / slots : spec.bytes;
    const Status status = prove_layout(parts[s], slot_bytes, expert ? slots : 1, expert ? slot_stride[s] : slot_bytes, spec.bytes);
    EXPECT_TRUE(status.ok()) << spec.name << ": " << status.to_string();
  }
}

TEST(DeepseekV4, WritesEachByteOnceForV4Flash) {
  prove_storages(build(testing::v4_flash_config(), "plain", 4).value_or_throw());
}
TEST(DeepseekV4, WritesEachByteOnceForV4Pro) {
  prove_storages(build(testing::v4_pro_config(), "padded", 8).value_or_throw());
}
TEST(DeepseekV4, WritesEachByteOnceForV41Plain) {
  prove_storages(build(testing::v41_config(), "plain", 4).value_or_throw());
}
TEST(DeepseekV4, WritesEachByteOnceForV41Padded) {
  prove_storages(build(testing::v41_config(), "padded", 4).value_or_throw());
}
TEST(DeepseekV4, WritesEachByteOnceForTheDemo) {
  prove_storages(build(testing::v41_demo_config(), "plain", 4).value_or_throw());
  prove_storages(build(testing::v41_demo_config(), "padded", 4).value_or_throw());
}

using Bytes = std::vector<std::uint8_t>;

/// Carries out one nest, loop by loop.
void walk(const StridedCopy& copy, std::size_t dim, std::int64_t src, std::int64_t dst,
          const std::function<void(std::int64_t, std::int64_t)>& put) {
  if (dim == copy.dim_count) {
    for (std::int64_t b = 0; b < copy.run_bytes; ++b) put(src + b, dst + b);
    return;
  }
  for (std::int64_t i = 0; i < copy.dims[dim].count; ++i) {
    walk(copy, dim + 1, src + i * copy.dims[dim].src_stride, dst + i * copy.dims[dim].dst_stride, put);
  }
}

struct Widths {
  std::int64_t H;
  std::int64_t I;
  std::int64_t P;
};

std::int64_t D(std::int64_t i, std::int64_t u) {
  return ((i >> 3) << 4) | (u << 3) | (i & 7);
}
std::int64_t T(std::int64_t r) {
  return (r & ~std::int64_t{127}) | ((r & 31) << 2) | ((r >> 5) & 3);
}

/// The byte of its storage where byte (row, column) of an expert tensor belongs, at slot s.
std::int64_t place(const Widths& w, const std::string& suffix, std::int64_t s, std::int64_t row, std::int64_t column) {
  const std::int64_t u = suffix.starts_with("w3") ? 1 : 0;
  const std::int64_t g = column;
  if (suffix == "w2.weight") return (s * w.H + row) * (w.P / 2) + column;
  if (suffix == "w2.scale") return ((s * (w.P / 128) + (g >> 2)) * w.H + T(row)) * 4 + (g & 3);
  if (suffix.ends_with(".weight")) return (s * 2 * w.P + D(row, u)) * (w.H / 2) + column;
  return ((s * (w.H / 128) + (g >> 2)) * 2 * w.P + T(D(row, u))) * 4 + (g & 3);
}

void expect_expert_bytes(const Widths& w, const std::string& variant) {
  const std::int32_t slots = 3;
  const ModelLayout layout = build(testing::v41_tiny_config(static_cast<int>(w.H), static_cast<int>(w.I), slots), variant).value_or_throw();
  std::mt19937 random(7);
  std::vector<Bytes> live;
  std::vector<Bytes> expected;
  for (const StorageSpec& s : layout.storages) {
    live.emplace_back(static_cast<std::size_t>(s.bytes), 0xEE);  // left over from before
    expected.emplace_back(static_cast<std::size_t>(s.bytes), 0);
  }
  for (const ConstantRule& rule : layout.constants) {
    walk(rule.copy, 0, 0, rule.copy.dst_offset, [&](std::int64_t, std::int64_t to) {
      live[rule.storage].at(static_cast<std::size_t>(to)) = static_cast<std::uint8_t>(rule.constant >> (8 * (to % 4)));
    });
  }
  std::set<std::uint32_t> touched;
  for (const ExpertRule& rule : layout.expert_rules) {
    ASSERT_EQ(rule.rule.placements.size(), 1U);
    const Placement& p = rule.rule.placements[0];
    EXPECT_EQ(p.box, Box::whole(rule.rule.shape));
    touched.insert(p.storage);
    const std::int64_t columns = rule.rule.shape[1];
    for (std::int64_t s = 0; s < slots; ++s) {
      Bytes source(static_cast<std::size_t>(rule.rule.shape[0] * columns));
      for (std::uint8_t& byte : source) byte = static_cast<std::uint8_t>(random());
      walk(p.copy, 0, p.copy.src_offset, p.copy.dst_offset + s * p.slot_stride, [&](std::int64_t from, std::int64_t to) {
        live[p.storage].at(static_cast<std::size_t>(to)) = source.at(static_cast<std::size_t>(from));
      });
      for (std::int64_t o = 0; o < std::ssize(source); ++o) {
        expected[p.storage].at(static_cast<std::size_t>(place(w, rule.suffix, s, o / columns, o % columns))) =
            source[static_cast<std::size_t>(o)];
      }
    }
  }
  ASSERT_EQ(touched.size(), 4U);
  for (const std::uint32_t s : touched) EXPECT_TRUE(live[s] == expected[s]) << layout.storages[s].name << " H " << w.H << " I " << w.I;
}

TEST(DeepseekV4, PlacesExpertBytesAsTheFormulasSayWithoutPadding) {
  for (const Widths w : {Widths{128, 128, 128}, Widths{256, 384, 384}, Widths{384, 640, 640}}) expect_expert_bytes(w, "plain");
}

TEST(DeepseekV4, PlacesExpertBytesAsTheFormulasSayWithPadding) {
  for (const Widths w : {Widths{128, 128, 512}, Widths{256, 384, 512}, Widths{128, 512, 512}, Widths{256, 640, 1024}}) {
    expect_expert_bytes(w, "padded");
  }
}

// --- What it refuses ---

TEST(DeepseekV4, RefusesWidthsThatLeaveScalesUnwritten) {
  for (const std::string variant : {"plain", "padded"}) {
    const auto result = build(testing::v41_tiny_config(128, 320, 4), variant);
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
    EXPECT_NE(result.status().message().find("moe_intermediate_size 320 does not divide by 128"), std::string::npos);
  }
  EXPECT_NE(build(testing::v41_tiny_config(192, 128, 4)).status().message().find("hidden_size 192"), std::string::npos);
  EXPECT_NE(build(testing::v41_config(), "plain", 5).status().message().find("384"), std::string::npos);
  const auto block = build(replaced(testing::v41_config(), "\"q_lora_rank\":1280", "\"q_lora_rank\":1270"));
  EXPECT_NE(block.status().message().find("1270 does not divide by 32"), std::string::npos) << block.status().to_string();
}

TEST(DeepseekV4, NamesTheConfigKeyThatIsMissingOrOdd) {
  const auto message = [](const std::string& from, const std::string& to) {
    const auto result = build(replaced(testing::v41_config(), from, to));
    EXPECT_FALSE(result.ok()) << from;
    return result.ok() ? std::string() : result.status().message();
  };
  EXPECT_NE(message("\"hidden_size\":5120", "\"hidden\":5120").find("hidden_size is missing"), std::string::npos);
  EXPECT_NE(message("\"hidden_size\":5120", "\"hidden_size\":\"5120\"").find("hidden_size is of kind string"), std::string::npos);
  EXPECT_NE(message("\"hidden_size\":5120", "\"hidden_size\":0").find("hidden_size is 0"), std::string::npos);
  EXPECT_NE(message("\"hidden_size\":5120", "\"hidden_size\":-128").find("hidden_size is -128"), std::string::npos);
  EXPECT_NE(message("\"hidden_size\":5120", "\"hidden_size\":1e30").find("hidden_size"), std::string::npos);
  EXPECT_NE(message("\"kv_source_layer_ids\":[2,8,14,20]", "\"kv_source_layer_ids\":[2,40]").find("kv_source_layer_ids is 40"),
            std::string::npos);
  EXPECT_NE(message("\"num_hidden_layers\":40", "\"num_hidden_layers\":44").find("compress_ratios has 43 entries"), std::string::npos);
  EXPECT_NE(message("\"weight_block_size\":[32,32]", "\"weight_block_size\":[32,16]").find("weight_block_size"), std::string::npos);
  EXPECT_NE(message("\"expert_dtype\":\"fp4\"", "\"expert_dtype\":\"fp8\"").find("fp8"), std::string::npos);
  EXPECT_NE(message("\"vocab_size\":129280", "\"vocab_size\":null").find("vocab_size is missing or null"), std::string::npos);
}

// A few bytes of config.json must not cost gigabytes of names and maps.
TEST(DeepseekV4, RefusesMoreTensorsThanOneManifestMayName) {
  const std::string tiny = testing::v41_tiny_config(128, 128, 4);
  const auto experts = [&](int count, std::int32_t redundant) {
    ModelRequest request;
    request.redundant_experts = redundant;
    const std::string config = replaced(tiny, "\"n_routed_experts\":4", "\"n_routed_experts\":" + std::to_string(count));
    return build_deepseek_v4(request, testing::json(config)).status();
  };
  EXPECT_TRUE(experts(65536, 0).ok()) << experts(65536, 0).to_string();
  EXPECT_NE(experts(65536, 1 << 18).message().find("out of range"), std::string::npos) << experts(65536, 1 << 18).to_string();
  std::string deep = replaced(tiny, "\"n_routed_experts\":4", "\"n_routed_experts\":65536");
  deep = replaced(deep, "\"num_hidden_layers\":1", "\"num_hidden_layers\":40");
  std::string ratios = "\"compress_ratios\":[";
  for (int l = 0; l < 40; ++l) ratios += "0,";
  deep = replaced(deep, "\"compress_ratios\":[", ratios);
  const Status many = build_deepseek_v4({}, testing::json(deep)).status();
  EXPECT_EQ(many.code(), Code::kInvalidArgument);
  EXPECT_NE(many.message().find("more than 2097152 tensors"), std::string::npos) << many.to_string();
}

TEST(DeepseekV4, ConvertsNothing) {
  ModelRequest request;
  request.dtype = Dtype::kBF16;
  const auto built = build_deepseek_v4(request, testing::json(testing::v41_tiny_config(128, 128, 4)));
  EXPECT_EQ(built.status().code(), Code::kUnsupported);
  EXPECT_NE(built.status().message().find("kept as BF16"), std::string::npos) << built.status().to_string();
}

TEST(DeepseekV4, RefusesLayoutsThatItHasNot) {
  EXPECT_EQ(build(testing::v41_tiny_config(128, 128, 4), "plain", 2, 2).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace headrace
