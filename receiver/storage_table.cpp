#include "receiver/storage_table.h"

#include <fmt/format.h>

#include <iterator>
#include <optional>
#include <utility>

#include "core/base/check.h"

namespace headrace {
namespace {

std::uintptr_t address_number(const std::byte* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

Status refused(const Storage& storage, std::string_view reason) {
  return Status(Code::kInvalidArgument, fmt::format("storage {} not added: {}", storage.name, reason));
}

/// Bytes from the first to the last element; nullopt on overflow or a stride that no engine has.
std::optional<std::int64_t> strided_extent(const Storage& storage) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < storage.shape.size(); ++i) {
    std::int64_t reach = 0;
    if (storage.strides[i] < 0 || __builtin_mul_overflow(storage.shape[i] - 1, storage.strides[i], &reach)) return std::nullopt;
    if (__builtin_add_overflow(last, reach, &last)) return std::nullopt;
  }
  std::int64_t bytes = 0;
  if (__builtin_add_overflow(last, std::int64_t{1}, &last)) return std::nullopt;
  if (__builtin_mul_overflow(last, std::int64_t{dtype_bits(storage.dtype)}, &bytes) || bytes % 8 != 0) return std::nullopt;
  return bytes / 8;
}

Status check_sizes(const Storage& storage) {
  if (storage.address == nullptr) return refused(storage, "it has no address");
  const auto packed = byte_count(storage.dtype, storage.shape);
  const std::string what = fmt::format("{} {}", dtype_name(storage.dtype), to_string(storage.shape));
  if (!packed) return refused(storage, fmt::format("{} has no whole number of bytes", what));
  if (storage.bytes <= 0 || *packed == 0) return refused(storage, fmt::format("{} in {} bytes is empty", what, storage.bytes));
  if (address_number(storage.address) > UINTPTR_MAX - static_cast<std::uintptr_t>(storage.bytes)) {
    return refused(storage, fmt::format("{} bytes reach past the end of memory", storage.bytes));
  }
  if (storage.strides.empty()) {
    if (*packed == storage.bytes) return ok_status();
    return refused(storage, fmt::format("{} takes {} bytes, the storage has {}", what, *packed, storage.bytes));
  }
  if (storage.strides.size() != storage.shape.size()) {
    return refused(storage, fmt::format("{} has {} strides", what, storage.strides.size()));
  }
  const auto extent = strided_extent(storage);
  if (extent && *extent <= storage.bytes && *packed <= storage.bytes) return ok_status();
  return refused(storage, fmt::format("{} with strides {} does not fit {} bytes", what, to_string(storage.strides), storage.bytes));
}

}  // namespace

Status StorageTable::check_alias(const Storage& storage) const {
  const Storage* original = find(storage.alias_of);
  if (original == nullptr) return refused(storage, fmt::format("it is an alias of {}, which is not in the table", storage.alias_of));
  if (original->address == storage.address && original->bytes == storage.bytes) return ok_status();
  return refused(storage, fmt::format("it is an alias of {}, but has {} bytes at {} and the other has {} at {}", storage.alias_of,
                                      storage.bytes, fmt::ptr(storage.address), original->bytes, fmt::ptr(original->address)));
}

Status StorageTable::check_overlap(const Storage& storage) const {
  const std::uintptr_t begin = address_number(storage.address);
  const std::uintptr_t end = begin + static_cast<std::uintptr_t>(storage.bytes);
  // Entries do not overlap each other, so only the last one that begins before `end` can reach into [begin, end).
  auto next = by_address_.lower_bound(end);
  if (next == by_address_.begin()) return ok_status();
  const Storage& other = storages_[std::prev(next)->second];
  if (address_number(other.address) + static_cast<std::uintptr_t>(other.bytes) <= begin) return ok_status();
  return refused(storage, fmt::format("its {} bytes at {} overlap {}, {} bytes at {}, and it is not declared an alias", storage.bytes,
                                      fmt::ptr(storage.address), other.name, other.bytes, fmt::ptr(other.address)));
}

Result<StorageId> StorageTable::add(Storage storage) {
  if (sealed_) return Status(Code::kFailedPrecondition, fmt::format("storage {} not added: the table is sealed", storage.name));
  if (storage.name.empty()) return refused(storage, "it has no name");
  if (by_name_.contains(storage.name)) return refused(storage, "the name is already in the table");
  HEADRACE_RETURN_IF_ERROR(check_sizes(storage));
  HEADRACE_RETURN_IF_ERROR(storage.alias_of.empty() ? check_overlap(storage) : check_alias(storage));
  const auto index = static_cast<std::uint32_t>(storages_.size());
  by_name_.emplace(storage.name, index);
  if (storage.alias_of.empty()) {
    by_address_.emplace(address_number(storage.address), index);
    total_bytes_ += storage.bytes;
  }
  storages_.push_back(std::move(storage));
  return StorageId{index};
}

