#include "tests/receiver/vllm_scan_reference.h"

#include <map>
#include <optional>

namespace headrace::testing {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Python's str.replace.
std::string str_replace(std::string text, const std::string& from, const std::string& to) {
  std::size_t at = 0;
  while ((at = text.find(from, at)) != std::string::npos) {
    text.replace(at, from.size(), to);
    at += to.size();
  }
  return text;
}

/// Bytes of one decimal digit at `at`, as \d of a Python str takes it: ASCII, full-width or Arabic-Indic here; 0 for anything else.
std::size_t digit_at(const std::string& text, std::size_t at) {
  if (at < text.size() && text[at] >= '0' && text[at] <= '9') return 1;
  if (text.compare(at, 2, "\xEF\xBC") == 0 && at + 2 < text.size()) {
    const auto last = static_cast<unsigned char>(text[at + 2]);
    if (last >= 0x90 && last <= 0x99) return 3;
  }
  if (text.compare(at, 1, "\xD9") == 0 && at + 1 < text.size()) {
    const auto last = static_cast<unsigned char>(text[at + 1]);
    if (last >= 0xA0 && last <= 0xA9) return 2;
  }
  return 0;
}

/// `$` of a Python expression: the end, or before a newline that ends the text.
bool at_end(const std::string& text, std::size_t at) {
  return at == text.size() || (at + 1 == text.size() && text[at] == '\n');
}

/// Replaces a final "<literal>.scale" by "<literal><to>".
std::optional<std::string> sub_literal_scale(const std::string& text, const std::string& literal, const std::string& to) {
  const std::string pattern = literal + ".scale";
  for (std::size_t at = text.find(pattern); at != std::string::npos; at = text.find(pattern, at + 1)) {
    if (!at_end(text, at + pattern.size())) continue;
    std::string result = text;
    return result.replace(at, pattern.size(), literal + to);
  }
  return std::nullopt;
}

/// (\.experts\.\d+\.w[123]<middle>)\.scale$ -> \1.weight_scale, tried from every place of the text.
std::string sub_expert_scale(const std::string& text, const std::string& middle) {
  const std::string start = ".experts.";
  for (std::size_t from = text.find(start); from != std::string::npos; from = text.find(start, from + 1)) {
    std::size_t at = from + start.size();
    std::size_t digits = 0;
    while (const std::size_t bytes = digit_at(text, at)) {
      at += bytes;
      ++digits;
    }
    if (digits == 0 || text.compare(at, 2, ".w") != 0) continue;
    at += 2;
    if (at >= text.size() || (text[at] != '1' && text[at] != '2' && text[at] != '3')) continue;
    ++at;
    if (text.compare(at, middle.size(), middle) != 0) continue;
    at += middle.size();
    const std::string end = ".scale";
    if (text.compare(at, end.size(), end) != 0 || !at_end(text, at + end.size())) continue;
    return text.substr(0, at) + ".weight_scale" + text.substr(at + end.size());
  }
  return text;
}

}  // namespace

VllmLoader::VllmLoader(bool v41, int experts, std::set<std::string> params, Kind kind)
    : v41_(v41), kind_(kind), params_(std::move(params)) {
  substrings_ = {{".shared_experts.w2", ".shared_experts.down_proj"}};
  dropped_ = {"mtp.", "vision.", "aligner.", "image_"};
  prefixes_ = {{"layers.", "model.layers."}, {"embed.", "model.embed."}, {"norm.", "model.norm."}};
  if (!v41) prefixes_.emplace_back("hc_head", "model.hc_head");
  suffixes_ = {
      {"head.weight", "lm_head.weight"}, {"embed.weight", "embed_tokens.weight"}, {".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"}};
  stacked_ = {{"gate_up_proj", "w1", "0"},
              {"gate_up_proj", "w3", "1"},
              {"attn.fused_wqa_wkv", "attn.wq_a", "0"},
              {"attn.fused_wqa_wkv", "attn.wkv", "1"},
              {"compressor.fused_wkv_wgate", "compressor.wkv", "0"},
              {"compressor.fused_wkv_wgate", "compressor.wgate", "1"}};
  if (kind == Kind::kImages) {
    dropped_ = {"mtp."};
    prefixes_ = {{"layers.", "language_model.model.layers."},
                 {"embed.", "language_model.model.embed."},
                 {"norm.", "language_model.model.norm."},
                 {"head.", "language_model.head."}};
  }
  if (kind == Kind::kSglang) {
    stacked_[0][1] = "gate_proj";
    stacked_[1][1] = "up_proj";
  }
  const std::map<std::string, std::string> sglang_names{{"w1", "gate_proj"}, {"w2", "down_proj"}, {"w3", "up_proj"}};
  for (int e = 0; e < experts; ++e) {
    for (const std::string w : {"w1", "w2", "w3"}) {
      const std::string param = w == "w2" ? "experts.w2_" : "experts.w13_";
      const std::string in_name = kind == Kind::kSglang ? sglang_names.at(w) : w;
      mapping_.push_back({param, "experts." + std::to_string(e) + "." + in_name + ".", e, w});
    }
  }
}

