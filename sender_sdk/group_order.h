#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/wire/messages.h"

namespace headrace {

/// Keeps the entries of a receiver's staged groups together: once one of a group is there, entries of no other group of that receiver may
/// come before it is whole. The caller's thread alone.
class GroupOrder {
 public:
  /// Starts an update of `entries` entries with what each receiver said in ACCEPT. kCorruption: a group that names an entry twice, one of
  /// another group, or one that is not there; the receiver is named by its place in the list.
  Status begin(std::size_t entries, std::span<const std::vector<wire::EntryGroup>> receivers);
  bool empty() const noexcept { return receivers_.empty(); }
  /// kFailedPrecondition names the group that is open when `entry` belongs to another one.
  Status check(std::uint32_t entry) const;
  void take(std::uint32_t entry);
  /// All entries: each group as a whole where its first entry stands, the rest as they are.
  std::vector<std::uint32_t> order() const;

 private:
  struct Group {
    std::string name;
    std::size_t entries = 0;
  };
  struct PerReceiver {
    std::vector<Group> groups;
    std::vector<std::int32_t> group_of;  // per entry, -1 for none
    std::int32_t open = -1;
    std::size_t left = 0;
  };
  std::vector<PerReceiver> receivers_;  // those with groups
  std::size_t entries_ = 0;
};

}  // namespace headrace
