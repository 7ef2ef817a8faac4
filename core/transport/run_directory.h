#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/base/unique_fd.h"

namespace [[gnu::visibility("default")]] headrace {

/// A receiver's hold on its place in the run directory: while it lives nobody else can serve the same engine and rank. Move-only.
/// Its destructor removes the sockets and the lock file that it made.
class EndpointClaim {
 public:
  EndpointClaim(EndpointClaim&&) noexcept = default;
  EndpointClaim& operator=(EndpointClaim&& other) noexcept;
  ~EndpointClaim();

  /// "ipc://DIR/ENGINE-RANK.ipc".
  std::string endpoint() const;
  /// "DIR/ENGINE-RANK.fds".
  std::string descriptor_path() const;

 private:
  friend class RunDirectory;
  EndpointClaim(UniqueFd lock, std::filesystem::path stem) : lock_(std::move(lock)), stem_(std::move(stem)) {}
  UniqueFd lock_;  // an open-file-description lock; the kernel lets go of it when the process dies
  std::filesystem::path stem_;
};

/// One receiver found in a run directory.
struct FoundEndpoint {
  std::string job;
  std::string engine;
  std::uint32_t rank = 0;
  std::string endpoint;
  bool alive = false;  // its lock is held
};

/// Where the receivers of one job meet their senders: $XDG_RUNTIME_DIR/headrace/JOB, else /tmp/headrace-UID/JOB, mode 0700, ours.
class RunDirectory {
 public:
  /// The directory of all jobs. Nothing is created.
  static std::filesystem::path base();
  /// Creates the job's directory if need be. Refused: job names other than 1 to 64 of [A-Za-z0-9._-], a directory that is not ours or open
  /// to others.
  static Result<RunDirectory> create(std::string_view job);
  /// kUnavailable when there is none.
  static Result<RunDirectory> open(std::string_view job);
  static std::vector<std::string> jobs();

  const std::filesystem::path& path() const noexcept { return path_; }
  const std::string& job() const noexcept { return job_; }
  /// Takes the lock of (engine, rank), then removes what a killed predecessor left. kFailedPrecondition names the endpoint when it is
  /// served already; kInvalidArgument names a socket path over 107 bytes.
  Result<EndpointClaim> claim(std::string_view engine, std::uint32_t rank) const;
  /// Sorted by engine and rank.
  std::vector<FoundEndpoint> endpoints() const;
  /// The engine's guard page file (receiver/guard_page.h).
  std::filesystem::path guard_path(std::string_view engine) const;
  /// Removes files whose owner is gone; returns them. With dry_run nothing is removed.
  std::vector<std::filesystem::path> clean(bool dry_run) const;

 private:
  RunDirectory(std::filesystem::path path, std::string job) : path_(std::move(path)), job_(std::move(job)) {}
  std::filesystem::path path_;
  std::string job_;
};

}  // namespace headrace
