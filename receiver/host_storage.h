#pragma once

#include <memory>
#include <vector>

#include "core/device/device.h"
#include "receiver/models/family.h"
#include "receiver/storage_table.h"

namespace headrace {

/// Live storage of its own for a layout, for ranks that have no engine around them (`headrace serve`, tests, tools). One memory per
/// storage, touched; an alias shares that of the storage it names.
class HostStorage {
 public:
  /// kResourceExhausted names the storage, its bytes and the total.
  static Result<HostStorage> allocate(const ModelLayout& layout, Device& device);
  const StorageTable& table() const noexcept { return *table_; }

 private:
  Status add_alias(const StorageSpec& spec);

  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::unique_ptr<StorageTable> table_;
};

}  // namespace headrace
