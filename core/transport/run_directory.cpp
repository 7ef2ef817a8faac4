#include "core/transport/run_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "core/transport/endpoint.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLockSuffix = ".lock";
constexpr std::string_view kSocketSuffix = ".ipc";
constexpr std::string_view kDescriptorSuffix = ".fds";
constexpr std::string_view kGuardSuffix = ".guard";
constexpr std::int64_t kDirectoryLockMs = 2'000;

fs::path with_suffix(const fs::path& stem, std::string_view suffix) {
  return fs::path(stem.string() + std::string(suffix));
}

Status check_name(std::string_view what, std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
  };
  const bool valid =
      !name.empty() && name.size() <= limits::kIdBytesMax && name != "." && name != ".." && std::ranges::all_of(name, allowed);
  if (valid) return ok_status();
  return Status(Code::kInvalidArgument, fmt::format("{} name '{}': expected 1 to {} characters of [A-Za-z0-9._-]", what,
                                                    name.substr(0, limits::kIdBytesMax), limits::kIdBytesMax));
}

/// Opens a directory that is ours and closed to others. In /tmp anybody may have put something else, or a link, in its place.
Result<UniqueFd> open_directory(const fs::path& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) {
    const Code code = errno == ENOENT ? Code::kUnavailable : Code::kFailedPrecondition;
    const Status reason = errno_status(errno, fmt::format("open run directory '{}'", path.string()));
    return Status(code, reason.message(), reason.source(), reason.native());
  }
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0) return errno_status(errno, fmt::format("look at run directory '{}'", path.string()));
  if (info.st_uid != ::geteuid()) {
    return Status(Code::kFailedPrecondition,
                  fmt::format("run directory '{}': it belongs to user {}, expected {}", path.string(), info.st_uid, ::geteuid()));
  }
  if ((info.st_mode & 077) != 0) {
    return Status(Code::kFailedPrecondition,
                  fmt::format("run directory '{}': mode {:04o} is open to others, expected 0700", path.string(), info.st_mode & 07777));
  }
  return fd;
}

Result<UniqueFd> ensure_directory(const fs::path& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    return errno_status(errno, fmt::format("create run directory '{}'", path.string()));
  return open_directory(path);
}

bool same_file(int fd, const fs::path& path) {
  struct stat open_file = {};
  struct stat named = {};
  return ::fstat(fd, &open_file) == 0 && ::lstat(path.c_str(), &named) == 0 && open_file.st_dev == named.st_dev &&
         open_file.st_ino == named.st_ino;
}

/// Held while files come and go, so that a cleaner never takes a new receiver's files for leftovers. Everybody holds it for an instant
/// only.
Result<UniqueFd> lock_directory(const fs::path& path, bool create) {
  const auto due = std::chrono::steady_clock::now() + std::chrono::milliseconds(kDirectoryLockMs);
  do {
    auto fd = create ? ensure_directory(path) : open_directory(path);
    if (!fd.ok()) return fd.status();
    // A cleaner may have removed the directory between open and lock; then the lock is on nothing.
    if (::flock(fd.value().get(), LOCK_EX | LOCK_NB) == 0) {
      if (same_file(fd.value().get(), path)) return fd;
      continue;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) return errno_status(errno, fmt::format("lock run directory '{}'", path.string()));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (std::chrono::steady_clock::now() < due);
  return Status(Code::kDeadlineExceeded,
                fmt::format("lock run directory '{}': somebody has held it for {} ms", path.string(), kDirectoryLockMs));
}

struct flock whole_file_lock() {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

/// Asks without taking the lock: a question must never make a receiver's start fail.
bool lock_is_held(const fs::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) return false;
  struct flock lock = whole_file_lock();
  return ::fcntl(fd.get(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

struct StemName {
  std::string engine;
  std::uint32_t rank = 0;
  auto operator<=>(const StemName&) const = default;
};

/// ENGINE-RANK; the engine may hold dashes of its own.
std::optional<StemName> parse_stem(std::string_view stem) {
  const std::size_t dash = stem.rfind('-');
  if (dash == std::string_view::npos || dash == 0) return std::nullopt;
  const std::string_view digits = stem.substr(dash + 1);
  StemName name{std::string(stem.substr(0, dash)), 0};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), name.rank);
  if (error != std::errc() || end != digits.data() + digits.size() || fmt::format("{}", name.rank) != digits) return std::nullopt;
  return name;
}

std::vector<std::string> list(const fs::path& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// What of ours lies in a job's directory.
struct Contents {
  std::set<StemName> stems;
  std::set<std::string> guards;  // engines
};

Contents read_contents(const fs::path& path) {
  Contents contents;
  for (const std::string& name : list(path)) {
    const fs::path file(name);
    const std::string suffix = file.extension().string();
    if (suffix == kGuardSuffix) {
      contents.guards.insert(file.stem().string());
    } else if (suffix == kLockSuffix || suffix == kSocketSuffix || suffix == kDescriptorSuffix) {
      if (auto stem = parse_stem(file.stem().string())) contents.stems.insert(std::move(*stem));
    }
  }
  return contents;
}

fs::path stem_path(const fs::path& directory, const StemName& name) {
  return directory / fmt::format("{}-{}", name.engine, name.rank);
}

void remove_file(const fs::path& path, bool dry_run, std::vector<fs::path>& removed) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0 || S_ISDIR(info.st_mode)) return;
  if (dry_run || ::unlink(path.c_str()) == 0) removed.push_back(path);
}

}  // namespace

