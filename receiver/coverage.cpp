#include "receiver/coverage.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/wire/limits.h"

namespace headrace {

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
  for (const Box& earlier : state.boxes) {
    if (!intersect(earlier, box).empty()) {
      return Status(Code::kInvalidArgument, fmt::format("box {} overlaps box {}, which came before", to_string(box), to_string(earlier)));
    }
  }
  if (state.boxes.size() >= limits::kBoxesMax) {
    return Status(Code::kInvalidArgument, fmt::format("more than {} pieces of one entry", limits::kBoxesMax));
  }
  const std::int64_t elements = box.elements();
  state.elements_left -= elements;
  elements_left_ -= elements;
  if (state.elements_left == 0) {
    state.boxes = {};
  } else {
    state.boxes.push_back(box);
  }
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
