#include "core/transport/shm_data_path.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <map>
#include <utility>

#include "core/wire/limits.h"

namespace headrace {
namespace {

class ShmSource final : public DataSource {
 public:
  explicit ShmSource(Device& device) : device_(device) {}

  DataPathKind kind() const noexcept override { return DataPathKind::kShm; }

  Result<MemoryId> allocate(std::size_t bytes) override {
    auto memory = device_.allocate({.bytes = bytes, .exportable = true, .touch = true, .label = "staging"});
    if (!memory.ok()) return memory.status();
    auto descriptor = device_.export_memory(*memory.value());
    if (!descriptor.ok()) return descriptor.status();
    return keep(std::move(memory).value(), std::move(descriptor).value());
  }

  Result<MemoryId> adopt(UniqueFd descriptor, std::size_t bytes) override {
    if (!descriptor.valid()) return Status(Code::kInvalidArgument, "adopt memory: no descriptor");
    const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
    if (seals < 0) return Status(Code::kInvalidArgument, "adopt memory: the descriptor is not a memfd", ErrorSource::kErrno, errno);
    if ((seals & F_SEAL_SHRINK) == 0 && ::fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
      return errno_status(errno, fmt::format("adopt memory of {} bytes: seal it against shrinking", bytes));
    }
    UniqueFd copy(::fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return errno_status(errno, fmt::format("adopt memory of {} bytes: duplicate its descriptor", bytes));
    auto memory = device_.import_memory(std::move(copy), bytes);
    if (!memory.ok()) return memory.status();
    return keep(std::move(memory).value(), std::move(descriptor));
  }

  std::span<std::byte> bytes(MemoryId memory) const override {
    const auto found = memories_.find(memory);
    return found == memories_.end() ? std::span<std::byte>() : found->second.memory->bytes();
  }

  int descriptor(MemoryId memory) const override {
    const auto found = memories_.find(memory);
    return found == memories_.end() ? -1 : found->second.descriptor.get();
  }

  std::span<const std::byte> attachment(MemoryId /*memory*/, std::size_t /*used*/) const override { return {}; }

  void release(MemoryId memory) override { memories_.erase(memory); }

 private:
  struct Shared {
    std::unique_ptr<DeviceMemory> memory;
    UniqueFd descriptor;
  };

  MemoryId keep(std::unique_ptr<DeviceMemory> memory, UniqueFd descriptor) {
    // Random, since ids must differ over all sources of a sender, which do not know of each other.
    const MemoryId id{random_u64()};
    memories_.emplace(id, Shared{std::move(memory), std::move(descriptor)});
    return id;
  }

  Device& device_;
  std::map<MemoryId, Shared> memories_;
};

class ShmSink final : public DataSink {
 public:
  explicit ShmSink(Device& device) : device_(device) {}

  DataPathKind kind() const noexcept override { return DataPathKind::kShm; }

  Status attach(MemoryId memory, std::uint64_t bytes, UniqueFd descriptor) override {
    if (memories_.contains(memory)) {
      return Status(Code::kInvalidArgument, fmt::format("attach memory {:#x}: the id is in use", memory.value));
    }
    if (memories_.size() >= limits::kMemoriesMax) {
      return Status(Code::kResourceExhausted,
                    fmt::format("attach memory {:#x}: {} memories are attached, the most allowed", memory.value, limits::kMemoriesMax));
    }
    auto imported = device_.import_memory(std::move(descriptor), bytes);
    if (!imported.ok()) {
      const Status& status = imported.status();
      return Status(status.code(), fmt::format("attach memory {:#x}: {}", memory.value, status.message()), status.source(),
                    status.native());
    }
    memories_.emplace(memory, std::move(imported).value());
    return ok_status();
  }

  void detach(MemoryId memory) override { memories_.erase(memory); }

  Result<std::span<const std::byte>> resolve(MemoryId memory, std::span<const std::byte> attachment) const override {
    if (!attachment.empty()) {
      return Status(Code::kInvalidArgument, fmt::format("read memory {:#x}: {} bytes came in the message, but the data path is shm",
                                                        memory.value, attachment.size()));
    }
    const auto found = memories_.find(memory);
    if (found == memories_.end()) {
      return Status(Code::kFailedPrecondition, fmt::format("read memory {:#x}: it is not attached", memory.value));
    }
    return std::span<const std::byte>(found->second->bytes());
  }

 private:
  Device& device_;
  std::map<MemoryId, std::unique_ptr<DeviceMemory>> memories_;
};

}  // namespace

std::unique_ptr<DataSource> make_shm_source(Device& device) {
  return std::make_unique<ShmSource>(device);
}

std::unique_ptr<DataSink> make_shm_sink(Device& device) {
  return std::make_unique<ShmSink>(device);
}

}  // namespace headrace
