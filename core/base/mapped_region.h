#pragma once

#include <cstddef>
#include <span>

#include "core/base/status.h"

namespace [[gnu::visibility("default")]] headrace {

/// Owns one memory mapping. Move-only. Any one thread at a time.
class MappedRegion {
 public:
  MappedRegion() = default;
  /// Takes over a mapping made by mmap.
  MappedRegion(void* address, std::size_t bytes) noexcept : address_(address), bytes_(bytes) {}
  MappedRegion(MappedRegion&& other) noexcept;
  MappedRegion& operator=(MappedRegion&& other) noexcept;
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;
  ~MappedRegion();

  /// Maps `bytes` of `fd` from offset 0, shared.
  static Result<MappedRegion> map_shared(int fd, std::size_t bytes, bool writable);
  /// Maps a whole file privately and read-only; an empty file gives an empty region.
  static Result<MappedRegion> map_file(int fd, std::size_t bytes);

  std::byte* data() const noexcept { return static_cast<std::byte*>(address_); }
  std::size_t size() const noexcept { return bytes_; }
  std::span<std::byte> bytes() const noexcept { return {data(), bytes_}; }

 private:
  void* address_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace headrace
