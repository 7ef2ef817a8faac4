#include "receiver/host_storage.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace headrace {
namespace {

constexpr std::int64_t kCanaryBytes = 64;

Storage row_of(const StorageSpec& spec, std::byte* address) {
  Storage row;
  row.name = spec.name;
  row.dtype = spec.dtype;
  row.shape = spec.shape;
  row.strides = spec.strides;
  row.address = address;
  row.bytes = spec.bytes;
  row.optional = spec.optional;
  row.alias_of = spec.alias_of;
  row.owners = spec.owners;
  return row;
}

/// Storages begin at addresses that an allocator would give them, so that alignment does not change a plan.
std::int64_t aligned(std::int64_t bytes) {
  constexpr std::int64_t kAlignment = 4096;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Of all storages, those of aliases left out.
std::int64_t bytes_of(const ModelLayout& layout) {
  std::int64_t total = 0;
  for (const StorageSpec& spec : layout.storages) total += spec.alias_of.empty() ? aligned(spec.bytes) : 0;
  return total;
}

}  // namespace

Result<MappedRegion> reserve_addresses(std::size_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return errno_status(errno, fmt::format("reserve {} bytes of addresses", bytes));
  return MappedRegion(address, bytes);
}

Status HostStorage::fill(const ModelLayout& layout, const std::function<Result<std::byte*>(const StorageSpec&)>& place) {
  table_ = std::make_unique<StorageTable>();
  for (const StorageSpec& spec : layout.storages) {
    std::byte* address = nullptr;
    if (spec.alias_of.empty()) {
      Result<std::byte*> placed = place(spec);
      if (!placed.ok()) return placed.status();
      address = placed.value();
    } else if (const Storage* shared = table_->find(spec.alias_of)) {
      address = shared->address;
    } else {
      return Status(Code::kInvalidArgument,
                    fmt::format("storage {}: alias of {}, which does not come before it", spec.name, spec.alias_of));
    }
    if (Result<StorageId> id = table_->add(row_of(spec, address)); !id.ok()) return id.status();
  }
  return ok_status();
}

Result<HostStorage> HostStorage::allocate(const ModelLayout& layout, Device& device) {
  const std::int64_t total = bytes_of(layout);
  HostStorage storage;
  HEADRACE_RETURN_IF_ERROR(storage.fill(layout, [&](const StorageSpec& spec) -> Result<std::byte*> {
    Result<std::unique_ptr<DeviceMemory>> memory =
        device.allocate({.bytes = static_cast<std::size_t>(spec.bytes), .exportable = false, .touch = true, .label = "headrace-live"});
    if (!memory.ok()) {
      return Status(memory.status().code(),
                    fmt::format("storage {} of {} bytes ({} in all): {}", spec.name, spec.bytes, total, memory.status().message()));
    }
    storage.memory_.push_back(std::move(memory).value());
    return storage.memory_.back()->data();
  }));
  Result<std::unique_ptr<DeviceMemory>> canary =
      device.allocate({.bytes = kCanaryBytes, .exportable = false, .touch = true, .label = "headrace-canary"});
  if (!canary.ok()) return Status(canary.status().code(), fmt::format("canary of {} bytes: {}", kCanaryBytes, canary.status().message()));
  storage.memory_.push_back(std::move(canary).value());
  HEADRACE_RETURN_IF_ERROR(storage.table_->add_canary({"host", storage.memory_.back()->data(), kCanaryBytes}));
  HEADRACE_RETURN_IF_ERROR(storage.table_->seal());
  return storage;
}

Result<HostStorage> HostStorage::reserve(const ModelLayout& layout) {
  HostStorage storage;
  Result<MappedRegion> region = reserve_addresses(static_cast<std::size_t>(std::max<std::int64_t>(bytes_of(layout), 1)));
  if (!region.ok()) return region.status();
  storage.reserved_ = std::move(region).value();
  std::byte* next = storage.reserved_.data();
  HEADRACE_RETURN_IF_ERROR(
      storage.fill(layout, [&](const StorageSpec& spec) -> Result<std::byte*> { return std::exchange(next, next + aligned(spec.bytes)); }));
  HEADRACE_RETURN_IF_ERROR(storage.table_->seal());
  return storage;
}

}  // namespace headrace
