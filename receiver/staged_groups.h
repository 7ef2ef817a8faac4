#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/device/device.h"
#include "receiver/models/family.h"
#include "receiver/receiver.h"

namespace headrace {

/// Gives each entry of each group a rule with a place in the scratch (at multiples of 64 bytes) and appends it to `layout.named`.
/// kInvalidArgument: a group without name, hook, entries or outputs, or of two scopes; an output that is no storage; an entry without a
/// whole-byte dtype, or one that is a rule already.
Status place_groups(ModelLayout& layout);
/// Bytes of scratch of a group: its entries, then the work bytes.
std::int64_t scratch_bytes(const ModelLayout& layout, const StagedGroup& group);

/// Calls visit(storage) for each storage that is written where a rule's tensor arrives: those of its placements, or its group's outputs.
template <class Visit>
void each_written(const ModelLayout& layout, const TensorRule& rule, const Visit& visit) {
  if (rule.group < 0) {
    for (const Placement& placement : rule.placements) visit(placement.storage);
  } else {
    for (const std::uint32_t output : layout.groups[static_cast<std::size_t>(rule.group)].outputs) visit(output);
  }
}

/// Scratch memory, one for each sender that brings groups at a time. The first is there from the start; more are taken before the first
/// byte of an update and given back after it. Progress thread only.
class GroupScratch {
 public:
  /// `bytes` is that of the largest group, 0 for none. kResourceExhausted names the bytes.
  static Result<GroupScratch> create(Device& device, std::int64_t bytes);
  /// Scratch for `senders` senders.
  Status reserve(std::size_t senders);
  std::span<std::byte> at(std::size_t index) const { return memory_.at(index)->bytes(); }

 private:
  Device* device_ = nullptr;
  std::int64_t bytes_ = 0;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

}  // namespace headrace
