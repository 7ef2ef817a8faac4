#include "sender_sdk/group_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace headrace {

Status GroupOrder::begin(std::size_t entries, std::span<const std::vector<wire::EntryGroup>> receivers) {
  receivers_.clear();
  entries_ = entries;
  for (std::size_t r = 0; r < receivers.size(); ++r) {
    if (receivers[r].empty()) continue;
    PerReceiver row;
    row.group_of.assign(entries, -1);
    for (const wire::EntryGroup& group : receivers[r]) {
      const auto index = static_cast<std::int32_t>(row.groups.size());
      for (const std::uint32_t entry : group.entries) {
        if (entry >= entries || row.group_of[entry] >= 0) {
          return Status(Code::kCorruption,
                        fmt::format("receiver {}: entry {} of staged group {} is unknown or stands in two", r, entry, group.name));
        }
        row.group_of[entry] = index;
      }
      row.groups.push_back({group.name, group.entries.size()});
    }
    receivers_.push_back(std::move(row));
  }
  return ok_status();
}

Status GroupOrder::check(std::uint32_t entry) const {
  for (const PerReceiver& row : receivers_) {
    const std::int32_t group = row.group_of[entry];
    if (group < 0 || row.open < 0 || group == row.open) continue;
    const std::string& open = row.groups[static_cast<std::size_t>(row.open)].name;
    return Status(Code::kFailedPrecondition, fmt::format("it belongs to staged group {}, and {} more of group {} come first",
                                                         row.groups[static_cast<std::size_t>(group)].name, row.left, open));
  }
  return ok_status();
}

void GroupOrder::take(std::uint32_t entry) {
  for (PerReceiver& row : receivers_) {
    const std::int32_t group = row.group_of[entry];
    if (group < 0) continue;
    if (row.open < 0) row.left = row.groups[static_cast<std::size_t>(group)].entries;
    row.open = --row.left == 0 ? -1 : group;
  }
}

std::vector<std::uint32_t> GroupOrder::order() const {
  std::vector<std::uint32_t> entries(entries_);
  std::iota(entries.begin(), entries.end(), 0U);
  std::vector<std::uint32_t> place = entries;
  for (const PerReceiver& row : receivers_) {
    std::vector<std::uint32_t> first(row.groups.size(), UINT32_MAX);
    for (std::size_t e = 0; e < entries_; ++e) {
      if (row.group_of[e] >= 0)
        first[static_cast<std::size_t>(row.group_of[e])] = std::min(first[static_cast<std::size_t>(row.group_of[e])], place[e]);
    }
    for (std::size_t e = 0; e < entries_; ++e) {
      if (row.group_of[e] >= 0) place[e] = first[static_cast<std::size_t>(row.group_of[e])];
    }
  }
  std::sort(entries.begin(), entries.end(),
            [&](std::uint32_t a, std::uint32_t b) { return std::pair(place[a], a) < std::pair(place[b], b); });
  return entries;
}

}  // namespace headrace