EndpointClaim& EndpointClaim::operator=(EndpointClaim&& other) noexcept {
  std::swap(lock_, other.lock_);
  std::swap(stem_, other.stem_);
  return *this;
}

EndpointClaim::~EndpointClaim() {
  if (!lock_.valid()) return;
  ::unlink(with_suffix(stem_, kSocketSuffix).c_str());
  ::unlink(with_suffix(stem_, kDescriptorSuffix).c_str());
  // Last, and while it is held: whoever opens it now finds out that it is no longer the named file.
  ::unlink(with_suffix(stem_, kLockSuffix).c_str());
}

std::string EndpointClaim::endpoint() const {
  return "ipc://" + with_suffix(stem_, kSocketSuffix).string();
}

std::string EndpointClaim::descriptor_path() const {
  return with_suffix(stem_, kDescriptorSuffix).string();
}

fs::path RunDirectory::base() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");  // NOLINT(concurrency-mt-unsafe): nothing here sets the environment
  struct stat info = {};
  if (runtime != nullptr && runtime[0] == '/' && ::stat(runtime, &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid()) {
    return fs::path(runtime) / "headrace";
  }
  return fs::path("/tmp") / fmt::format("headrace-{}", ::geteuid());
}

Result<RunDirectory> RunDirectory::create(std::string_view job) {
  HEADRACE_RETURN_IF_ERROR(check_name("job", job));
  const fs::path path = base() / job;
  if (auto parent = ensure_directory(path.parent_path()); !parent.ok()) return parent.status();
  if (auto directory = ensure_directory(path); !directory.ok()) return directory.status();
  return RunDirectory(path, std::string(job));
}

Result<RunDirectory> RunDirectory::open(std::string_view job) {
  HEADRACE_RETURN_IF_ERROR(check_name("job", job));
  const fs::path path = base() / job;
  for (const fs::path& part : {path.parent_path(), path}) {
    auto directory = open_directory(part);
    if (directory.ok()) continue;
    if (directory.status().code() != Code::kUnavailable) return directory.status();
    return Status(Code::kUnavailable, fmt::format("job '{}': no run directory '{}'", job, path.string()));
  }
  return RunDirectory(path, std::string(job));
}

std::vector<std::string> RunDirectory::jobs() {
  std::vector<std::string> names;
  if (!open_directory(base()).ok()) return names;
  for (std::string& name : list(base())) {
    if (check_name("job", name).ok() && open_directory(base() / name).ok()) names.push_back(std::move(name));
  }
  return names;
}

Result<EndpointClaim> RunDirectory::claim(std::string_view engine, std::uint32_t rank) const {
  HEADRACE_RETURN_IF_ERROR(check_name("engine", engine));
  const fs::path stem = stem_path(path_, {std::string(engine), rank});
  HEADRACE_RETURN_IF_ERROR(check_socket_path(with_suffix(stem, kSocketSuffix).string()));
  const auto directory = lock_directory(path_, true);
  if (!directory.ok()) return directory.status();

  const fs::path path = with_suffix(stem, kLockSuffix);
  while (true) {
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!fd.valid()) return errno_status(errno, fmt::format("open lock file '{}'", path.string()));
    struct flock lock = whole_file_lock();
    if (::fcntl(fd.get(), F_OFD_SETLK, &lock) != 0) {
      if (errno != EAGAIN && errno != EACCES) return errno_status(errno, fmt::format("lock '{}'", path.string()));
      return Status(Code::kFailedPrecondition, fmt::format("engine '{}' rank {} of job '{}' is served already: ipc://{}", engine, rank,
                                                           job_, with_suffix(stem, kSocketSuffix).string()));
    }
    // A predecessor that ended just now removed the file that we opened: take the next one.
    if (!same_file(fd.get(), path)) continue;
    ::unlink(with_suffix(stem, kSocketSuffix).c_str());
    ::unlink(with_suffix(stem, kDescriptorSuffix).c_str());
    return EndpointClaim(std::move(fd), stem);
  }
}

std::vector<FoundEndpoint> RunDirectory::endpoints() const {
  std::vector<FoundEndpoint> found;
  for (const StemName& name : read_contents(path_).stems) {
    const fs::path stem = stem_path(path_, name);
    found.push_back(
        {job_, name.engine, name.rank, "ipc://" + with_suffix(stem, kSocketSuffix).string(), lock_is_held(with_suffix(stem, kLockSuffix))});
  }
  return found;
}

fs::path RunDirectory::guard_path(std::string_view engine) const {
  return path_ / fmt::format("{}{}", engine, kGuardSuffix);
}

std::vector<fs::path> RunDirectory::clean(bool dry_run) const {
  std::vector<fs::path> removed;
  const auto directory = lock_directory(path_, false);
  if (!directory.ok()) return removed;
  const Contents contents = read_contents(path_);
  std::set<std::string> alive;
  for (const StemName& name : contents.stems) {
    const fs::path stem = stem_path(path_, name);
    if (lock_is_held(with_suffix(stem, kLockSuffix))) {
      alive.insert(name.engine);
      continue;
    }
    for (const std::string_view suffix : {kSocketSuffix, kDescriptorSuffix, kLockSuffix})
      remove_file(with_suffix(stem, suffix), dry_run, removed);
  }
  for (const std::string& engine : contents.guards) {
    if (!alive.contains(engine)) remove_file(guard_path(engine), dry_run, removed);
  }
  const bool would_be_empty = list(path_).size() == (dry_run ? removed.size() : 0);
  if (would_be_empty && (dry_run || ::rmdir(path_.c_str()) == 0)) removed.push_back(path_);
  return removed;
}

}  // namespace headrace
