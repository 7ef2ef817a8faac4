#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/base/mapped_region.h"
#include "core/base/status.h"
#include "core/base/unique_fd.h"
#include "core/device/device.h"

namespace headrace {

/// One mapping of host memory and, where it can be shared, its memfd.
struct HostMapping {
  MappedRegion region;
  std::size_t bytes = 0;  // as asked for; the region may be longer by part of a page
  UniqueFd descriptor;    // invalid when the memory is private
};

/// Memory that is shared between whoever allocated it and whoever imported it in this process. Any thread.
class HostMemory final : public DeviceMemory {
 public:
  explicit HostMemory(std::shared_ptr<const HostMapping> mapping) : mapping_(std::move(mapping)) {}
  std::byte* data() const noexcept override { return mapping_->region.data(); }
  std::size_t size() const noexcept override { return mapping_->bytes; }
  const HostMapping& mapping() const noexcept { return *mapping_; }

 private:
  std::shared_ptr<const HostMapping> mapping_;  // shared: an import in the exporting process uses the exporter's mapping
};

/// Private, zeroed, huge-page aware memory.
Result<HostMapping> map_private(const AllocateOptions& options);
/// A memfd of exactly options.bytes, fully backed, sealed against shrinking and growing, mapped read-write.
Result<HostMapping> map_exportable(const AllocateOptions& options);
/// Maps a peer's memfd read-only after checking its kind, seals and size, with every page present.
Result<HostMapping> map_imported(UniqueFd descriptor, std::size_t bytes);

/// Which mappings of shared memory this process has, by the identity of the memfd: a second mapping of the same memory would hide data
/// races from ThreadSanitizer. Any thread.
class HostMappings {
 public:
  /// Remembers the mapping for as long as somebody uses it.
  Result<std::shared_ptr<const HostMapping>> add(HostMapping mapping);
  /// The mapping that exists already, or a new one made by map_imported().
  Result<std::shared_ptr<const HostMapping>> import(UniqueFd descriptor, std::size_t bytes);

 private:
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // st_dev, st_ino
  static Result<Key> key_of(int descriptor);
  void remember(const Key& key, const std::shared_ptr<const HostMapping>& mapping);

  std::mutex mutex_;
  std::map<Key, std::weak_ptr<const HostMapping>> mappings_;  // guarded by mutex_
};

}  // namespace headrace
