#include "receiver/staged_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace headrace {
namespace {

constexpr std::int64_t kEntryAlignment = 64;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kEntryAlignment - 1) / kEntryAlignment * kEntryAlignment;
}

Status refuse(const StagedGroup& group, std::string_view why) {
  return Status(Code::kInvalidArgument, fmt::format("staged group {}: {}", group.name, why));
}

Status check_group(const ModelLayout& layout, const StagedGroup& group) {
  if (group.name.empty() || group.hook.empty()) return refuse(group, "a group has a name and a hook");
  if (group.entries.empty() || group.outputs.empty()) return refuse(group, "a group has entries and outputs");
  if (group.work_bytes < 0) return refuse(group, fmt::format("{} work bytes", group.work_bytes));
  for (const std::uint32_t output : group.outputs) {
    if (output >= layout.storages.size()) return refuse(group, fmt::format("output {} of {} storages", output, layout.storages.size()));
  }
  for (const NamedRule& entry : group.entries) {
    if (entry.rule.dtypes.empty() || dtype_bytes(entry.rule.dtypes.front()) == 0)
      return refuse(group, entry.name + " has no dtype of bytes");
    if (entry.rule.scope != group.entries.front().rule.scope) return refuse(group, entry.name + " is of another scope");
    if (entry.rule.placements.size() > 1) return refuse(group, entry.name + " has more than one box");
    const auto elements = element_count(entry.rule.shape);
    if (!elements || *elements == 0) return refuse(group, entry.name + " has no elements");
  }
  return ok_status();
}

/// The box that is wanted, packed at `offset` of the scratch.
Result<Placement> in_scratch(const TensorRule& rule, std::int64_t offset) {
  const std::int64_t elem = dtype_bytes(rule.dtypes.front());
  Placement placement{
      .storage = kScratchStorage, .box = rule.placements.empty() ? Box::whole(rule.shape) : rule.placements.front().box, .copy = {}};
  const auto strides = packed_strides(rule.shape, elem);
  Result<StridedCopy> copy = pack_nest(placement.box.shape(), elem, strides);
  if (!copy.ok()) return copy.status();
  placement.copy = std::move(copy).value();
  for (std::size_t d = 0; d < strides.size(); ++d) placement.copy.src_offset += placement.box.lo[d] * strides[d];
  placement.copy.dst_offset = offset;
  return placement;
}

}  // namespace

Status place_groups(ModelLayout& layout) {
  std::set<std::string_view> names;
  for (const NamedRule& named : layout.named) names.insert(named.name);
  std::vector<NamedRule> placed;
  for (std::size_t g = 0; g < layout.groups.size(); ++g) {
    const StagedGroup& group = layout.groups[g];
    HEADRACE_RETURN_IF_ERROR(check_group(layout, group));
    std::int64_t offset = 0;
    for (const NamedRule& entry : group.entries) {
      if (!names.insert(entry.name).second) return refuse(group, entry.name + " has a rule already");
      NamedRule rule = entry;
      Result<Placement> placement = in_scratch(entry.rule, offset);
      if (!placement.ok()) return refuse(group, fmt::format("{}: {}", entry.name, placement.status().message()));
      offset = aligned(offset + placement.value().copy.dst_bytes());
      rule.rule.group = static_cast<std::int32_t>(g);
      if (rule.rule.param.empty()) rule.rule.param = entry.name;
      rule.rule.placements = {std::move(placement).value()};
      placed.push_back(std::move(rule));
    }
  }
  for (NamedRule& rule : placed) layout.named.push_back(std::move(rule));
  return ok_status();
}

std::int64_t scratch_bytes(const ModelLayout& layout, const StagedGroup& group) {
  const auto g = static_cast<std::int32_t>(&group - layout.groups.data());
  std::int64_t end = 0;
  for (const NamedRule& named : layout.named) {
    if (named.rule.group != g) continue;
    const StridedCopy& copy = named.rule.placements.front().copy;
    end = std::max(end, aligned(copy.dst_offset + copy.dst_bytes()));
  }
  return end + group.work_bytes;
}

Result<GroupScratch> GroupScratch::create(Device& device, std::int64_t bytes) {
  GroupScratch scratch;
  scratch.device_ = &device;
  scratch.bytes_ = bytes;
  HEADRACE_RETURN_IF_ERROR(scratch.reserve(bytes > 0 ? 1 : 0));
  return scratch;
}

Status GroupScratch::reserve(std::size_t senders) {
  if (bytes_ == 0) return ok_status();
  // One stays for good, so that an update from one sender takes no memory.
  if (memory_.size() > std::max<std::size_t>(senders, 1)) memory_.resize(std::max<std::size_t>(senders, 1));
  while (memory_.size() < senders) {
    Result<std::unique_ptr<DeviceMemory>> memory =
        device_->allocate({.bytes = static_cast<std::size_t>(bytes_), .exportable = false, .touch = true, .label = "headrace-scratch"});
    if (!memory.ok()) {
      return Status(memory.status().code(), fmt::format("scratch of {} bytes for staged groups: {}", bytes_, memory.status().message()));
    }
    memory_.push_back(std::move(memory).value());
  }
  return ok_status();
}

}  // namespace headrace
