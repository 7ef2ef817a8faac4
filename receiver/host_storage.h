#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "core/base/mapped_region.h"
#include "core/device/device.h"
#include "receiver/models/family.h"
#include "receiver/storage_table.h"

namespace headrace {

/// Live storage of its own for a layout, for ranks that have no engine around them (`headrace serve`, tests, tools). One memory per
/// storage, touched; an alias shares that of the storage it names. They are one pool, "host", with a canary.
class HostStorage {
 public:
  /// kResourceExhausted names the storage, its bytes and the total.
  static Result<HostStorage> allocate(const ModelLayout& layout, Device& device);
  /// The same table on addresses that are reserved but have no memory: for who plans an update and never touches a byte.
  static Result<HostStorage> reserve(const ModelLayout& layout);
  const StorageTable& table() const noexcept { return *table_; }

 private:
  /// Gives each storage that is no alias its address, an alias that of its original.
  Status fill(const ModelLayout& layout, const std::function<Result<std::byte*>(const StorageSpec&)>& place);

  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  MappedRegion reserved_;
  std::unique_ptr<StorageTable> table_;
};

/// Addresses without memory behind them: whoever reads or writes there is ended by the kernel. kResourceExhausted names the bytes.
Result<MappedRegion> reserve_addresses(std::size_t bytes);

}  // namespace headrace
