#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "core/base/unique_fd.h"
#include "core/transport/run_directory.h"

namespace headrace::cli {
namespace {

/// One thing that was looked at. `advice` says what to change where something is missing.
struct Finding {
  std::string name;
  bool ok = true;
  std::string value;
  std::string advice;
};

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::uint64_t meminfo_bytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::uint64_t kib = 0;
  std::string unit;
  while (file >> name >> kib) {
    std::getline(file, unit);
    if (name == key + ":") return kib * 1024;
  }
  return 0;
}

Finding memory() {
  return {"memory",
          true,
          fmt::format("{} of {} available, pages of {} B", human_bytes(meminfo_bytes("MemAvailable")),
                      human_bytes(meminfo_bytes("MemTotal")), ::sysconf(_SC_PAGESIZE)),
          {}};
}

Finding shared_memory() {
  struct statvfs place{};
  if (::statvfs("/dev/shm", &place) != 0) return {"/dev/shm", true, "none (memfd memory is used, which needs no mount)", {}};
  const std::uint64_t block = place.f_frsize;
  return {"/dev/shm", true, fmt::format("{} free of {}", human_bytes(place.f_bavail * block), human_bytes(place.f_blocks * block)), {}};
}

Finding sealed_memory() {
  Finding finding{
      "memfd with seals", false, {}, "a kernel of 3.17 or newer is needed for the shm data path; without it use --data-path inline"};
  const UniqueFd fd(::memfd_create("headrace-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) {
    finding.value = errno_status(errno, "memfd_create").message();
  } else if (::ftruncate(fd.get(), 4096) != 0 || ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    finding.value = errno_status(errno, "seal a memfd against shrinking").message();
  } else if (::ftruncate(fd.get(), 0) == 0) {
    finding.value = "a sealed memfd could be shrunk";
  } else {
    finding = {"memfd with seals", true, "works", {}};
  }
  return finding;
}

Finding huge_pages() {
  const std::string anonymous = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  const std::string shared = first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  Finding finding{"huge pages",
                  true,
                  fmt::format("anonymous: {}; shared: {}", anonymous.empty() ? "none" : anonymous, shared.empty() ? "none" : shared),
                  {}};
  if (shared.find("[never]") != std::string::npos || shared.find("[deny]") != std::string::npos) {
    finding.advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled lets staging and storage use huge pages";
  }
  return finding;
}

Finding locked_memory() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string value = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : human_bytes(limit.rlim_cur);
  return {"locked memory", true, value, limit.rlim_cur == RLIM_INFINITY ? "" : "ulimit -l unlimited, where a network path must pin memory"};
}

Finding open_files() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  constexpr rlim_t kWanted = 1024;
  return {"open files", limit.rlim_cur >= kWanted, std::to_string(limit.rlim_cur),
          limit.rlim_cur >= kWanted ? "" : "ulimit -n 1024 or more"};
}

/// Whether a process may read another one of the same user, which the demo's judge does. A child of ours is the easiest case that there is.
Finding process_reading() {
  Finding finding{"process_vm_readv",
                  false,
                  {},
                  "kernel.yama.ptrace_scope of 2 or more, or a container without ptrace, forbids it: only the demo's judge needs it"};
  static const char kProbe[] = "headrace";
  const pid_t child = ::fork();
  if (child < 0) {
    finding.value = errno_status(errno, "fork").message();
    return finding;
  }
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  char copy[sizeof kProbe] = {};
  const iovec local{copy, sizeof copy};
  const iovec remote{const_cast<char*>(kProbe), sizeof kProbe};
  const ssize_t got = ::process_vm_readv(child, &local, 1, &remote, 1, 0);
  const int error = errno;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  if (got == static_cast<ssize_t>(sizeof kProbe) && std::memcmp(copy, kProbe, sizeof kProbe) == 0) {
    return {"process_vm_readv", true, "works", {}};
  }
  finding.value = errno_status(error, "read a child's memory").message();
  return finding;
}

Finding run_directory() {
  const std::filesystem::path base = RunDirectory::base();
  struct stat info{};
  if (::stat(base.c_str(), &info) != 0) return {"run directory", true, base.string() + " (made when a receiver starts)", {}};
  const bool good = S_ISDIR(info.st_mode) && info.st_uid == ::geteuid() && (info.st_mode & 0077) == 0;
  return {"run directory", good, fmt::format("{}, mode {:o}, owner {}", base.string(), info.st_mode & 07777, info.st_uid),
          good ? "" : "it must be a folder of mode 0700 that belongs to you"};
}

struct Leftover {
  std::string job;
  std::filesystem::path path;
};

Result<std::vector<Leftover>> leftovers(bool remove) {
  std::vector<Leftover> found;
  for (const std::string& job : RunDirectory::jobs()) {
    const Result<RunDirectory> directory = RunDirectory::open(job);
    if (!directory.ok()) return directory.status();
    for (const std::filesystem::path& path : directory.value().clean(!remove)) found.push_back({job, path});
  }
  return found;
}

JsonValue finding_json(const Finding& finding) {
  return JsonObject().set("name", finding.name).set("ok", finding.ok).set("value", finding.value).set("advice", finding.advice).done();
}

}  // namespace

ExitCode doctor(const DoctorOptions& options) {
  const JsonOutput json(options.json, "doctor");
  const std::vector<Finding> findings{memory(),        shared_memory(), sealed_memory(),   huge_pages(),
                                      locked_memory(), open_files(),    process_reading(), run_directory()};
  const Result<std::vector<Leftover>> left = leftovers(options.clean);
  if (!left.ok()) return finish_failed(left.status(), json);
  bool good = options.clean || left.value().empty();
  JsonValue::Array finding_items;
  for (const Finding& finding : findings) {
    good = good && finding.ok;
    finding_items.push_back(finding_json(finding));
    if (!json.text_allowed()) continue;
    fmt::print("{:<4} {:<18} {}\n", finding.ok ? "ok" : "BAD", finding.name, finding.value);
    if (!finding.advice.empty()) fmt::print("{:<4} {:<18} -> {}\n", "", "", finding.advice);
  }
  JsonValue::Array left_items;
  for (const Leftover& leftover : left.value()) {
    left_items.push_back(JsonObject().set("job", leftover.job).set("path", leftover.path.string()).set("removed", options.clean).done());
    if (json.text_allowed()) fmt::print("{} {}\n", options.clean ? "removed" : "left over:", leftover.path.string());
  }
  if (json.text_allowed() && !options.clean && !left.value().empty()) fmt::print("headrace doctor --clean removes what is left over\n");
  return finish_done(json, json.document().set("findings", finding_items).set("leftovers", left_items),
                     good ? ExitCode::kDone : ExitCode::kDifference);
}

}  // namespace headrace::cli
