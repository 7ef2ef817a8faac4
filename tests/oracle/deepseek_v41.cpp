#include "tests/oracle/deepseek_v41.h"

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace headrace::oracle {
namespace {

using Bytes = std::vector<std::uint8_t>;
using View = std::span<const std::uint8_t>;

void expect_size(View bytes, std::uint64_t expected, const char* what) {
  if (bytes.size() != expected) {
    throw std::runtime_error(std::string(what) + ": expected " + std::to_string(expected) + " bytes, found " +
                             std::to_string(bytes.size()));
  }
}

void expect_divides(std::uint64_t divisor, std::uint64_t number, const char* what) {
  if (number == 0 || number % divisor != 0) {
    throw std::runtime_error(std::string(what) + " " + std::to_string(number) + " is no multiple of " + std::to_string(divisor));
  }
}

/// Row of the interleaved L1 matrix that holds row i of the gate (u = 0) or the up (u = 1) projection: turns of 8 rows, gate first.
std::uint64_t D(std::uint64_t i, std::uint64_t u) {
  return ((i >> 3) << 4) | (u << 3) | (i & 7);
}

/// Place of row r among the scale words: within each 128 rows, 4 x 32 becomes 32 x 4.
std::uint64_t T(std::uint64_t r) {
  return (r & ~std::uint64_t{127}) | ((r & 31) << 2) | ((r >> 5) & 3);
}

/// Where each source byte goes, told to `put(destination byte, source byte)`; used once to fill, once to prove that nothing is hit twice.
template <class Put>
void l1_weight_bytes(const OracleModel& m, std::uint64_t u, const Put& put) {
  for (std::uint64_t i = 0; i < m.moe_intermediate; ++i) {
    const std::uint64_t row = D(i, u) * (m.hidden / 2);
    for (std::uint64_t c = 0; c < m.hidden / 2; ++c) put(row + c, i * (m.hidden / 2) + c);
  }
}

template <class Put>
void l1_scale_bytes(const OracleModel& m, std::uint64_t u, const Put& put) {
  for (std::uint64_t i = 0; i < m.moe_intermediate; ++i) {
    const std::uint64_t place = T(D(i, u));
    for (std::uint64_t g = 0; g < m.hidden / 32; ++g) put(((g >> 2) * 2 * m.padded + place) * 4 + (g & 3), i * (m.hidden / 32) + g);
  }
}

template <class Put>
void l2_weight_bytes(const OracleModel& m, const Put& put) {
  for (std::uint64_t h = 0; h < m.hidden; ++h) {
    for (std::uint64_t c = 0; c < m.moe_intermediate / 2; ++c) put(h * (m.padded / 2) + c, h * (m.moe_intermediate / 2) + c);
  }
}

template <class Put>
void l2_scale_bytes(const OracleModel& m, const Put& put) {
  for (std::uint64_t h = 0; h < m.hidden; ++h) {
    for (std::uint64_t g = 0; g < m.moe_intermediate / 32; ++g) {
      put(((g >> 2) * m.hidden + T(h)) * 4 + (g & 3), h * (m.moe_intermediate / 32) + g);
    }
  }
}

/// Proves on one slot that no byte is written twice and none outside, for the counts that `walk` makes.
template <class Walk>
void prove_slot(const char* what, std::uint64_t slot_bytes, std::uint64_t payload_bytes, const Walk& walk) {
  std::vector<std::uint8_t> hits(slot_bytes, 0);
  std::uint64_t written = 0;
  walk([&](std::uint64_t to, std::uint64_t) {
    if (to >= slot_bytes || hits[to]++ != 0)
      throw std::runtime_error(std::string(what) + ": byte " + std::to_string(to) + " is written wrongly");
    ++written;
  });
  if (written != payload_bytes) throw std::runtime_error(std::string(what) + ": " + std::to_string(written) + " bytes are written");
}

void prove_model(const OracleModel& m) {
  expect_divides(128, m.hidden, "hidden");
  expect_divides(128, m.moe_intermediate, "moe_intermediate");
  expect_divides(128, m.padded, "padded");
  if (m.padded < m.moe_intermediate) throw std::runtime_error("padded is less than moe_intermediate");
  const std::uint64_t w1 = m.moe_intermediate * m.hidden / 2;
  prove_slot("w13_weight", m.padded * m.hidden, 2 * w1, [&](const auto& put) {
    l1_weight_bytes(m, 0, put);
    l1_weight_bytes(m, 1, put);
  });
  prove_slot("w13_weight_scale", m.padded * m.hidden / 16, 2 * w1 / 16, [&](const auto& put) {
    l1_scale_bytes(m, 0, put);
    l1_scale_bytes(m, 1, put);
  });
  prove_slot("w2_weight", m.hidden * m.padded / 2, w1, [&](const auto& put) { l2_weight_bytes(m, put); });
  prove_slot("w2_weight_scale", m.hidden * m.padded / 32, w1 / 16, [&](const auto& put) { l2_scale_bytes(m, put); });
}

std::string expert_name(std::uint64_t layer, std::uint64_t expert, const char* part) {
  return "layers." + std::to_string(layer) + ".ffn.experts." + std::to_string(expert) + "." + part;
}

using SlotRule = std::function<Bytes(const std::vector<Bytes>&)>;

/// One expert storage: a slot for each of the rank's experts, made by `rule` of the tensors `parts` of the expert.
ExpectedStorage expert_storage(const CheckpointBytes& checkpoint, std::uint64_t layer, const std::string& leaf, std::uint64_t slot_bytes,
                               const std::vector<const char*>& parts, std::uint64_t first_expert, std::uint64_t slots,
                               const SlotRule& rule) {
  ExpectedStorage storage;
  storage.name = "model.layers." + std::to_string(layer) + ".ffn.experts." + leaf;
  storage.bytes = slots * slot_bytes;
  for (std::uint64_t slot = 0; slot < slots; ++slot) {
    std::vector<const CheckpointBytes::Tensor*> tensors;
    for (const char* part : parts) {
      const CheckpointBytes::Tensor& tensor = checkpoint.at(expert_name(layer, first_expert + slot, part));
      tensors.push_back(&tensor);
      storage.sources.push_back(tensor.name);
      storage.source_bytes += tensor.bytes.size();
    }
    storage.pieces.push_back({slot_bytes, [tensors, rule](std::uint64_t version) {
                                std::vector<Bytes> sources;
                                sources.reserve(tensors.size());
                                for (const CheckpointBytes::Tensor* tensor : tensors) sources.push_back(version_bytes(*tensor, version));
                                return rule(sources);
                              }});
  }
  return storage;
}

/// Replaces the first `from` by `to`; false when there is none.
bool replace(std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  if (at == std::string::npos) return false;
  text.replace(at, from.size(), to);
  return true;
}

bool is_routed_expert(const std::string& name) {
  return name.find(".ffn.experts.") != std::string::npos;
}

ExpectedStorage stacked_storage(const std::string& name, const std::map<int, const CheckpointBytes::Tensor*>& shards) {
  ExpectedStorage storage;
  storage.name = name;
  for (const auto& [shard, tensor] : shards) {
    storage.sources.push_back(tensor->name);
    storage.bytes += tensor->bytes.size();
    storage.pieces.push_back({tensor->bytes.size(), [source = tensor](std::uint64_t version) { return version_bytes(*source, version); }});
  }
  storage.source_bytes = storage.bytes;
  return storage;
}

/// The sinks of as many heads as the attention kernel takes, 64 or 128; those that the model has not are minus infinity.
void pad_sinks(ExpectedStorage& storage) {
  const std::uint64_t kernel = storage.bytes <= 64 * 4 ? 64 * 4 : 128 * 4;
  if (storage.bytes > kernel) throw std::runtime_error(storage.name + ": more heads than the kernel takes");
  const std::uint64_t pad = kernel - storage.bytes;
  storage.bytes = kernel;
  if (pad == 0) return;
  storage.pieces.push_back({pad, [pad](std::uint64_t) {
                              Bytes bytes;
                              while (bytes.size() < pad) bytes.insert(bytes.end(), {0x00, 0x00, 0x80, 0xFF});
                              return bytes;
                            }});
}

void add_experts(const CheckpointBytes& checkpoint, const OracleModel& m, std::uint64_t layer, std::uint64_t first, std::uint64_t slots,
                 std::vector<ExpectedStorage>& out) {
  out.push_back(expert_storage(checkpoint, layer, "w13_weight", m.padded * m.hidden, {"w1.weight", "w3.weight"}, first, slots,
                               [m](const std::vector<Bytes>& w) { return l1_weight_slot(m, w[0], w[1]); }));
  out.push_back(expert_storage(checkpoint, layer, "w13_weight_scale", m.padded * m.hidden / 16, {"w1.scale", "w3.scale"}, first, slots,
                               [m](const std::vector<Bytes>& w) { return l1_scale_slot(m, w[0], w[1]); }));
  out.push_back(expert_storage(checkpoint, layer, "w2_weight", m.hidden * m.padded / 2, {"w2.weight"}, first, slots,
                               [m](const std::vector<Bytes>& w) { return l2_weight_slot(m, w[0]); }));
  out.push_back(expert_storage(checkpoint, layer, "w2_weight_scale", m.hidden * m.padded / 32, {"w2.scale"}, first, slots,
                               [m](const std::vector<Bytes>& w) { return l2_scale_slot(m, w[0]); }));
}

}  // namespace

OracleModel read_oracle_model(const CheckpointBytes& checkpoint, bool padded) {
  std::ifstream file(checkpoint.dir() / "config.json");
  const nlohmann::json config = nlohmann::json::parse(file);
  const nlohmann::json& text = config.at("text_config");
  OracleModel model;
  model.hidden = text.at("hidden_size").get<std::uint64_t>();
  model.moe_intermediate = text.at("moe_intermediate_size").get<std::uint64_t>();
  model.padded = padded ? (model.moe_intermediate + 511) / 512 * 512 : model.moe_intermediate;
  model.experts = text.at("n_routed_experts").get<std::uint64_t>();
  model.layers = text.at("num_hidden_layers").get<std::uint64_t>();
  return model;
}

Bytes l1_weight_slot(const OracleModel& m, View w1, View w3) {
  Bytes slot(m.padded * m.hidden, 0);
  for (std::uint64_t u = 0; u < 2; ++u) {
    const View source = u == 0 ? w1 : w3;
    expect_size(source, m.moe_intermediate * m.hidden / 2, "w1 or w3 weight");
    l1_weight_bytes(m, u, [&slot, source](std::uint64_t to, std::uint64_t from) { slot[to] = source[from]; });
  }
  return slot;
}

Bytes l1_scale_slot(const OracleModel& m, View w1, View w3) {
  Bytes slot(m.padded * m.hidden / 16, 0);
  for (std::uint64_t u = 0; u < 2; ++u) {
    const View source = u == 0 ? w1 : w3;
    expect_size(source, m.moe_intermediate * m.hidden / 32, "w1 or w3 scale");
    l1_scale_bytes(m, u, [&slot, source](std::uint64_t to, std::uint64_t from) { slot[to] = source[from]; });
  }
  return slot;
}

Bytes l2_weight_slot(const OracleModel& m, View w2) {
  Bytes slot(m.hidden * m.padded / 2, 0);
  expect_size(w2, m.hidden * m.moe_intermediate / 2, "w2 weight");
  l2_weight_bytes(m, [&slot, w2](std::uint64_t to, std::uint64_t from) { slot[to] = w2[from]; });
  return slot;
}

Bytes l2_scale_slot(const OracleModel& m, View w2) {
  Bytes slot(m.hidden * m.padded / 32, 0);
  expect_size(w2, m.hidden * m.moe_intermediate / 32, "w2 scale");
  l2_scale_bytes(m, [&slot, w2](std::uint64_t to, std::uint64_t from) { slot[to] = w2[from]; });
  return slot;
}

RuntimePlace runtime_place(const std::string& checkpoint_name) {
  std::string name = checkpoint_name;
  if (name.ends_with(".scale")) name.replace(name.size() - 5, 5, "weight_scale");
  replace(name, ".shared_experts.w2.", ".shared_experts.down_proj.");
  if (name.rfind("layers.", 0) == 0) name = "model." + name;
  if (name.ends_with(".ffn.gate.bias")) name.replace(name.size() - 4, 4, "e_score_correction_bias");
  if (name == "embed.weight") name = "model.embed_tokens.weight";
  if (name == "norm.weight") name = "model.norm.weight";
  if (name == "head.weight") name = "lm_head.weight";
  for (const int shard : {0, 1}) {
    if (replace(name, shard == 0 ? ".shared_experts.w1." : ".shared_experts.w3.", ".shared_experts.gate_up_proj.") ||
        replace(name, shard == 0 ? ".attn.wq_a." : ".attn.wkv.", ".attn.fused_wqa_wkv.") ||
        replace(name, shard == 0 ? ".compressor.wkv." : ".compressor.wgate.", ".compressor.fused_wkv_wgate.")) {
      return {name, shard};
    }
  }
  return {name, 0};
}

std::vector<ExpectedStorage> deepseek_v41_storages(const CheckpointBytes& checkpoint, const OracleModel& model, std::uint64_t rank,
                                                   std::uint64_t ep) {
  prove_model(model);
  if (ep == 0 || rank >= ep || model.experts % ep != 0) throw std::runtime_error("the experts do not divide over the ranks");
  const std::uint64_t slots = model.experts / ep;
  std::vector<ExpectedStorage> storages;
  for (std::uint64_t layer = 0; layer < model.layers; ++layer) add_experts(checkpoint, model, layer, rank * slots, slots, storages);

  std::map<std::string, std::map<int, const CheckpointBytes::Tensor*>> others;
  std::uint64_t expert_tensors = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (is_routed_expert(name)) {
      ++expert_tensors;
      continue;
    }
    const RuntimePlace place = runtime_place(name);
    if (!others[place.name].emplace(place.shard, &tensor).second) throw std::runtime_error(name + ": its place is taken");
  }
  // This rank's were found by name above; an odd count tells of a tensor that only calls itself an expert's.
  if (expert_tensors != model.layers * model.experts * 6) {
    throw std::runtime_error(std::to_string(expert_tensors) + " tensors of routed experts, expected 6 for each");
  }
  for (const auto& [name, shards] : others) {
    storages.push_back(stacked_storage(name, shards));
    if (name.ends_with(".attn_sink")) pad_sinks(storages.back());
  }
  return storages;
}

}  // namespace headrace::oracle
