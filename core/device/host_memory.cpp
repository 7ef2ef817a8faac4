#include "core/device/host_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <thread>

#include "core/base/worker_pool.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

namespace headrace {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kTouchPieceBytes = std::size_t{64} << 20;
constexpr std::size_t kTouchThreadsMax = 4;

std::size_t page_bytes() {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// Memory that the kernel could still give out, swap included; nullopt where it does not say.
std::optional<std::uint64_t> available_bytes() {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return std::nullopt;
  std::optional<std::uint64_t> available;
  std::uint64_t swap_free = 0;
  char line[256];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    unsigned long long kib = 0;
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) available = kib * 1024;  // NOLINT(cert-err34-c): the kernel's own numbers
    if (std::sscanf(line, "SwapFree: %llu kB", &kib) == 1) swap_free = kib * 1024;      // NOLINT(cert-err34-c)
  }
  std::fclose(file);
  if (available) *available += swap_free;
  return available;
}

Status exhausted(const AllocateOptions& options, std::string_view reason, int error_number = 0) {
  const auto available = available_bytes();
  return Status(Code::kResourceExhausted,
                fmt::format("allocate host memory '{}': {} bytes asked for, {} bytes free: {}", options.label, options.bytes,
                            available ? std::to_string(*available) : "an unknown number of", reason),
                error_number == 0 ? ErrorSource::kHeadrace : ErrorSource::kErrno, error_number);
}

Status failed(const AllocateOptions& options, std::string_view step, int error_number) {
  Status status = errno_status(error_number, step);
  if (status.code() == Code::kResourceExhausted) return exhausted(options, status.message(), error_number);
  return Status(status.code(), fmt::format("allocate host memory '{}': {} bytes: {}", options.label, options.bytes, status.message()),
                ErrorSource::kErrno, error_number);
}

/// Refuses what the kernel would answer with a signal or with the out-of-memory killer.
Status check_size(const AllocateOptions& options) {
  if (options.bytes == 0) return Status(Code::kInvalidArgument, fmt::format("allocate host memory '{}': 0 bytes", options.label));
  if (options.bytes > static_cast<std::size_t>(PTRDIFF_MAX) - 2 * kHugePageBytes)
    return exhausted(options, "more than an address space holds");
  if (options.exportable) {
    struct rlimit limit = {};
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && options.bytes > limit.rlim_cur) {
      return exhausted(options, fmt::format("the file size limit of this process is {} bytes", limit.rlim_cur));
    }
  }
  const auto available = available_bytes();
  if ((options.exportable || options.touch) && available && options.bytes > *available) return exhausted(options, "it does not fit");
  return ok_status();
}

/// Maps `bytes` at an address aligned to a huge page if they fill one. `fd` -1 maps private memory.
Result<MappedRegion> map_aligned(std::size_t bytes, int fd, int protection) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  const std::size_t mapped = round_up(bytes, page_bytes());
  if (bytes < kHugePageBytes) {
    void* address = ::mmap(nullptr, mapped, protection, flags, fd, 0);
    if (address == MAP_FAILED) return errno_status(errno, fmt::format("map {} bytes", bytes));
    return MappedRegion(address, mapped);
  }
  const std::size_t reserved = mapped + kHugePageBytes;
  void* reservation = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reservation == MAP_FAILED) return errno_status(errno, fmt::format("reserve {} bytes of address space", reserved));
  auto* const base = static_cast<std::byte*>(reservation);
  const auto misaligned = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(base) % kHugePageBytes);
  std::byte* const aligned = base + (misaligned == 0 ? 0 : kHugePageBytes - misaligned);
  if (::mmap(aligned, mapped, protection, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error_number = errno;
    ::munmap(reservation, reserved);
    return errno_status(error_number, fmt::format("map {} bytes", bytes));
  }
  const auto head = static_cast<std::size_t>(aligned - base);
  if (head > 0) ::munmap(base, head);
  if (reserved > head + mapped) ::munmap(aligned + mapped, reserved - head - mapped);
  return MappedRegion(aligned, mapped);
}

