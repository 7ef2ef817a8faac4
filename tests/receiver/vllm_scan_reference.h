#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

/// The engine's weight loader as it reads: rename by lists of rules, then try every stacked rule and every expert in turn. Slow and plain.
/// Written from the description of the loader alone; shares nothing with receiver/.
namespace headrace::testing {

struct LoaderAnswer {
  enum class Kind { kDropped, kRefused, kLoaded } kind = Kind::kRefused;
  std::string param;
  std::string shard;  // "" for a whole parameter
  int expert = -1;
  bool operator==(const LoaderAnswer&) const = default;
};

class VllmLoader {
 public:
  /// Whose loader: the text model's; that of the model that sees images and holds the text model; the draft's, whose parameters are told
  /// from the target's by "draft."; and SGLang's text model.
  enum class Kind { kText, kImages, kDraft, kSglang };

  /// `v41`: block-scaled linears call their scale weight_scale and there is no hc_head; else weight_scale_inv.
  VllmLoader(bool v41, int experts, std::set<std::string> params, Kind kind = Kind::kText);

  LoaderAnswer load(const std::string& name) const;
  /// The name after the mapper; `kept` is false when a rule drops it.
  std::pair<bool, std::string> map(std::string name) const;

 private:
  using Rules = std::vector<std::pair<std::string, std::string>>;

  std::pair<bool, std::string> map_draft(const std::string& name) const;
  std::pair<bool, std::string> map_sglang(std::string name) const;
  /// What stands in one model's own loader: stacked rules, experts, plain parameters. `root` goes before every parameter.
  LoaderAnswer load_mapped(const std::string& name, const std::string& root) const;

  bool v41_;
  Kind kind_;
  std::set<std::string> params_;
  Rules substrings_;
  std::vector<std::string> dropped_;
  Rules prefixes_;
  Rules suffixes_;
  std::vector<std::vector<std::string>> stacked_;  // {param, fragment, shard}
  struct Expert {
    std::string param;
    std::string fragment;
    int id;
    std::string shard;
  };
  std::vector<Expert> mapping_;
};

}  // namespace headrace::testing
