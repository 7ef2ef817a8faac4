#include "receiver/guard_page.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "core/base/check.h"

namespace headrace {
namespace {

// The page as docs/protocol.md describes it. Little-endian; every field is written by one rank and read by anybody.
constexpr std::uint64_t kMagic = 0x3144524147524148ULL;  // the bytes "HARGARD1"
constexpr std::size_t kHeaderBytes = 128;
constexpr std::size_t kEngineBytesMax = 64;
constexpr std::uint32_t kRanksMax = 4096;
constexpr int kLockMs = 5'000;

struct Header {
  std::uint64_t magic;
  std::uint32_t layout;
  std::uint32_t ranks;
  char engine[kEngineBytesMax + 1];
};
static_assert(sizeof(Header) <= kHeaderBytes);

struct Bank {
  std::atomic<std::uint64_t> session;
  std::atomic<std::uint64_t> run;
  std::atomic<std::uint64_t> step;
};

/// word = state | bank << 8 | count << 16. The bank that `word` names is never written while it is named.
struct Slot {
  std::atomic<std::uint64_t> word;
  Bank banks[2];
  std::uint64_t reserved;
};
static_assert(sizeof(Slot) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

std::size_t page_bytes(std::uint32_t ranks) {
  return (kHeaderBytes + ranks * sizeof(Slot) + 4095) / 4096 * 4096;
}

Header* header_of(std::byte* page) {
  return reinterpret_cast<Header*>(page);
}
Slot* slot_of(std::byte* page, std::uint32_t rank) {
  return reinterpret_cast<Slot*>(page + kHeaderBytes) + rank;
}

GuardSlot read_slot(const Slot& slot) {
  // A writer may change banks twice while we read; the count in the word tells. Bounded: a rank publishes a few times per update.
  GuardSlot result;
  for (int tries = 0; tries < 1000; ++tries) {
    const std::uint64_t word = slot.word.load(std::memory_order_acquire);
    const Bank& bank = slot.banks[(word >> 8) & 1];
    result.state = static_cast<SlotState>(word & 0xff);
    result.session = bank.session.load(std::memory_order_acquire);
    result.run = bank.run.load(std::memory_order_acquire);
    result.step = bank.step.load(std::memory_order_acquire);
    if (slot.word.load(std::memory_order_relaxed) == word) return result;
  }
  return GuardSlot{SlotState::kApplying, 0, 0, 0};
}

GuardView view_of(std::byte* page, std::uint32_t ranks) {
  GuardView view;
  view.engine = header_of(page)->engine;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) view.slots.push_back(read_slot(*slot_of(page, rank)));
  return view;
}

/// The lock is held for an instant; a process that was stopped while it had it must not stop all others.
Status lock_page(int fd, const std::filesystem::path& path) {
  const auto due = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLockMs);
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return errno_status(errno, fmt::format("lock guard page {}", path.string()));
    if (std::chrono::steady_clock::now() >= due) {
      return Status(Code::kDeadlineExceeded, fmt::format("lock guard page {}: somebody has held it for {} ms", path.string(), kLockMs));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return ok_status();
}

Status bad_page(const std::filesystem::path& path, std::string_view why) {
  return Status(Code::kFailedPrecondition, fmt::format("guard page {}: {}", path.string(), why));
}

}  // namespace

std::string_view slot_state_name(SlotState state) noexcept {
  switch (state) {
    case SlotState::kNone: return "none";
    case SlotState::kCommitted: return "committed";
    case SlotState::kApplying: return "applying";
    case SlotState::kPrepared: return "prepared";
    case SlotState::kTorn: return "torn";
    case SlotState::kInDoubt: return "in_doubt";
  }
  return "unknown";
}

bool GuardView::open() const noexcept {
  if (slots.empty()) return false;
  for (const GuardSlot& slot : slots)
    if (slot.state != SlotState::kCommitted || slot.run != slots[0].run || slot.step != slots[0].step) return false;
  return true;
}

Result<GuardPage> GuardPage::create(const std::filesystem::path& path, const std::string& engine, std::uint32_t ranks, std::uint32_t rank) {
  if (ranks == 0 || ranks > kRanksMax || rank >= ranks) {
    return Status(Code::kInvalidArgument,
                  fmt::format("guard page {}: rank {} of {} ranks, at most {}", path.string(), rank, ranks, kRanksMax));
  }
  if (engine.empty() || engine.size() > kEngineBytesMax) return bad_page(path, fmt::format("engine name of {} bytes", engine.size()));
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return errno_status(errno, fmt::format("open guard page {}", path.string()));
  // Ranks start at the same time: whoever holds the lock first lays the page out, the others find it done.
  HEADRACE_RETURN_IF_ERROR(lock_page(fd.get(), path));
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) return errno_status(errno, fmt::format("stat guard page {}", path.string()));
  const std::size_t bytes = page_bytes(ranks);
  if (info.st_size != 0 && static_cast<std::size_t>(info.st_size) != bytes) {
    return bad_page(path, fmt::format("has {} bytes, {} ranks need {}", info.st_size, ranks, bytes));
  }
  if (info.st_size == 0) {
    // Beyond this limit the kernel sends a signal instead of an answer.
    struct rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
      return errno_status(EFBIG, fmt::format("allocate guard page {}: {} bytes, the file size limit of this process is {}", path.string(),
                                             bytes, limit.rlim_cur));
    }
    const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
    if (error != 0) return errno_status(error, fmt::format("allocate guard page {}", path.string()));
  }
  Result<MappedRegion> region = MappedRegion::map_shared(fd.get(), bytes, true);
  if (!region.ok()) return region.status();
  std::byte* page = region.value().data();
  Header* header = header_of(page);
  if (header->magic == 0) {
    header->layout = 1;
    header->ranks = ranks;
    std::memcpy(header->engine, engine.c_str(), engine.size() + 1);
    header->magic = kMagic;
  }
  if (header->magic != kMagic || header->layout != 1) return bad_page(path, "is not a guard page of layout 1");
  if (header->ranks != ranks) return bad_page(path, fmt::format("is for {} ranks, this engine has {}", header->ranks, ranks));
  GuardPage guard(std::move(region).value(), rank);
  guard.publish(SlotState::kNone, 0, WeightVersion{});
  ::flock(fd.get(), LOCK_UN);  // closing does not: the mapping keeps the open file, and the lock with it, alive
  return guard;
}