Status StorageTable::add_canary(Canary canary) {
  const auto refused = [&](std::string_view why) {
    return Status(Code::kInvalidArgument, fmt::format("canary of pool {} not added: {}", canary.pool, why));
  };
  if (sealed_) return Status(Code::kFailedPrecondition, fmt::format("canary of pool {} not added: the table is sealed", canary.pool));
  if (canary.pool.empty()) return refused("the pool has no name");
  if (canary.address == nullptr) return refused("it has no address");
  if (canary.bytes < kCanaryBytesMin || canary.bytes % 8 != 0) {
    return refused(fmt::format("{} bytes, expected a multiple of 8 from {} on", canary.bytes, kCanaryBytesMin));
  }
  for (const Canary& other : canaries_) {
    if (other.pool == canary.pool) return refused("the pool has one already");
  }
  canaries_.push_back(std::move(canary));
  return ok_status();
}

Status StorageTable::check_canaries() const {
  for (std::size_t c = 0; c < canaries_.size(); ++c) {
    const Canary& canary = canaries_[c];
    const std::uintptr_t begin = address_number(canary.address);
    const std::uintptr_t end = begin + static_cast<std::uintptr_t>(canary.bytes);
    const auto overlaps = [&](const std::byte* address, std::int64_t bytes) {
      return address_number(address) < end && begin < address_number(address) + static_cast<std::uintptr_t>(bytes);
    };
    std::string other;
    for (const Storage& storage : storages_) {
      if (overlaps(storage.address, storage.bytes)) other = "storage " + storage.name;
    }
    for (std::size_t before = 0; before < c; ++before) {
      if (overlaps(canaries_[before].address, canaries_[before].bytes)) other = "the canary of pool " + canaries_[before].pool;
    }
    if (!other.empty()) return Status(Code::kInvalidArgument, fmt::format("canary of pool {} lies in {}", canary.pool, other));
  }
  return ok_status();
}

Status StorageTable::seal() {
  if (sealed_) return Status(Code::kFailedPrecondition, "storage table not sealed: it is sealed already");
  if (storages_.empty()) return Status(Code::kFailedPrecondition, "storage table not sealed: it is empty");
  HEADRACE_RETURN_IF_ERROR(check_canaries());
  Hasher hasher;
  hasher.text("headrace storage table").number(storages_.size());
  for (const Storage& storage : storages_) {
    hasher.text(storage.name).number(static_cast<std::uint64_t>(storage.dtype));
    hasher.number(storage.shape.size());
    for (const std::int64_t dimension : storage.shape) hasher.number(static_cast<std::uint64_t>(dimension));
    hasher.number(storage.strides.size());
    for (const std::int64_t stride : storage.strides) hasher.number(static_cast<std::uint64_t>(stride));
    hasher.number(static_cast<std::uint64_t>(storage.bytes)).text(storage.alias_of).number(storage.owners.size());
    for (const std::string& owner : storage.owners) hasher.text(owner);
  }
  digest_ = hasher.finish();
  sealed_ = true;
  return ok_status();
}

const Digest& StorageTable::digest() const {
  HEADRACE_CHECK(sealed_, "a storage table has no digest before seal()");
  return digest_;
}

const Storage* StorageTable::find(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  return found == by_name_.end() ? nullptr : &storages_[found->second];
}

Status StorageTable::check_identity(std::span<const StorageLocation> present) const {
  std::vector<bool> seen(storages_.size(), false);
  std::string defects;
  const auto defect = [&](const std::string& text) {
    if (!defects.empty()) defects += "; ";
    defects += text;
  };
  for (const StorageLocation& now : present) {
    if (now.storage.value >= storages_.size()) {
      return Status(Code::kInvalidArgument,
                    fmt::format("identity of storage {} not checked: the table has {} storages", now.storage.value, storages_.size()));
    }
    const Storage& sealed = storages_[now.storage.value];
    seen[now.storage.value] = true;
    if (now.address == sealed.address && now.bytes == sealed.bytes) continue;
    defect(fmt::format("{} sealed at {} with {} bytes, now at {} with {}", sealed.name, fmt::ptr(sealed.address), sealed.bytes,
                       fmt::ptr(now.address), now.bytes));
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (!seen[i]) defect(fmt::format("{} sealed at {}, now not reported", storages_[i].name, fmt::ptr(storages_[i].address)));
  }
  if (defects.empty()) return ok_status();
  return Status(Code::kFailedPrecondition, "live storage is not where it was sealed: " + defects);
}

}  // namespace headrace
