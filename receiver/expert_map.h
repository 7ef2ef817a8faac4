#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/digest.h"
#include "core/base/status.h"

namespace [[gnu::visibility("default")]] headrace {

/// Where the experts of one MoE layer live: which logical expert each physical slot of the engine holds, and which of these slots are
/// this rank's. A value.
class ExpertMap {
 public:
  /// Most physical slots of one layer: far above any engine, and a few MB of map.
  static constexpr std::int64_t kPhysicalMax = std::int64_t{1} << 18;

  ExpertMap() = default;
  /// The map at load: physical expert p holds logical p % experts; rank r of `ranks` owns physical [r*n/ranks, (r+1)*n/ranks), n = experts
  /// + redundant. kInvalidArgument unless n divides by ranks and is at most kPhysicalMax.
  static Result<ExpertMap> initial(std::int32_t experts, std::int32_t redundant, std::int32_t rank, std::int32_t ranks);
  /// physical[p] is the logical expert in physical slot p, over all ranks; local[s] the physical slot that is this rank's slot s.
  /// kInvalidArgument, with the numbers: an expert out of [0, experts), one that nobody holds, a local slot out of range or named twice.
  static Result<ExpertMap> from_physical(std::int32_t experts, std::vector<std::int32_t> physical, std::vector<std::int32_t> local);
  /// The same slots on the same ranks after the engine has moved experts between them. kInvalidArgument also for another number of slots.
  Result<ExpertMap> rebalanced(std::span<const std::int32_t> physical) const;

  std::int32_t experts() const noexcept { return experts_; }
  /// Logical expert per physical slot, over all ranks.
  std::span<const std::int32_t> physical() const noexcept { return physical_; }
  std::int32_t local_slots() const noexcept { return static_cast<std::int32_t>(local_.size()); }
  /// Local slots of a logical expert, ascending; empty when it lives elsewhere. Precondition: 0 <= expert < experts().
  std::span<const std::int32_t> slots_of(std::int32_t expert) const noexcept;

 private:
  std::int32_t experts_ = 0;
  std::vector<std::int32_t> physical_;
  std::vector<std::int32_t> local_;    // physical slot of each local one
  std::vector<std::int32_t> slots_;    // local slots grouped by expert
  std::vector<std::int32_t> offsets_;  // experts_ + 1 offsets into slots_
};

/// The maps of all MoE layers, in order. A value; what works with them shares one.
class ExpertMaps {
 public:
  ExpertMaps() = default;
  explicit ExpertMaps(std::vector<ExpertMap> layers);

  std::span<const ExpertMap> layers() const noexcept { return layers_; }
  const ExpertMap& layer(std::size_t index) const { return layers_[index]; }
  /// Of what all ranks of an engine must agree on: the physical slots of every layer, not which of them are local.
  const Digest& digest() const noexcept { return digest_; }
  /// The maps after a rebalance: physical[l][p] is the logical expert in physical slot p of layer l. kInvalidArgument names the first layer
  /// that does not fit, by number and by names[l] where there are names.
  Result<ExpertMaps> rebalanced(std::span<const std::vector<std::int32_t>> physical, std::span<const std::string> names) const;

 private:
  std::vector<ExpertMap> layers_;
  Digest digest_;
};

}  // namespace headrace
