#include "receiver/host_storage.h"

#include <fmt/format.h>

namespace headrace {

Result<HostStorage> HostStorage::allocate(const ModelLayout& layout, Device& device) {
  std::int64_t total = 0;
  for (const StorageSpec& spec : layout.storages) total += spec.bytes;
  HostStorage storage;
  storage.table_ = std::make_unique<StorageTable>();
  for (const StorageSpec& spec : layout.storages) {
    Result<std::unique_ptr<DeviceMemory>> memory =
        device.allocate({.bytes = static_cast<std::size_t>(spec.bytes), .exportable = false, .touch = true, .label = "headrace-live"});
    if (!memory.ok()) {
      return Status(memory.status().code(),
                    fmt::format("storage {} of {} bytes ({} in all): {}", spec.name, spec.bytes, total, memory.status().message()));
    }
    storage.memory_.push_back(std::move(memory).value());
    Storage row;
    row.name = spec.name;
    row.dtype = spec.dtype;
    row.shape = spec.shape;
    row.strides = spec.strides;
    row.address = storage.memory_.back()->data();
    row.bytes = spec.bytes;
    row.optional = spec.optional;
    row.owners = spec.owners;
    if (Result<StorageId> id = storage.table_->add(std::move(row)); !id.ok()) return id.status();
  }
  HEADRACE_RETURN_IF_ERROR(storage.table_->seal());
  return storage;
}

}  // namespace headrace
