#include "receiver/models/deepseek_v4_config.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <utility>

#include "receiver/models/config_reader.h"

namespace headrace {
namespace {

// Far above any model; the shared experts' width, with the bytes of two sizes, stays in 64 bits.
constexpr std::int64_t kLayersMax = 4096;
constexpr std::int64_t kExpertsMax = 1 << 16;
constexpr std::int64_t kSharedExpertsMax = 1 << 10;

constexpr const char* kModel = "deepseek_v4";

void read_sizes(ConfigReader& reader, DeepseekV4Config& config) {
  config.hidden = reader.size({"hidden_size"});
  config.layers = reader.integer("num_hidden_layers", 1, kLayersMax);
  config.intermediate = reader.size({"moe_intermediate_size"});
  config.experts = reader.integer("n_routed_experts", 1, kExpertsMax);
  config.experts_per_token = reader.integer("num_experts_per_tok", 1, config.experts);
  config.shared_experts = reader.integer("n_shared_experts", 1, kSharedExpertsMax);
  config.vocab = reader.size({"vocab_size"});
  config.heads = reader.size({"num_attention_heads"});
  config.head_dim = reader.size({"head_dim"});
  config.q_lora = reader.size({"q_lora_rank"});
  config.o_lora = reader.size({"o_lora_rank"});
  config.o_groups = reader.size({"o_groups"});
  config.index_heads = reader.size({"index_n_heads"});
  config.index_dim = reader.size({"index_head_dim"});
  config.hc_mult = reader.integer("hc_mult", 1, 64);
}

void read_layer_lists(ConfigReader& reader, DeepseekV4Config& config) {
  config.compress_ratios = reader.list("compress_ratios", 0, ConfigReader::kSizeMax);
  if (std::cmp_less(config.compress_ratios.size(), config.layers)) {
    reader.fail(fmt::format("compress_ratios has {} entries for num_hidden_layers {}", config.compress_ratios.size(), config.layers));
  }
  if (!config.v41) {
    config.hash_layers = reader.integer_or("num_hash_layers", 0, 0, config.layers);
    return;
  }
  config.kv_sources = reader.list("kv_source_layer_ids", 0, config.layers - 1);
  config.index_sources = reader.list("index_source_layer_ids", 0, config.layers - 1);
  config.engram_layers = reader.list_or_empty("engram_layer_ids", 0, config.layers - 1);
  if (config.engram_layers.empty()) return;
  // One hash column per head and n-gram size, sizes from 2 up.
  const std::int64_t ngram_sizes = reader.integer("engram_max_ngram_size", 2, 64) - 1;
  config.engram_width = ngram_sizes * reader.integer("engram_n_heads", 1, 4096) * reader.integer("engram_head_dim", 1, 1 << 16);
}

void read_expert_format(ConfigReader& reader, const JsonValue& quantization, DeepseekV4Config& config) {
  const JsonValue* expert_dtype = quantization.find("expert_dtype");
  if (expert_dtype == nullptr) expert_dtype = reader.find("expert_dtype");
  const std::string* name = expert_dtype == nullptr ? nullptr : expert_dtype->as_string();
  if (name == nullptr) {
    reader.fail("expert_dtype is missing or no string");
  } else if (*name == "bf16") {
    config.expert_format = DeepseekV4ExpertFormat::kBf16;
  } else if (*name != "fp4") {
    reader.fail(fmt::format("expert_dtype is {}, the family has fp4 and bf16", *name), Code::kUnsupported);
  }
  const JsonValue* algorithm = quantization.find("moe_quant_algo");
  if (algorithm == nullptr || algorithm->is_null()) return;
  const std::string* algorithm_name = algorithm->as_string();
  if (algorithm_name == nullptr || *algorithm_name != "NVFP4") {
    reader.fail(fmt::format("quantization_config.moe_quant_algo is {}, the family has NVFP4",
                            algorithm_name == nullptr ? algorithm->kind() : std::string_view(*algorithm_name)),
                Code::kUnsupported);
    return;
  }
  config.expert_format = DeepseekV4ExpertFormat::kNvfp4;
  const JsonValue* ignore = quantization.find("ignore");
  if (ignore == nullptr || ignore->is_null()) return;
  const JsonValue::Array* patterns = ignore->as_array();
  if (patterns == nullptr) {
    reader.fail(fmt::format("quantization_config.ignore is of kind {}, expected an array", ignore->kind()));
    return;
  }
  for (const JsonValue& pattern : *patterns) {
    if (const std::string* text = pattern.as_string()) config.not_nvfp4.push_back(*text);
  }
}

void read_quantization(ConfigReader& reader, DeepseekV4Config& config) {
  const JsonValue* quantization = reader.find("quantization_config");
  if (quantization == nullptr) {
    reader.fail("quantization_config is missing or null");
    return;
  }
  const std::vector<std::int64_t> sizes = reader.weight_block();
  if (sizes.empty()) {
    reader.fail("quantization_config.weight_block_size is missing or null");
    return;
  }
  if (sizes[0] != sizes[1]) {
    reader.fail("quantization_config.weight_block_size is no pair of equal sizes", Code::kUnsupported);
    return;
  }
  config.block = sizes[0];

  read_expert_format(reader, *quantization, config);
  config.linear_scale = config.block == 32 ? "weight_scale" : "weight_scale_inv";
}

}  // namespace

std::string_view to_string(DeepseekV4ExpertFormat format) {
  switch (format) {
    case DeepseekV4ExpertFormat::kMxfp4: return "fp4";
    case DeepseekV4ExpertFormat::kNvfp4: return "nvfp4";
    case DeepseekV4ExpertFormat::kBf16: return "bf16";
  }
  return "";
}

DeepseekV4ExpertFormat DeepseekV4Config::expert_format_of(const std::string& prefix) const {
  if (expert_format != DeepseekV4ExpertFormat::kNvfp4) return expert_format;
  const std::string name = prefix + "ffn.experts";
  const bool ignored = std::any_of(not_nvfp4.begin(), not_nvfp4.end(),
                                   [&](const std::string& pattern) { return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0; });
  return ignored ? DeepseekV4ExpertFormat::kMxfp4 : expert_format;
}

std::string model_type_of(const JsonValue& config) {
  const JsonValue* type = config.find("model_type");
  const std::string* name = type == nullptr ? nullptr : type->as_string();
  return name == nullptr ? std::string() : *name;
}

bool is_deepseek_v4(std::string_view model_type) {
  return model_type == "deepseek_v4" || model_type == "deepseek_v41" || model_type == "deepseek_v41_text";
}

Result<DeepseekV4Config> read_deepseek_v4_config(const JsonValue& json) {
  ConfigReader reader(json, kModel);
  const std::string type = model_type_of(json);
  if (!is_deepseek_v4(type)) {
    reader.fail(fmt::format("model_type is \"{}\", expected deepseek_v4 or deepseek_v41", type));
    return reader.status();
  }
  DeepseekV4Config config;
  config.v41 = type != "deepseek_v4";
  read_sizes(reader, config);
  read_layer_lists(reader, config);
  read_quantization(reader, config);
  if (!reader.status().ok()) return reader.status();
  return config;
}

Result<DeepseekV4Draft> read_deepseek_v4_draft(const JsonValue& json) {
  ConfigReader reader(json, kModel);
  if (model_type_of(json) == "deepseek_v4" || reader.find("dspark_target_layer_ids") == nullptr) {
    reader.fail("scope draft: a draft of DeepSeek-V4.1 (dspark_target_layer_ids) is what the family has", Code::kUnsupported);
    return reader.status();
  }
  DeepseekV4Draft draft;
  draft.stages = reader.integer("num_nextn_predict_layers", 1, kLayersMax);
  draft.targets = std::ssize(reader.list("dspark_target_layer_ids", 0, kLayersMax));
  draft.markov_rank = reader.size({"dspark_markov_rank"});
  // 0 or absent: as many as the target has.
  draft.experts = reader.integer_or("dspark_n_routed_experts", 0, 0, kExpertsMax);
  if (draft.experts == 0) draft.experts = reader.integer("n_routed_experts", 1, kExpertsMax);
  if (draft.targets == 0) reader.fail("dspark_target_layer_ids is empty");
  if (!reader.status().ok()) return reader.status();
  return draft;
}

Result<DeepseekV4Vision> read_deepseek_v4_vision(const JsonValue& json) {
  ConfigReader reader(json, kModel, "vision_config");
  if (json.find("text_config") == nullptr || json.find("vision_config") == nullptr) {
    reader.fail("scope vision: there is no text_config beside a vision_config", Code::kUnsupported);
    return reader.status();
  }
  DeepseekV4Vision vision;
  vision.blocks = reader.integer("num_hidden_layers", 1, kLayersMax);
  vision.width = reader.size({"hidden_size"});
  vision.intermediate = reader.size({"intermediate_size"});
  vision.patch = reader.integer("patch_size", 1, 1 << 10);
  vision.downsample = reader.integer("downsample_ratio", 1, 1 << 10);
  if (!reader.status().ok()) return reader.status();
  return vision;
}

}  // namespace headrace
