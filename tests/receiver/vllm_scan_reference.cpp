#include "tests/receiver/vllm_scan_reference.h"

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

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

VllmLoader::VllmLoader(bool v41, int experts, std::set<std::string> params) : v41_(v41), params_(std::move(params)) {
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
  for (int e = 0; e < experts; ++e) {
    for (const std::string w : {"w1", "w2", "w3"}) {
      const std::string param = w == "w2" ? "experts.w2_" : "experts.w13_";
      mapping_.push_back({param, "experts." + std::to_string(e) + "." + w + ".", e, w});
    }
  }
}

std::pair<bool, std::string> VllmLoader::map(std::string name) const {
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
    if (ends_with(name, from)) name.replace(name.size() - from.size(), from.size(), to);
  }
  return {true, name};
}

LoaderAnswer VllmLoader::load(const std::string& original) const {
  const auto [kept, name] = map(original);
  if (!kept) return {LoaderAnswer::Kind::kDropped, "", "", -1};

  const auto plain = [&](std::string param, const std::string& shard) -> LoaderAnswer {
    if (params_.count(param) == 0 && has(param, ".")) {
      const std::size_t dot = param.rfind('.');
      param = param.substr(0, dot) + ".base_layer." + param.substr(dot + 1);
    }
    if (params_.count(param) == 0) return {};
    return {LoaderAnswer::Kind::kLoaded, param, shard, -1};
  };

  for (const auto& rule : stacked_) {
    if (has(name, ".experts.")) continue;
    if (!has(name, rule[1])) continue;
    return plain(str_replace(name, rule[1], rule[0]), rule[2]);
  }
  if (!has(name, ".experts.")) return plain(name, "");
  for (const Expert& entry : mapping_) {
    if (!has(name, entry.fragment)) continue;
    const std::string param = str_replace(name, entry.fragment, entry.param);
    if (params_.count(param) == 0) return {};
    return {LoaderAnswer::Kind::kLoaded, param, entry.shard, entry.id};
  }
  return {};
}

}  // namespace headrace::testing
