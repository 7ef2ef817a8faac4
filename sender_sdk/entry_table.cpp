#include "sender_sdk/entry_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/wire/codec.h"
#include "core/wire/limits.h"

namespace headrace {

Status EntryTable::assign(std::span<const SenderEntry> entries) {
  if (!entries_.empty() && same_as(entries)) return ok_status();
  by_name_.clear();
  entries_.clear();
  keys_.clear();
  bytes_ = 0;
  if (entries.size() > limits::kManifestEntriesMax) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} entries, a manifest has at most {}", entries.size(), limits::kManifestEntriesMax));
  }
  entries_.reserve(entries.size());  // by_name_ points into it
  keys_.reserve(entries.size());
  by_name_.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (Status status = add(entries[i], i); !status.ok()) {
      by_name_.clear();
      entries_.clear();
      return status;
    }
  }
  encoded_ = wire::encode_entries(entries_);
  digest_ = digest_of(encoded_);
  return ok_status();
}

Status EntryTable::add(const SenderEntry& entry, std::size_t index) {
  const auto refused = [&](std::string_view why) {
    return Status(Code::kInvalidArgument, fmt::format("entry {} '{}' ({} {}): {}", index, entry.name.substr(0, 200),
                                                      dtype_name(entry.dtype), to_string(entry.shape), why));
  };
  if (entry.name.empty()) return refused("it has no name");
  if (entry.name.size() > limits::kNameBytesMax) {
    return refused(fmt::format("its name has {} bytes, at most {} are allowed", entry.name.size(), limits::kNameBytesMax));
  }
  if (dtype_bytes(entry.dtype) == 0) return refused("elements of less than a byte travel as U8 or I8");
  if (entry.shape.size() > limits::kDimsMax) return refused(fmt::format("at most {} dimensions are allowed", limits::kDimsMax));
  if (!byte_count(entry.dtype, entry.shape)) return refused("its bytes cannot be counted");
  Box box = entry.box.value_or(Box::whole(entry.shape));
  if (!box_fits(box, entry.shape)) return refused(fmt::format("box {} does not fit the shape", to_string(box)));
  bytes_ += static_cast<std::uint64_t>(box.elements() * dtype_bytes(entry.dtype));
  keys_.push_back(tensor_key(entry.name, entry.dtype, entry.shape));
  entries_.push_back({entry.name, entry.dtype, entry.shape, std::move(box)});
  if (!by_name_.try_emplace(entries_.back().name, static_cast<std::uint32_t>(index)).second) return refused("its name stands there twice");
  return ok_status();
}

bool EntryTable::same_as(std::span<const SenderEntry> entries) const {
  return std::equal(entries.begin(), entries.end(), entries_.begin(), entries_.end(),
                    [](const SenderEntry& given, const wire::ManifestEntry& kept) {
                      return given.name == kept.name && given.dtype == kept.dtype && given.shape == kept.shape &&
                             (given.box ? *given.box == kept.box : kept.box == Box::whole(kept.shape));
                    });
}

std::optional<std::uint32_t> EntryTable::find(std::string_view name, std::size_t expected) const {
  if (expected < entries_.size() && entries_[expected].name == name) return static_cast<std::uint32_t>(expected);
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return std::nullopt;
  return found->second;
}

}  // namespace headrace
