#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/digest.h"
#include "receiver/models/family.h"

namespace headrace {

/// What a name means on this rank.
struct Resolution {
  enum class Kind : std::uint8_t {
    kPlaced,    // at least one local destination
    kNotLocal,  // an expert of another rank
    kDropped,   // the engine's loader ignores it
    kUnknown,   // the engine's loader would refuse it or not find it
  };
  Kind kind = Kind::kUnknown;
  std::uint32_t rule = 0;               // rule(); with kPlaced and kNotLocal
  std::int32_t expert = -1;             // logical expert id, -1 for none
  std::span<const std::int32_t> slots;  // local slots to write; {0} for tensors that are no experts
};

/// Finds destinations by the structure of a name. Immutable after construction; any thread. Must outlive its resolutions.
class WeightIndex {
 public:
  explicit WeightIndex(ModelLayout layout);

  /// Agrees with the engine's own linear scan on every name. Expert names of the plain form cost two small look-ups, all others one exact
  /// look-up, and only what neither knows goes through the full scan.
  Resolution resolve(std::string_view name) const;
  const TensorRule& rule(std::uint32_t index) const { return *rules_[index]; }
  std::size_t rule_count() const noexcept { return rules_.size(); }
  const ModelLayout& layout() const noexcept { return layout_; }

  /// Every checkpoint name that this rank needs (local experts only), with its rule: the coverage of an update. Order: named rules, then
  /// experts.
  struct Needed {
    std::string name;
    std::uint32_t rule = 0;
    std::int32_t expert = -1;
  };
  std::vector<Needed> needed(std::span<const std::string> scopes) const;
  /// The nearest known names to one that is unknown, best first, for error messages.
  std::vector<std::string> nearest(std::string_view name, std::size_t count) const;

 private:
  ModelLayout layout_;
  std::vector<const TensorRule*> rules_;  // named rules, then expert rules
  std::unordered_map<std::string_view, std::uint32_t> named_;
  std::unordered_map<std::string_view, std::vector<std::pair<std::string_view, std::uint32_t>>> experts_;  // by prefix, then suffix
  std::unordered_map<std::string, std::vector<std::uint32_t>> by_param_;
};

}  // namespace headrace