/// Makes every page present without changing it; 0 or the errno of the first failure. A kernel without the advice leaves it to page faults.
int populate(std::span<std::byte> bytes, int advice) {
  const std::size_t pieces = (bytes.size() + kTouchPieceBytes - 1) / kTouchPieceBytes;
  std::vector<int> outcomes(pieces, 0);
  const auto touch_piece = [&](std::size_t piece) {
    const std::size_t offset = piece * kTouchPieceBytes;
    const std::size_t length = std::min(kTouchPieceBytes, bytes.size() - offset);
    int rc = 0;
    do {
      rc = ::madvise(bytes.data() + offset, length, advice);
    } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
    outcomes[piece] = rc == 0 ? 0 : errno;
  };
  const std::size_t threads = std::min({pieces, kTouchThreadsMax, std::size_t{std::max(1U, std::thread::hardware_concurrency())}});
  if (threads <= 1) {
    for (std::size_t piece = 0; piece < pieces; ++piece) touch_piece(piece);
  } else {
    WorkerPool(threads).run(pieces, touch_piece);
  }
  for (const int outcome : outcomes) {
    if (outcome != 0 && outcome != EINVAL && outcome != ENOSYS) return outcome == EFAULT ? ENOMEM : outcome;
  }
  return 0;
}

Status touch(const AllocateOptions& options, const MappedRegion& region) {
  if (!options.touch) return ok_status();
  const int error_number = populate(region.bytes(), MADV_POPULATE_WRITE);
  if (error_number != 0) return failed(options, "back its pages", error_number);
  return ok_status();
}

/// fallocate() makes a full memory file system an error here instead of a SIGBUS at the first write.
Result<UniqueFd> make_memfd(const AllocateOptions& options) {
  const std::string name = "headrace:" + options.label.substr(0, 200);
  UniqueFd fd(::memfd_create(name.c_str(), MFD_ALLOW_SEALING | MFD_CLOEXEC));
  if (!fd.valid()) return failed(options, "memfd_create", errno);
  const auto size = static_cast<off_t>(options.bytes);
  if (::ftruncate(fd.get(), size) != 0) return failed(options, "ftruncate", errno);
  int rc = 0;
  do {
    rc = ::fallocate(fd.get(), 0, 0, size);
  } while (rc != 0 && errno == EINTR);
  if (rc != 0) return failed(options, "fallocate", errno);
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return failed(options, "seal against shrinking", errno);
  return fd;
}

}  // namespace

Result<HostMapping> map_private(const AllocateOptions& options) {
  HEADRACE_RETURN_IF_ERROR(check_size(options));
  auto region = map_aligned(options.bytes, -1, PROT_READ | PROT_WRITE);
  if (!region.ok()) return failed(options, region.status().message(), region.status().native());
  HostMapping mapping{std::move(region).value(), options.bytes, UniqueFd()};
  // Both are hints: a kernel that does not know them is as right.
  ::madvise(mapping.region.data(), mapping.region.size(), MADV_HUGEPAGE);
  const std::string name = "headrace:" + options.label.substr(0, 60);
  ::prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, mapping.region.data(), mapping.region.size(), name.c_str());
  HEADRACE_RETURN_IF_ERROR(touch(options, mapping.region));
  return mapping;
}

Result<HostMapping> map_exportable(const AllocateOptions& options) {
  HEADRACE_RETURN_IF_ERROR(check_size(options));
  auto fd = make_memfd(options);
  if (!fd.ok()) return fd.status();
  auto region = map_aligned(options.bytes, fd.value().get(), PROT_READ | PROT_WRITE);
  if (!region.ok()) return failed(options, region.status().message(), region.status().native());
  HostMapping mapping{std::move(region).value(), options.bytes, std::move(fd).value()};
  HEADRACE_RETURN_IF_ERROR(touch(options, mapping.region));
  return mapping;
}