std::pair<bool, std::string> VllmLoader::map_draft(const std::string& name) const {
  // ^mtp\.(\d+)\.(.*)$
  std::size_t at = 4;
  while (at < name.size() && name[at] >= '0' && name[at] <= '9') ++at;
  if (name.compare(0, 4, "mtp.") != 0 || at == 4 || at >= name.size() || name[at] != '.') return {false, ""};
  const std::string stage = name.substr(4, at - 4);
  std::string rest = name.substr(at + 1);
  rest = sub_expert_scale("." + rest, ".base_layer").substr(1);
  rest = sub_expert_scale("." + rest, "").substr(1);
  if (const auto other = sub_literal_scale(rest, "", v41_ ? ".weight_scale" : ".weight_scale_inv")) rest = *other;
  if (rest.compare(0, 18, "markov_head.embed.") == 0) return {true, "draft.model.markov_head.markov_w1." + rest.substr(18)};
  if (rest.compare(0, 17, "markov_head.head.") == 0) return {true, "draft.model.markov_head.markov_w2." + rest.substr(17)};
  for (const std::string whole : {"main_proj.", "main_norm.", "norm.", "markov_head.", "confidence_head."}) {
    if (rest.compare(0, whole.size(), whole) == 0) return {true, "draft.model." + rest};
  }
  std::string mapped = "draft.model.layers." + stage + "." + str_replace(rest, ".shared_experts.w2", ".shared_experts.down_proj");
  if (mapped.ends_with(".ffn.gate.bias")) mapped.replace(mapped.size() - 4, 4, "e_score_correction_bias");
  return {true, mapped};
}

std::pair<bool, std::string> VllmLoader::map_sglang(std::string name) const {
  for (const std::string& part : dropped_) {
    if (has(name, part)) return {false, ""};
  }
  if (name.ends_with(".scale") && !name.ends_with("engram.embed.scale")) name = name.substr(0, name.size() - 5) + "weight_scale_inv";
  for (const auto& [from, to] : prefixes_) {
    if (name.compare(0, from.size(), from) == 0) name.replace(0, from.size(), to);
  }
  const Rules parts{{".attn.", ".self_attn."},
                    {".ffn.", ".mlp."},
                    {".attn_norm.", ".input_layernorm."},
                    {".ffn_norm.", ".post_attention_layernorm."},
                    {".gate.tid2eid", ".topk.tid2eid"},
                    {".gate.bias", ".gate.e_score_correction_bias"},
                    {".w1.", ".gate_proj."},
                    {".w2.", ".down_proj."},
                    {".w3.", ".up_proj."}};
  for (const auto& [from, to] : parts) name = str_replace(name, from, to);
  if (name.ends_with("head.weight")) name = name.substr(0, name.size() - 11) + "lm_head.weight";
  if (name.ends_with("model.embed.weight")) name = name.substr(0, name.size() - 12) + "embed_tokens.weight";
  return {true, name};
}

std::pair<bool, std::string> VllmLoader::map(std::string name) const {
  if (kind_ == Kind::kDraft) return map_draft(name);
  if (kind_ == Kind::kSglang) return map_sglang(name);
  name = sub_expert_scale(name, ".base_layer");
  name = sub_expert_scale(name, "");
  if (const auto table = sub_literal_scale(name, "engram.embed", "_tokens.weight_scale_inv")) name = *table;
  if (const auto other = sub_literal_scale(name, "", v41_ ? ".weight_scale" : ".weight_scale_inv")) name = *other;
  for (const auto& [from, to] : substrings_) name = str_replace(name, from, to);
  for (const std::string& part : dropped_) {
    if (has(name, part)) return {false, ""};
  }
  for (const auto& [from, to] : prefixes_) {
    if (name.compare(0, from.size(), from) == 0) name.replace(0, from.size(), to);
  }
  for (const auto& [from, to] : suffixes_) {
    if (name.ends_with(from)) name.replace(name.size() - from.size(), from.size(), to);
  }
  return {true, name};
}

LoaderAnswer VllmLoader::load(const std::string& original) const {
  const auto [kept, name] = map(original);
  if (!kept) return {LoaderAnswer::Kind::kDropped, "", "", -1};
  if (kind_ != Kind::kImages) return load_mapped(name, "");
  // The outer model hands what begins with its member's name to that member, without it; the image parts take their tensors as they are.
  const std::string member = "language_model.";
  if (name.compare(0, member.size(), member) == 0) return load_mapped(name.substr(member.size()), member);
  if (params_.count(name) == 0) return {};
  return {LoaderAnswer::Kind::kLoaded, name, "", -1};
}

LoaderAnswer VllmLoader::load_mapped(const std::string& name, const std::string& root) const {
  const auto plain = [&](std::string param, const std::string& shard) -> LoaderAnswer {
    if (params_.count(root + param) == 0 && has(param, ".")) {
      const std::size_t dot = param.rfind('.');
      param = param.substr(0, dot) + ".base_layer." + param.substr(dot + 1);
    }
    if (params_.count(root + param) == 0) return {};
    return {LoaderAnswer::Kind::kLoaded, root + param, shard, -1};
  };

  for (const auto& rule : stacked_) {
    if (has(name, ".experts.")) continue;
    if (kind_ == Kind::kDraft && name.compare(0, 19, "draft.model.layers.") != 0) continue;
    if (!has(name, rule[1])) continue;
    return plain(str_replace(name, rule[1], rule[0]), rule[2]);
  }
  if (!has(name, ".experts.")) return plain(name, "");
  for (const Expert& entry : mapping_) {
    if (!has(name, entry.fragment)) continue;
    const std::string param = root + str_replace(name, entry.fragment, entry.param);
    if (params_.count(param) == 0) return {};
    return {LoaderAnswer::Kind::kLoaded, param, entry.shard, entry.id};
  }
  return {};
}

}  // namespace headrace::testing
