#include "receiver/update_session.h"

#include <fmt/format.h>

#include <algorithm>

namespace headrace {
namespace {

/// Bytes from an extent's offset to the end of its last element; nullopt when that is no number or the strides are odd.
std::optional<std::int64_t> extent_reach(const Box& box, std::int64_t elem_bytes, std::span<const std::int64_t> strides) {
  std::int64_t reach = elem_bytes;
  for (std::size_t d = 0; d < box.rank(); ++d) {
    std::int64_t step = 0;
    if (strides[d] < 0 || __builtin_mul_overflow(box.hi[d] - box.lo[d] - 1, strides[d], &step) ||
        __builtin_add_overflow(reach, step, &reach))
      return std::nullopt;
  }
  return reach;
}

Status check_extent_bytes(const wire::Extent& extent, const Box& box, std::int64_t elem_bytes, std::span<const std::byte> memory) {
  if (!extent.strides.empty() && extent.strides.size() != box.rank()) {
    return Status(Code::kInvalidArgument, fmt::format("{} strides for {} dimensions", extent.strides.size(), box.rank()));
  }
  // Packed bytes end where there are no more elements.
  const std::optional<std::int64_t> reach =
      extent.strides.empty() ? box.elements() * elem_bytes : extent_reach(box, elem_bytes, extent.strides);
  if (!reach) {
    return Status(Code::kInvalidArgument, fmt::format("strides {} of box shape {}", to_string(extent.strides), to_string(box.shape())));
  }
  const auto size = static_cast<std::int64_t>(memory.size());
  if (extent.offset < 0 || extent.offset > size || *reach > size - extent.offset) {
    return Status(Code::kInvalidArgument, fmt::format("bytes [{}, {}+{}) of a memory of {}", extent.offset, extent.offset, *reach, size));
  }
  return ok_status();
}

}  // namespace

void UpdateSession::adopt(std::shared_ptr<const SyncPlan> agreed) {
  plan = std::move(agreed);
  coverage = std::make_unique<Coverage>(*plan);
  sums.assign(plan->tensors().size(), FingerprintSum{});
  const bool grouped = !plan->index().layout().groups.empty();
  input_sums.assign(grouped ? plan->tensors().size() : 0, FingerprintSum{});
  plan->describe(receipt);
  cast_sums.assign(plan->converts() ? plan->tensors().size() : 0, CastSums{});
}

Status UpdateSession::check_bucket(SessionSender& sender, const wire::Bucket& bucket, std::uint32_t credits, const Resolve& resolve,
                                   ApplyWork& work, wire::Failure& failure) {
  failure.bucket = static_cast<std::int64_t>(bucket.sequence);
  failure.sender = sender.name;
  if (sender.ended) return Status(Code::kFailedPrecondition, "a bucket after END");
  if (bucket.sequence != sender.buckets) {
    failure.expected = std::to_string(sender.buckets);
    failure.actual = std::to_string(bucket.sequence);
    return Status(Code::kFailedPrecondition, "buckets are not gapless");
  }
  if (sender.buckets - sender.consumed >= credits) {
    return Status(Code::kFailedPrecondition,
                  fmt::format("{} buckets on the way, {} are granted", sender.buckets - sender.consumed + 1, credits));
  }
  const std::uint32_t s = index_of(sender);
  const auto entries = plan->entries(s);
  work.jobs.reserve(bucket.extents.size());
  // Extents of one bucket mostly lie in one memory, which is looked up once.
  Result<std::span<const std::byte>> memory = std::span<const std::byte>();
  std::optional<MemoryId> resolved;
  for (const wire::Extent& extent : bucket.extents) {
    if (extent.entry >= entries.size()) {
      return Status(Code::kInvalidArgument, fmt::format("entry {} of a manifest of {}", extent.entry, entries.size()));
    }
    const PlanEntry& entry = entries[extent.entry];
    const auto within = [&](const Status& status) {
      failure.name = plan->entry(s, extent.entry).name;
      return Status(status.code(), fmt::format("{}: {}", failure.name, status.message()));
    };
    const auto refused = [&](std::string why) { return within(Status(Code::kInvalidArgument, std::move(why))); };
    if (entry.tensor < 0) return refused("this rank wants nothing of it");
    if (!extent.box && entry.wanted.size() != 1) {
      return refused(fmt::format("an extent without a box, {} boxes are wanted", entry.wanted.size()));
    }
    const Box& box = extent.box ? *extent.box : entry.wanted.front();
    const PlanTensor& tensor = plan->tensors()[static_cast<std::size_t>(entry.tensor)];
    const TensorGeometry& source = plan->geometry().of(tensor.rule).source;
    if (!box_fits(box, source.shape)) {
      return refused(fmt::format("box {} does not lie in shape {}", to_string(box), to_string(source.shape)));
    }
    if (resolved != extent.memory) {
      memory = resolve(extent.memory);
      if (!memory.ok()) return within(memory.status());
      resolved = extent.memory;
    }
    if (Status status = check_extent_bytes(extent, box, tensor.elem_bytes, memory.value()); !status.ok()) return within(status);
    if (Status status = coverage->add(s, extent.entry, box); !status.ok()) return within(status);
    const auto t = static_cast<std::uint32_t>(entry.tensor);
    const std::int32_t group = plan->index().rule(tensor.rule).group;
    if (Status status = check_group(sender, group); !status.ok()) return within(status);
    if (Status status = append_work(*plan, t, box, memory.value().data() + extent.offset, extent.strides, work, sender.scratch.data());
        !status.ok())
      return within(status);
    take_group(sender, group, box.elements(), work);
    receipt.wire_bytes += static_cast<std::uint64_t>(box.elements() * tensor.elem_bytes);
  }
  ++sender.buckets;
  ++receipt.buckets;
  return ok_status();
}

Status UpdateSession::check_end(SessionSender& sender, const wire::End& end, bool require_proof, wire::Failure& failure) {
  failure.sender = sender.name;
  if (sender.ended) return Status(Code::kFailedPrecondition, "END twice");
  if (end.buckets != sender.buckets) {
    failure.expected = std::to_string(end.buckets);
    failure.actual = std::to_string(sender.buckets);
    return Status(Code::kFailedPrecondition, "the sender counts other buckets than came");
  }
  const std::uint32_t s = index_of(sender);
  const auto entries = plan->entries(s);
  std::vector<bool> given(entries.size(), false);
  for (const wire::EntryFingerprint& fingerprint : end.fingerprints) {
    if (fingerprint.entry >= entries.size() || entries[fingerprint.entry].tensor < 0 || given[fingerprint.entry]) {
      return Status(Code::kInvalidArgument,
                    fmt::format("a fingerprint of entry {}, which is unknown, not wanted, or came twice", fingerprint.entry));
    }
    HEADRACE_RETURN_IF_ERROR(check_claim(sender, fingerprint, failure));
    given[fingerprint.entry] = true;
    sums[static_cast<std::size_t>(entries[fingerprint.entry].tensor)] += fingerprint.sum;
    ++sums_given;
  }
  for (std::size_t e = 0; e < entries.size(); ++e) {
    if (entries[e].tensor < 0 || given[e]) continue;
    if (end.fingerprints.empty() && !require_proof) break;
    failure.name = plan->entry(s, static_cast<std::uint32_t>(e)).name;
    return Status(Code::kInvalidArgument, fmt::format("{}: no fingerprint", failure.name));
  }
  sender.ended = true;
  return ok_status();
}

Status UpdateSession::check_claim(const SessionSender& sender, const wire::EntryFingerprint& fingerprint, wire::Failure& failure) const {
  const auto claimed = std::lower_bound(sender.values.begin(), sender.values.end(), fingerprint.entry,
                                        [](const wire::EntryValue& value, std::uint32_t entry) { return value.entry < entry; });
  if (claimed == sender.values.end() || claimed->entry != fingerprint.entry) return ok_status();
  const std::uint32_t s = index_of(sender);
  // What others asked for means nothing here, neither its bytes nor its sum.
  const AskedValue* wanted = asked_of(s, fingerprint.entry);
  if (wanted == nullptr) return ok_status();
  const PlanEntry& entry = plan->entries(s)[fingerprint.entry];
  const wire::ManifestEntry& sent = plan->entry(s, fingerprint.entry);
  // A part of a tensor sums to something else than the whole.
  if (entry.wanted.size() != 1 || entry.wanted.front() != Box::whole(sent.shape)) return ok_status();
  const PlanTensor& tensor = plan->tensors()[static_cast<std::size_t>(entry.tensor)];
  const std::optional<FingerprintSum> told = values->is_tied(wanted->at.rule) ? wire::fingerprint_of(claimed->bytes) : std::nullopt;
  const FingerprintSum sum = told ? *told : headrace::fingerprint(tensor.key, 0, claimed->bytes);
  if (sum == fingerprint.sum) return ok_status();
  failure.name = sent.name;
  failure.expected = fmt::format("{:016x}{:016x}", sum.lanes[0], sum.lanes[1]);
  failure.actual = fmt::format("{:016x}{:016x}", fingerprint.sum.lanes[0], fingerprint.sum.lanes[1]);
  if (told) return Status(Code::kCorruption, fmt::format("{}: MANIFEST said another fingerprint than what was sent has", sent.name));
  std::string hex;
  for (const std::byte byte : claimed->bytes) hex += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return Status(Code::kCorruption, fmt::format("{}: MANIFEST said that it holds the bytes {}, others were sent", sent.name, hex));
}

const AskedValue* UpdateSession::asked_of(std::uint32_t sender, std::uint32_t entry) const {
  if (!values || asked == nullptr) return nullptr;
  const auto found = std::lower_bound(asked->begin(), asked->end(), std::pair(sender, entry),
                                      [](const AskedValue& each, const auto& at) { return std::pair(each.sender, each.entry) < at; });
  return found != asked->end() && found->sender == sender && found->entry == entry ? &*found : nullptr;
}

Status UpdateSession::check_group(const SessionSender& sender, std::int32_t group) const {
  if (group < 0 || sender.group == nullptr || static_cast<std::int32_t>(sender.group->group) == group) return ok_status();
  const auto& groups = plan->index().layout().groups;
  return Status(Code::kFailedPrecondition, fmt::format("an entry of staged group {} before group {} of the same sender is whole",
                                                       groups[static_cast<std::size_t>(group)].name, groups[sender.group->group].name));
}

void UpdateSession::take_group(SessionSender& sender, std::int32_t group, std::int64_t elements, ApplyWork& work) const {
  if (group < 0) return;
  if (sender.group == nullptr) {
    for (const PlanGroup& each : plan->groups(index_of(sender))) {
      if (static_cast<std::int32_t>(each.group) == group) sender.group = &each;
    }
    sender.group_left = sender.group->elements;
  }
  sender.group_left -= elements;
  if (sender.group_left > 0) return;
  work.groups.push_back({sender.group->group, sender.group->tensors, sender.scratch, work.jobs.size()});
  sender.group = nullptr;
}

void UpdateSession::count(const ApplyStats& stats) {
  receipt.batches += stats.copies.batches;
  receipt.copies += stats.copies.copies;
  receipt.applied_bytes += stats.copies.bytes;
  receipt.runs += stats.runs;
  receipt.run_experts += stats.run_experts;
  for (const auto& [tensor, sum] : stats.input_sums) input_sums[tensor] = sum;
  for (const auto& [tensor, parts] : stats.cast_sums) {
    cast_sums[tensor].read += parts.read;
    cast_sums[tensor].converted += parts.converted;
  }
}

double UpdateSession::lap_ms() {
  const std::int64_t now = clock->now_ns();
  const double ms = static_cast<double>(now - (phase_ns != 0 ? phase_ns : opened_ns)) / 1e6;
  phase_ns = now;
  return ms;
}

std::string UpdateSession::waiting_for() const {
  std::string names;
  for (const SessionSender& sender : senders) {
    const char* due = nullptr;
    if (!sender.part) {
      due = "MANIFEST";
    } else if (!begun && !sender.confirmed) {
      due = "CONFIRM";
    } else if (begun && !sender.ended) {
      due = "BUCKET or END";
    }
    if (due == nullptr) continue;
    if (!names.empty()) names += ", ";
    names += fmt::format("{} of sender {}{}", due, sender.name, sender.peer ? "" : " (not connected)");
  }
  if (names.empty() && !senders.empty()) names = fmt::format("COMMIT of sender {}", senders.front().name);
  return names.empty() ? "finish()" : names;
}

}  // namespace headrace
