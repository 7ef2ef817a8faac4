#include "receiver/coverage.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/wire/limits.h"

namespace headrace {
namespace {

bool overlaps(const std::int64_t* bounds, const Box& box) {
  const std::size_t rank = box.rank();
  for (std::size_t d = 0; d < rank; ++d)
    if (bounds[d] >= box.hi[d] || box.lo[d] >= bounds[rank + d]) return false;
  return true;
}

/// Makes the earlier part take in a box that adjoins it, as pieces sent in order do; false where the two make no box.
bool grow(std::int64_t* bounds, const Box& box) {
  const std::size_t rank = box.rank();
  std::size_t along = rank;
  for (std::size_t d = 0; d < rank; ++d) {
    if (bounds[d] == box.lo[d] && bounds[rank + d] == box.hi[d]) continue;
    if (along != rank || (bounds[rank + d] != box.lo[d] && box.hi[d] != bounds[d])) return false;
    along = d;
  }
  if (along == rank) return false;
  bounds[along] = std::min(bounds[along], box.lo[along]);
  bounds[rank + along] = std::max(bounds[rank + along], box.hi[along]);
  return true;
}

}  // namespace

Coverage::Coverage(const SyncPlan& plan) : plan_(&plan) {
  entries_.resize(plan.parts().size());
  for (std::uint32_t s = 0; s < entries_.size(); ++s) {
    entries_[s].resize(plan.entries(s).size());
    for (std::size_t e = 0; e < entries_[s].size(); ++e) {
      for (const Box& box : plan.entries(s)[e].wanted) entries_[s][e].elements_left += box.elements();
      elements_left_ += entries_[s][e].elements_left;
    }
  }
}

Status Coverage::add(std::uint32_t sender, std::uint32_t entry, const Box& box) {
  const std::vector<Box>& wanted = plan_->entries(sender)[entry].wanted;
  const bool inside = !box.empty() && std::any_of(wanted.begin(), wanted.end(), [&](const Box& w) { return w.contains(box); });
  if (!inside) return Status(Code::kInvalidArgument, fmt::format("box {} lies in no wanted region", to_string(box)));
  Entry& state = entries_[sender][entry];
  if (state.elements_left == 0) return Status(Code::kInvalidArgument, fmt::format("box {} came before", to_string(box)));
  const std::size_t rank = box.rank();
  const std::size_t step = 2 * rank;
  for (std::size_t at = 0; at < state.bounds.size(); at += step) {
    if (!overlaps(&state.bounds[at], box)) continue;
    const auto lo = state.bounds.begin() + static_cast<std::ptrdiff_t>(at);
    const auto hi = lo + static_cast<std::ptrdiff_t>(rank);
    const Box earlier{{lo, hi}, {hi, hi + static_cast<std::ptrdiff_t>(rank)}};
    return Status(Code::kInvalidArgument, fmt::format("box {} overlaps box {}, which came before", to_string(box), to_string(earlier)));
  }
  const std::int64_t elements = box.elements();
  const bool whole = state.elements_left == elements;
  if (!whole && !(state.bounds.size() >= step && grow(&state.bounds[state.bounds.size() - step], box))) {
    if (state.bounds.size() >= step * limits::kBoxesMax) {
      return Status(Code::kInvalidArgument, fmt::format("more than {} pieces of one entry that do not adjoin", limits::kBoxesMax));
    }
    state.bounds.insert(state.bounds.end(), box.lo.begin(), box.lo.end());
    state.bounds.insert(state.bounds.end(), box.hi.begin(), box.hi.end());
  }
  if (whole) state.bounds = {};
  state.elements_left -= elements;
  elements_left_ -= elements;
  return ok_status();
}

std::vector<std::string> Coverage::missing(std::size_t count) const {
  std::vector<std::string> names;
  for (std::uint32_t s = 0; s < entries_.size(); ++s) {
    for (std::uint32_t e = 0; e < entries_[s].size() && names.size() < count; ++e) {
      if (entries_[s][e].elements_left > 0) names.push_back(plan_->entry(s, e).name);
    }
  }
  return names;
}

}  // namespace headrace
