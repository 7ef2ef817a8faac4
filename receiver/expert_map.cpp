#include "receiver/expert_map.h"

#include <fmt/format.h>

#include "core/base/check.h"

namespace headrace {

Result<ExpertMap> ExpertMap::initial(std::int32_t experts, std::int32_t redundant, std::int32_t rank, std::int32_t ranks) {
  const std::int64_t physical = std::int64_t{experts} + redundant;
  if (experts <= 0 || redundant < 0 || ranks <= 0 || rank < 0 || rank >= ranks || physical > INT32_MAX) {
    return Status(Code::kInvalidArgument, fmt::format("expert map of {} experts and {} redundant ones for rank {} of {}: out of range",
                                                      experts, redundant, rank, ranks));
  }
  if (physical % ranks != 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("expert map for rank {}: {} physical experts do not divide by {} ranks", rank, physical, ranks));
  }
  const std::int64_t local = physical / ranks;
  std::vector<std::int32_t> slots;
  slots.reserve(static_cast<std::size_t>(local));
  for (std::int64_t p = rank * local; p < (rank + 1) * local; ++p) slots.push_back(static_cast<std::int32_t>(p % experts));
  return from_slots(experts, slots);
}

Result<ExpertMap> ExpertMap::from_slots(std::int32_t experts, std::span<const std::int32_t> local_slots) {
  if (experts <= 0) return Status(Code::kInvalidArgument, fmt::format("expert map of {} experts: out of range", experts));
  if (local_slots.size() > static_cast<std::size_t>(INT32_MAX)) {
    return Status(Code::kInvalidArgument, fmt::format("expert map of {} slots: out of range", local_slots.size()));
  }
  ExpertMap map;
  map.experts_ = experts;
  map.offsets_.assign(static_cast<std::size_t>(experts) + 1, 0);
  for (std::size_t s = 0; s < local_slots.size(); ++s) {
    const std::int32_t expert = local_slots[s];
    if (expert < 0 || expert >= experts) {
      return Status(Code::kInvalidArgument, fmt::format("expert map: slot {} holds expert {}, the model has {}", s, expert, experts));
    }
    ++map.offsets_[static_cast<std::size_t>(expert) + 1];
  }
  for (std::size_t e = 1; e < map.offsets_.size(); ++e) map.offsets_[e] += map.offsets_[e - 1];
  map.slots_.resize(local_slots.size());
  std::vector<std::int32_t> next(map.offsets_.begin(), map.offsets_.end() - 1);
  for (std::size_t s = 0; s < local_slots.size(); ++s) {
    std::int32_t& place = next[static_cast<std::size_t>(local_slots[s])];
    map.slots_[static_cast<std::size_t>(place++)] = static_cast<std::int32_t>(s);
  }
  return map;
}

std::span<const std::int32_t> ExpertMap::slots_of(std::int32_t expert) const noexcept {
  HEADRACE_CHECK(expert >= 0 && expert < experts_, "slots_of() of an expert that the model has not");
  const auto begin = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(expert)]);
  const auto end = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(expert) + 1]);
  return std::span(slots_).subspan(begin, end - begin);
}

Digest ExpertMap::digest() const {
  Hasher hasher;
  hasher.text("headrace expert map").number(static_cast<std::uint64_t>(experts_)).number(slots_.size());
  for (const std::int32_t offset : offsets_) hasher.number(static_cast<std::uint64_t>(offset));
  for (const std::int32_t slot : slots_) hasher.number(static_cast<std::uint64_t>(slot));
  return hasher.finish();
}

Digest digest_of(std::span<const ExpertMap> maps) {
  Hasher hasher;
  hasher.text("headrace expert maps").number(maps.size());
  for (const ExpertMap& map : maps) {
    const Digest one = map.digest();
    hasher.bytes(std::as_bytes(std::span(one.bytes)));
  }
  return hasher.finish();
}

}  // namespace headrace
