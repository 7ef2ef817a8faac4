#include "receiver/host_storage.h"

#include <fmt/format.h>

namespace headrace {
namespace {

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

}  // namespace

Status HostStorage::add_alias(const StorageSpec& spec) {
  const Storage* shared = table_->find(spec.alias_of);
  if (shared == nullptr) {
    return Status(Code::kInvalidArgument, fmt::format("storage {}: alias of {}, which does not come before it", spec.name, spec.alias_of));
  }
  return table_->add(row_of(spec, shared->address)).status();
}

Result<HostStorage> HostStorage::allocate(const ModelLayout& layout, Device& device) {
  std::int64_t total = 0;
  for (const StorageSpec& spec : layout.storages) total += spec.bytes;
  HostStorage storage;
  storage.table_ = std::make_unique<StorageTable>();
  for (const StorageSpec& spec : layout.storages) {
    if (!spec.alias_of.empty()) {
      HEADRACE_RETURN_IF_ERROR(storage.add_alias(spec));
      continue;
    }
    Result<std::unique_ptr<DeviceMemory>> memory =
        device.allocate({.bytes = static_cast<std::size_t>(spec.bytes), .exportable = false, .touch = true, .label = "headrace-live"});
    if (!memory.ok()) {
      return Status(memory.status().code(),
                    fmt::format("storage {} of {} bytes ({} in all): {}", spec.name, spec.bytes, total, memory.status().message()));
    }
    storage.memory_.push_back(std::move(memory).value());
    if (Result<StorageId> id = storage.table_->add(row_of(spec, storage.memory_.back()->data())); !id.ok()) return id.status();
  }
  HEADRACE_RETURN_IF_ERROR(storage.table_->seal());
  return storage;
}

}  // namespace headrace