void GuardPage::publish(SlotState state, std::uint64_t session, const WeightVersion& version) noexcept {
  Slot& slot = *slot_of(region_.data(), rank_);
  const std::uint64_t word = slot.word.load(std::memory_order_relaxed);
  const std::uint64_t bank_number = ((word >> 8) & 1) ^ 1;
  Bank& bank = slot.banks[bank_number];
  const bool versioned = state == SlotState::kPrepared || state == SlotState::kCommitted || state == SlotState::kInDoubt;
  bank.session.store(session, std::memory_order_relaxed);
  bank.run.store(versioned ? run_number(version.run) : 0, std::memory_order_relaxed);
  bank.step.store(versioned ? version.step : 0, std::memory_order_relaxed);
  slot.word.store(static_cast<std::uint64_t>(state) | bank_number << 8 | ((word >> 16) + 1) << 16, std::memory_order_release);
}

GuardView GuardPage::view() const {
  return view_of(region_.data(), header_of(region_.data())->ranks);
}

Result<GuardView> GuardPage::read(const std::filesystem::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) return errno_status(errno, fmt::format("open guard page {}", path.string()));
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) return errno_status(errno, fmt::format("stat guard page {}", path.string()));
  const auto bytes = static_cast<std::size_t>(info.st_size);
  if (bytes < page_bytes(1) || bytes > page_bytes(kRanksMax)) return bad_page(path, fmt::format("has {} bytes", bytes));
  Result<MappedRegion> region = MappedRegion::map_shared(fd.get(), bytes, false);
  if (!region.ok()) return region.status();
  const Header* header = header_of(region.value().data());
  if (header->magic != kMagic || header->layout != 1 || page_bytes(header->ranks) != bytes)
    return bad_page(path, "is not a guard page of layout 1");
  return view_of(region.value().data(), header->ranks);
}

}  // namespace headrace
