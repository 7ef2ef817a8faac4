#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/digest.h"
#include "core/base/dtype.h"
#include "core/base/ids.h"
#include "core/base/shape.h"
#include "core/base/status.h"

namespace [[gnu::visibility("default")]] headrace {

/// One piece of live storage as the engine has it after loading, post-processing and capture.
struct Storage {
  std::string name;  // the engine's runtime name
  Dtype dtype = Dtype::kU8;
  Shape shape;
  std::vector<std::int64_t> strides;  // elements; empty for contiguous row-major
  std::byte* address = nullptr;
  std::int64_t bytes = 0;
  bool captured = false;            // a captured graph has baked in the address
  bool optional = false;            // may stay unwritten
  std::string alias_of;             // name of an earlier entry with the same address and bytes; empty for none
  std::vector<std::string> owners;  // which models use it, e.g. {"target", "draft"}
};

/// Where a storage lies now; compared with what was sealed.
struct StorageLocation {
  StorageId storage;
  const std::byte* address = nullptr;
  std::int64_t bytes = 0;
};

/// Bytes of a memory pool that belong to the receiver: it writes a pattern there and looks whether it still is. One for each pool that an
/// engine gives back and gets again as a whole (sleep level 2), since all of a pool's content goes at once.
struct Canary {
  std::string pool;  // for messages
  std::byte* address = nullptr;
  std::int64_t bytes = 0;  // a multiple of 8, at least kCanaryBytesMin
};
inline constexpr std::int64_t kCanaryBytesMin = 16;

/// All live storage of one rank. Built once, sealed, then read-only. Not thread-safe until sealed, any thread afterwards.
class StorageTable {
 public:
  /// Refused: a name twice, no address, sizes that do not fit dtype, shape and strides, two entries whose bytes overlap without being
  /// declared aliases, an alias of something unknown or of other bytes, a sealed table.
  Result<StorageId> add(Storage storage);
  /// Without any, a discard that nobody announces is not noticed. Refused: a pool twice, no or too few bytes, a sealed table.
  Status add_canary(Canary canary);
  /// Fixes the table. kFailedPrecondition when it is empty or sealed already; kInvalidArgument when a canary lies in a storage or another.
  Status seal();
  bool sealed() const noexcept { return sealed_; }
  /// Of names, dtypes, shapes, strides, sizes, aliases and owners (not of addresses, which differ from one life to the next, nor of
  /// canaries).
  const Digest& digest() const;

  std::size_t size() const noexcept { return storages_.size(); }
  const Storage& at(StorageId id) const { return storages_.at(id.value); }
  const Storage* find(std::string_view name) const;
  std::span<const Storage> all() const noexcept { return storages_; }
  std::span<const Canary> canaries() const noexcept { return canaries_; }
  /// Sum of bytes, aliases counted once.
  std::int64_t total_bytes() const noexcept { return total_bytes_; }
  /// `present` says where every storage lies now. kFailedPrecondition names each that moved, changed its size or is not reported, with both
  /// addresses.
  Status check_identity(std::span<const StorageLocation> present) const;

 private:
  Status check_alias(const Storage& storage) const;
  Status check_overlap(const Storage& storage) const;
  Status check_canaries() const;

  std::vector<Storage> storages_;
  std::vector<Canary> canaries_;
  std::unordered_map<std::string, std::uint32_t> by_name_;
  std::map<std::uintptr_t, std::uint32_t> by_address_;  // first byte; no aliases, so no two overlap
  std::int64_t total_bytes_ = 0;
  Digest digest_;
  bool sealed_ = false;
};

}  // namespace headrace
