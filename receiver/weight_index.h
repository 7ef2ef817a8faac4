#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/digest.h"
#include "receiver/models/family.h"
#include "receiver/name_table.h"

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
  std::span<const std::int32_t> slots;  // local slots to write, in the map it was found with; {0} for tensors that are no experts
};

/// Finds destinations by the structure of a name. Immutable after construction; any thread. Must outlive its resolutions.
class WeightIndex {
 public:
  explicit WeightIndex(ModelLayout layout);
  WeightIndex(WeightIndex&&) = default;
  WeightIndex& operator=(WeightIndex&&) = default;

  /// Agrees with the engine's own linear scan on every name. Expert names of the plain form cost one look-up by what stands around the id,
  /// all others one by the whole name, and only what neither knows goes through the full scan. A name that the engine would take as a
  /// stacked parameter already put together ("…gate_up_proj.weight") is kUnknown: it is no tensor of a checkpoint, and its bytes are those
  /// of the parts.
  /// `experts` says where experts live now; it outlives the resolution. Without it they are where they were at load.
  Resolution resolve(std::string_view name, const ExpertMaps& experts) const;
  Resolution resolve(std::string_view name) const { return resolve(name, *experts_at_load_); }
  const TensorRule& rule(std::uint32_t index) const { return *rules_[index]; }
  /// Local slots that a rule's placements repeat over; 1 for a tensor that is no expert.
  std::int64_t slots_of(std::uint32_t index) const { return is_expert(index) ? map_of(index, *experts_at_load_).local_slots() : 1; }
  /// Logical experts of a rule's layer; 1 for a tensor that is no expert.
  std::int64_t experts_of(std::uint32_t index) const { return is_expert(index) ? map_of(index, *experts_at_load_).experts() : 1; }
  std::size_t rule_count() const noexcept { return rules_.size(); }
  const ModelLayout& layout() const noexcept { return layout_; }

  /// Every checkpoint name of these scopes that this rank needs (local experts only, optional rules left out), with its rule: the coverage
  /// of an update. Order: named rules, then experts.
  struct Needed {
    std::string name;
    std::uint32_t rule = 0;
    std::int32_t expert = -1;
  };
  std::vector<Needed> needed(std::span<const std::string> scopes, const ExpertMaps& experts) const;
  std::vector<Needed> needed(std::span<const std::string> scopes) const { return needed(scopes, *experts_at_load_); }
  /// The layout's own maps, shared with whoever outlives a change of them.
  const std::shared_ptr<const ExpertMaps>& experts_at_load() const noexcept { return experts_at_load_; }
  /// Of the live maps: physical[l][p] is the logical expert in physical slot p of MoE layer l. kInvalidArgument names the first layer that
  /// does not fit.
  Result<ExpertMaps> rebalanced(std::span<const std::vector<std::int32_t>> physical) const;
  /// The same as needed() without the names.
  void visit_needed(std::span<const std::string> scopes, const ExpertMaps& experts,
                    const std::function<void(std::uint32_t rule, std::int32_t expert)>& visit) const;
  /// The checkpoint name of a rule's tensor; `expert` is -1 for one that is no expert.
  std::string name_of(std::uint32_t rule, std::int32_t expert) const;
  /// The scopes of all rules, each once.
  std::vector<std::string> scopes() const;
  /// The nearest known names to one that is unknown, best first, for error messages. Nearest by the length of the common beginning and
  /// end; time does not grow with the length of `name`.
  std::vector<std::string> nearest(std::string_view name, std::size_t count) const;

 private:
  std::optional<Resolution> resolve_expert(std::string_view name, const ExpertMaps& experts) const;
  Resolution resolve_scan(std::string_view name, const ExpertMaps& experts) const;
  /// Kind and slots of a rule; the map of its layer knows `expert`.
  Resolution placed(std::uint32_t rule, std::int32_t expert, const ExpertMaps& experts) const;
  bool is_expert(std::uint32_t rule) const noexcept { return rule >= layout_.named.size(); }
  const ExpertMap& map_of(std::uint32_t rule, const ExpertMaps& experts) const { return experts.layer(maps_[rule - layout_.named.size()]); }

  ModelLayout layout_;  // the pointers below point into it
  std::shared_ptr<const ExpertMaps> experts_at_load_;
  std::vector<const TensorRule*> rules_;  // named rules, then expert rules
  std::vector<std::uint32_t> maps_;       // per expert rule; beside each other, since every name of an expert asks for one
  NameTable named_;
  NameTable experts_;  // by prefix and suffix
  std::unordered_map<std::string, std::vector<std::uint32_t>> by_param_;
  std::int32_t experts_max_ = 0;    // of any layer
  std::size_t name_bytes_max_ = 0;  // of any name that named_ or experts_ can know
};

}  // namespace headrace
