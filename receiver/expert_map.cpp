#include "receiver/expert_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/check.h"

namespace headrace {

Result<ExpertMap> ExpertMap::initial(std::int32_t experts, std::int32_t redundant, std::int32_t rank, std::int32_t ranks) {
  const std::int64_t physical = std::int64_t{experts} + redundant;
  if (experts <= 0 || redundant < 0 || ranks <= 0 || rank < 0 || rank >= ranks || physical > kPhysicalMax) {
    return Status(Code::kInvalidArgument,
                  fmt::format("expert map of {} experts and {} redundant ones for rank {} of {}: out of range, a layer has "
                              "at most {} physical ones",
                              experts, redundant, rank, ranks, kPhysicalMax));
  }
  if (physical % ranks != 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("expert map for rank {}: {} physical experts do not divide by {} ranks", rank, physical, ranks));
  }
  std::vector<std::int32_t> holds(static_cast<std::size_t>(physical));
  for (std::size_t p = 0; p < holds.size(); ++p) holds[p] = static_cast<std::int32_t>(p % static_cast<std::size_t>(experts));
  std::vector<std::int32_t> local(static_cast<std::size_t>(physical / ranks));
  std::iota(local.begin(), local.end(), static_cast<std::int32_t>(rank * (physical / ranks)));
  return from_physical(experts, std::move(holds), std::move(local));
}

Result<ExpertMap> ExpertMap::from_physical(std::int32_t experts, std::vector<std::int32_t> physical, std::vector<std::int32_t> local) {
  const auto refused = [](std::string why) { return Status(Code::kInvalidArgument, "expert map: " + std::move(why)); };
  if (experts <= 0) return refused(fmt::format("{} experts", experts));
  if (std::cmp_greater(physical.size(), kPhysicalMax)) return refused(fmt::format("{} physical slots", physical.size()));
  std::vector<bool> held(static_cast<std::size_t>(experts), false);
  for (std::size_t p = 0; p < physical.size(); ++p) {
    if (physical[p] < 0 || physical[p] >= experts) {
      return refused(fmt::format("physical slot {} holds expert {}, the model has {}", p, physical[p], experts));
    }
    held[static_cast<std::size_t>(physical[p])] = true;
  }
  const auto lost = std::find(held.begin(), held.end(), false);
  if (lost != held.end()) return refused(fmt::format("none of {} physical slots holds expert {}", physical.size(), lost - held.begin()));
  std::vector<bool> mine(physical.size(), false);
  for (const std::int32_t p : local) {
    if (p < 0 || static_cast<std::size_t>(p) >= physical.size() || mine[static_cast<std::size_t>(p)]) {
      return refused(fmt::format("local slot {} of {} physical ones is out of range or named twice", p, physical.size()));
    }
    mine[static_cast<std::size_t>(p)] = true;
  }
  ExpertMap map;
  map.experts_ = experts;
  map.physical_ = std::move(physical);
  map.local_ = std::move(local);
  const auto expert_in = [&](std::size_t slot) {
    return static_cast<std::size_t>(map.physical_[static_cast<std::size_t>(map.local_[slot])]);
  };
  map.offsets_.assign(static_cast<std::size_t>(experts) + 1, 0);
  for (std::size_t s = 0; s < map.local_.size(); ++s) ++map.offsets_[expert_in(s) + 1];
  std::partial_sum(map.offsets_.begin(), map.offsets_.end(), map.offsets_.begin());
  map.slots_.resize(map.local_.size());
  std::vector<std::int32_t> next(map.offsets_.begin(), map.offsets_.end() - 1);
  for (std::size_t s = 0; s < map.local_.size(); ++s) {
    map.slots_[static_cast<std::size_t>(next[expert_in(s)]++)] = static_cast<std::int32_t>(s);
  }
  return map;
}

Result<ExpertMap> ExpertMap::rebalanced(std::span<const std::int32_t> physical) const {
  if (physical.size() != physical_.size()) {
    return Status(Code::kInvalidArgument, fmt::format("expert map: {} physical slots, there are {}", physical.size(), physical_.size()));
  }
  return from_physical(experts_, {physical.begin(), physical.end()}, local_);
}

std::span<const std::int32_t> ExpertMap::slots_of(std::int32_t expert) const noexcept {
  HEADRACE_CHECK(expert >= 0 && expert < experts_, "slots_of() of an expert that the model has not");
  const auto begin = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(expert)]);
  const auto end = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(expert) + 1]);
  return std::span(slots_).subspan(begin, end - begin);
}

ExpertMaps::ExpertMaps(std::vector<ExpertMap> layers) : layers_(std::move(layers)) {
  Hasher hasher;
  hasher.text("headrace expert maps").number(layers_.size());
  for (const ExpertMap& map : layers_) {
    hasher.number(static_cast<std::uint64_t>(map.experts())).number(map.physical().size()).bytes(std::as_bytes(map.physical()));
  }
  digest_ = hasher.finish();
}

Result<ExpertMaps> ExpertMaps::rebalanced(std::span<const std::vector<std::int32_t>> physical, std::span<const std::string> names) const {
  if (physical.size() != layers_.size()) {
    return Status(Code::kInvalidArgument, fmt::format("expert map: {} MoE layers, the model has {}", physical.size(), layers_.size()));
  }
  std::vector<ExpertMap> moved;
  moved.reserve(layers_.size());
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    Result<ExpertMap> map = layers_[l].rebalanced(physical[l]);
    if (!map.ok()) {
      const std::string name = l < names.size() ? fmt::format(" ({})", names[l]) : std::string();
      return Status(map.status().code(), fmt::format("MoE layer {}{}: {}", l, name, map.status().message()));
    }
    moved.push_back(std::move(map).value());
  }
  return ExpertMaps(std::move(moved));
}

}  // namespace headrace
