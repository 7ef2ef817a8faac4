#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/digest.h"
#include "core/base/status.h"

namespace [[gnu::visibility("default")]] headrace {

/// Which local slots of one MoE layer hold which logical expert. A value.
class ExpertMap {
 public:
  ExpertMap() = default;
  /// The map at load: physical expert p holds logical p % experts; rank r of `ranks` owns physical [r*n/ranks, (r+1)*n/ranks), n = experts
  /// + redundant. kInvalidArgument unless n divides by ranks.
  static Result<ExpertMap> initial(std::int32_t experts, std::int32_t redundant, std::int32_t rank, std::int32_t ranks);
  /// A live map: local_slots[s] is the logical expert in local slot s.
  static Result<ExpertMap> from_slots(std::int32_t experts, std::span<const std::int32_t> local_slots);

  std::int32_t experts() const noexcept { return experts_; }
  std::int32_t local_slots() const noexcept { return static_cast<std::int32_t>(slots_.size()); }
  /// Local slots of a logical expert, ascending; empty when it lives elsewhere. Precondition: 0 <= expert < experts().
  std::span<const std::int32_t> slots_of(std::int32_t expert) const noexcept;
  Digest digest() const;

 private:
  std::int32_t experts_ = 0;
  std::vector<std::int32_t> slots_;    // slots grouped by expert
  std::vector<std::int32_t> offsets_;  // experts_ + 1 offsets into slots_
};

/// Of the maps of all layers, in order.
Digest digest_of(std::span<const ExpertMap> maps);

}  // namespace headrace
