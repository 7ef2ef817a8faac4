#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/base/unique_fd.h"
#include "core/device/device.h"

namespace headrace {

/// How bucket bytes get from a sender to a receiver. The numbers are the wire's.
enum class DataPathKind : std::uint8_t {
  kShm = 1,     // host memory of the same machine, mapped by descriptor
  kInline = 2,  // bytes travel in the bucket message
};
std::string_view data_path_name(DataPathKind kind) noexcept;
std::optional<DataPathKind> parse_data_path(std::string_view name) noexcept;

/// The sender's side: memory that buckets are packed into. One thread.
class DataSource {
 public:
  virtual ~DataSource() = default;
  virtual DataPathKind kind() const noexcept = 0;
  /// Memory for one staging buffer or one registered source, touched once. It lives until release() or the destruction of this object.
  virtual Result<MemoryId> allocate(std::size_t bytes) = 0;
  /// Takes over memory that the caller made (a memfd, sealed against shrinking by us if it is not). kUnsupported where a path has no such
  /// memory. bytes() of it may only be read, unless the device of this source allocated it.
  virtual Result<MemoryId> adopt(UniqueFd descriptor, std::size_t bytes) = 0;
  virtual std::span<std::byte> bytes(MemoryId memory) const = 0;
  /// What a receiver needs before it can read this memory; -1 when nothing needs to be sent beforehand. Still owned by this object.
  virtual int descriptor(MemoryId memory) const = 0;
  /// Bytes that must travel with a bucket whose extents lie in the first `used` bytes of `memory`; empty when the receiver reads the memory
  /// itself.
  virtual std::span<const std::byte> attachment(MemoryId memory, std::size_t used) const = 0;
  virtual void release(MemoryId memory) = 0;
};

/// The receiver's side for one peer. One thread.
class DataSink {
 public:
  virtual ~DataSink() = default;
  virtual DataPathKind kind() const noexcept = 0;
  /// Maps what a descriptor carries. Refused: unsealed memory, another size than announced, an id already in use, more than limits allow.
  virtual Status attach(MemoryId memory, std::uint64_t bytes, UniqueFd descriptor) = 0;
  /// Unmaps. Precondition: no enqueued work reads it.
  virtual void detach(MemoryId memory) = 0;
  /// The readable bytes that extents of a bucket may point into. `attachment` is the bucket's own.
  virtual Result<std::span<const std::byte>> resolve(MemoryId memory, std::span<const std::byte> attachment) const = 0;
};

std::unique_ptr<DataSource> make_data_source(DataPathKind kind, Device& device);
std::unique_ptr<DataSink> make_data_sink(DataPathKind kind, Device& device);

}  // namespace headrace
