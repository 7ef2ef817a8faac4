#include "core/base/mapped_region.h"

#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <utility>

namespace headrace {

MappedRegion::MappedRegion(MappedRegion&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

MappedRegion& MappedRegion::operator=(MappedRegion&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedRegion::~MappedRegion() {
  if (address_ != nullptr) ::munmap(address_, bytes_);
}

Result<MappedRegion> MappedRegion::map_shared(int fd, std::size_t bytes, bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return errno_status(errno, "map " + std::to_string(bytes) + " shared bytes");
  return MappedRegion(address, bytes);
}

Result<MappedRegion> MappedRegion::map_file(int fd, std::size_t bytes) {
  if (bytes == 0) return MappedRegion();
  void* address = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  if (address == MAP_FAILED) return errno_status(errno, "map a file of " + std::to_string(bytes) + " bytes");
  return MappedRegion(address, bytes);
}

}  // namespace headrace
