#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/digest.h"
#include "core/base/status.h"
#include "core/wire/messages.h"
#include "kernels/fingerprint.h"
#include "sender_sdk/sender.h"

namespace headrace {

/// What this sender brings in an update: checked entries, their bytes on the wire, and the way from a name to its entry. Equal entries
/// update after update are hashed once. One thread writes; assign() is the only writer.
class EntryTable {
 public:
  /// kInvalidArgument names the first entry that is wrong: an empty, long or repeated name, a dtype of less than a byte, a shape that
  /// overflows, a box that does not fit. The table is empty then.
  Status assign(std::span<const SenderEntry> entries);

  std::span<const wire::ManifestEntry> entries() const noexcept { return entries_; }
  const std::vector<std::byte>& encoded() const noexcept { return encoded_; }
  const Digest& digest() const noexcept { return digest_; }
  TensorKey key(std::size_t entry) const noexcept { return keys_[entry]; }
  /// The entry of this name. Tensors mostly come in the order of their entries, so `expected` is looked at before the table of names.
  std::optional<std::uint32_t> find(std::string_view name, std::size_t expected = 0) const;
  /// Bytes of all entries.
  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  bool same_as(std::span<const SenderEntry> entries) const;
  Status add(const SenderEntry& entry, std::size_t index);

  std::vector<wire::ManifestEntry> entries_;
  std::vector<std::byte> encoded_;
  Digest digest_;
  std::vector<TensorKey> keys_;
  std::unordered_map<std::string_view, std::uint32_t> by_name_;  // views of the names in entries_
  std::uint64_t bytes_ = 0;
};

}  // namespace headrace
