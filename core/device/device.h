#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/base/unique_fd.h"

namespace [[gnu::visibility("default")]] headrace {

enum class DeviceKind : std::uint8_t { kHost = 1, kCuda = 2 };
std::string_view device_kind_name(DeviceKind kind) noexcept;

/// What memory can be shared with: the same boot of the same machine, the same device.
struct DeviceIdentity {
  DeviceKind kind = DeviceKind::kHost;
  std::string boot_id;      // the kernel's, for "same host"
  std::string device_uuid;  // "host" for host memory
  bool operator==(const DeviceIdentity&) const = default;
};

/// Work of one stream up to a point. Copies share the point. Any thread.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() const = 0;
  /// Blocks the calling thread. kDeadlineExceeded after timeout_ms.
  virtual Status wait(std::int64_t timeout_ms) const = 0;
};

/// A FIFO of work. Any thread may enqueue. On the host a stream is a thread of its own, so that a missing wait between streams is a data
/// race that ThreadSanitizer sees.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Runs `work` after everything enqueued before. `work` must not throw and must keep what it captured alive. Host streams run it on their
  /// thread; a device stream calls it from the driver's callback thread, so it must not call into the device there.
  virtual Status enqueue(std::function<void()> work) = 0;
  /// Marks the present end of the queue.
  virtual Result<std::shared_ptr<Event>> record() = 0;
  /// Work enqueued on this stream from now on starts after `event`, also of another stream.
  virtual Status wait(std::shared_ptr<Event> event) = 0;
  /// Blocks until everything enqueued is done. kDeadlineExceeded after timeout_ms.
  virtual Status synchronize(std::int64_t timeout_ms) = 0;
};

/// Owns device memory. Its address is stable until it is destroyed. Any thread.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::byte* data() const noexcept = 0;
  virtual std::size_t size() const noexcept = 0;
  std::span<std::byte> bytes() const noexcept { return {data(), size()}; }
};

struct AllocateOptions {
  std::size_t bytes = 0;
  bool exportable = false;  // export_memory() will be called
  bool touch = true;        // back every page now, so that the first update does not pay for it
  std::string label;        // shows in error messages and in /proc/self/maps
};

/// One device of this process: where memory comes from and how it is shared. Any thread.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceIdentity& identity() const noexcept = 0;
  /// Zeroed memory, aligned to at least 4096 bytes (2 MiB where it is that large). kResourceExhausted names the sizes asked for and free.
  virtual Result<std::unique_ptr<DeviceMemory>> allocate(const AllocateOptions& options) = 0;
  /// A descriptor of exportable memory for another process, sealed against shrinking. The caller owns it.
  virtual Result<UniqueFd> export_memory(const DeviceMemory& memory) = 0;
  /// Maps memory that another process exported, read-only. Refused unless `bytes` is what the descriptor has and it is sealed against
  /// shrinking. An import of a segment that this process exported shares the exporter's mapping.
  virtual Result<std::unique_ptr<DeviceMemory>> import_memory(UniqueFd descriptor, std::size_t bytes) = 0;
  virtual Result<std::unique_ptr<Stream>> create_stream(std::string label) = 0;
};

/// The embedded default: memfd memory, threads as streams.
std::unique_ptr<Device> make_host_device();

}  // namespace headrace