Result<HostMapping> map_imported(UniqueFd descriptor, std::size_t bytes) {
  if (!descriptor.valid()) return Status(Code::kInvalidArgument, "import host memory: no descriptor");
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0) return Status(Code::kInvalidArgument, "import host memory: the descriptor is not a memfd", ErrorSource::kErrno, errno);
  struct stat info = {};
  if (::fstat(descriptor.get(), &info) != 0) return errno_status(errno, "import host memory: fstat");
  if (!S_ISREG(info.st_mode)) return Status(Code::kInvalidArgument, "import host memory: the descriptor is not a memory file");
  if (bytes == 0 || static_cast<std::uint64_t>(info.st_size) != bytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("import host memory: {} bytes announced, the descriptor has {}", bytes, info.st_size));
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("import host memory of {} bytes: it is not sealed against shrinking (seals {:#x})", bytes, seals));
  }
  // Reading a hole fills it. A file of holes costs its owner nothing and would cost this host everything.
  const auto held = static_cast<std::uint64_t>(info.st_blocks) * 512;
  const auto available = available_bytes();
  if (available && held < bytes && bytes - held > *available) {
    return Status(
        Code::kResourceExhausted,
        fmt::format("import host memory of {} bytes: only {} are there, and {} bytes of memory are free", bytes, held, *available));
  }
  auto region = map_aligned(bytes, descriptor.get(), PROT_READ);
  if (!region.ok())
    return Status(region.status().code(), "import host memory: " + region.status().message(), ErrorSource::kErrno,
                  region.status().native());
  // Sealed files may still have holes, and a hole that cannot be filled is a SIGBUS at the first read: find out here.
  const int error_number = populate(region.value().bytes(), MADV_POPULATE_READ);
  if (error_number != 0) return errno_status(error_number, fmt::format("import host memory of {} bytes: read its pages", bytes));
  return HostMapping{std::move(region).value(), bytes, std::move(descriptor)};
}

Result<HostMappings::Key> HostMappings::key_of(int descriptor) {
  struct stat info = {};
  if (::fstat(descriptor, &info) != 0) return errno_status(errno, "identify shared host memory: fstat");
  return Key(info.st_dev, info.st_ino);
}

void HostMappings::remember(const Key& key, const std::shared_ptr<const HostMapping>& mapping) {
  std::erase_if(mappings_, [](const auto& entry) { return entry.second.expired(); });
  mappings_[key] = mapping;
}

Result<std::shared_ptr<const HostMapping>> HostMappings::add(HostMapping mapping) {
  auto key = key_of(mapping.descriptor.get());
  if (!key.ok()) return key.status();
  auto shared = std::make_shared<const HostMapping>(std::move(mapping));
  const std::lock_guard lock(mutex_);
  remember(key.value(), shared);
  return shared;
}

Result<std::shared_ptr<const HostMapping>> HostMappings::import(UniqueFd descriptor, std::size_t bytes) {
  auto key = descriptor.valid() ? key_of(descriptor.get()) : Result<Key>(Key{});
  if (!key.ok()) return key.status();
  const std::lock_guard lock(mutex_);
  if (const auto found = mappings_.find(key.value()); found != mappings_.end()) {
    // A mapping keeps its descriptor open, so a live entry is this very file and not a later one with the same number.
    if (auto mapping = found->second.lock(); mapping != nullptr && mapping->bytes == bytes) return mapping;
  }
  auto mapped = map_imported(std::move(descriptor), bytes);
  if (!mapped.ok()) return mapped.status();
  auto shared = std::make_shared<const HostMapping>(std::move(mapped).value());
  remember(key.value(), shared);
  return std::shared_ptr<const HostMapping>(std::move(shared));
}

}  // namespace headrace
