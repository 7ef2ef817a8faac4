#include "core/transport/inline_data_path.h"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "core/base/check.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

class InlineSource final : public DataSource {
 public:
  explicit InlineSource(Device& device) : device_(device) {}

  DataPathKind kind() const noexcept override { return DataPathKind::kInline; }

  Result<MemoryId> allocate(std::size_t bytes) override {
    if (bytes > limits::kAttachmentBytesMax) {
      return Status(Code::kInvalidArgument, fmt::format("allocate {} bytes that travel in messages: one message carries at most {}", bytes,
                                                        limits::kAttachmentBytesMax));
    }
    auto memory = device_.allocate({.bytes = bytes, .exportable = false, .touch = true, .label = "staging"});
    if (!memory.ok()) return memory.status();
    const MemoryId id{random_u64()};
    memories_.emplace(id, std::move(memory).value());
    return id;
  }

  Result<MemoryId> adopt(UniqueFd /*descriptor*/, std::size_t bytes) override {
    return Status(Code::kUnsupported, fmt::format("adopt memory of {} bytes: on the inline path bytes travel in messages", bytes));
  }

  std::span<std::byte> bytes(MemoryId memory) const override {
    const auto found = memories_.find(memory);
    return found == memories_.end() ? std::span<std::byte>() : found->second->bytes();
  }

  int descriptor(MemoryId /*memory*/) const override { return -1; }

  std::span<const std::byte> attachment(MemoryId memory, std::size_t used) const override {
    const auto all = bytes(memory);
    HEADRACE_CHECK(used <= all.size(), "a bucket cannot use more bytes than its memory has");
    return all.first(used);
  }

  void release(MemoryId memory) override { memories_.erase(memory); }

 private:
  Device& device_;
  std::map<MemoryId, std::unique_ptr<DeviceMemory>> memories_;
};

class InlineSink final : public DataSink {
 public:
  DataPathKind kind() const noexcept override { return DataPathKind::kInline; }

  Status attach(MemoryId memory, std::uint64_t bytes, UniqueFd /*descriptor*/) override {
    return Status(Code::kUnsupported,
                  fmt::format("attach memory {:#x} of {} bytes: on the inline path bytes travel in messages", memory.value, bytes));
  }

  void detach(MemoryId /*memory*/) override {}

  Result<std::span<const std::byte>> resolve(MemoryId memory, std::span<const std::byte> attachment) const override {
    if (attachment.empty()) {
      return Status(Code::kInvalidArgument,
                    fmt::format("read memory {:#x}: no bytes came in the message, but the data path is inline", memory.value));
    }
    return attachment;
  }
};

}  // namespace

std::unique_ptr<DataSource> make_inline_source(Device& device) {
  return std::make_unique<InlineSource>(device);
}

std::unique_ptr<DataSink> make_inline_sink() {
  return std::make_unique<InlineSink>();
}

}  // namespace headrace
