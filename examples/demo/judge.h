#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cli/receiver_client.h"
#include "core/base/status.h"
#include "core/checkpoint/checkpoint.h"
#include "core/wire/messages.h"
#include "tests/oracle/checkpoint_bytes.h"
#include "tests/oracle/deepseek_v41.h"
#include "tests/oracle/storages.h"

namespace headrace {

/// Judges live ranks from outside: reads their memory through the kernel and compares it with what the oracle computes from the checkpoint
/// files. One thread calls it; it uses `threads` threads.
class Judge {
 public:
  /// What one of `ranks` ranks must hold. May throw std::runtime_error.
  using Layout =
      std::function<std::vector<oracle::ExpectedStorage>(const oracle::CheckpointBytes& files, std::uint32_t rank, std::uint32_t ranks)>;
  /// That of the demo: experts of DeepSeek-V4.1 divided over the ranks. `padded`: their width is rounded up.
  static Layout experts_divided(bool padded);

  struct Options {
    std::filesystem::path checkpoint;
    std::string job;
    std::uint32_t ranks = 0;
    std::uint32_t threads = 2;
    Layout layout = experts_divided(true);
  };
  using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;

  static Result<Judge> open(const Options& options);

  /// Asks every rank where its storages lie; their names and sizes must be the oracle's.
  Status find_storages();
  /// Every byte of every storage of every rank, padding included.
  Result<oracle::Comparison> compare(std::uint64_t version, const Progress& progress) const;
  /// Whether the whole-tensor fingerprints that the ranks compute from live storage equal those of the weights at `version`. The Status
  /// says which do not.
  Status compare_fingerprints(std::uint64_t version) const;
  /// kFailedPrecondition when a rank has a weight file open or mapped.
  Status no_weight_file_open() const;
  /// Flips a byte in the middle of a storage of a rank.
  Status poke(std::uint32_t rank) const;

  std::uint64_t wire_bytes() const noexcept { return wire_bytes_; }
  std::uint64_t live_bytes() const noexcept { return live_bytes_; }
  Result<std::vector<wire::StatusReply>> statuses() const;

 private:
  struct LiveRank {
    pid_t pid = 0;
    std::vector<oracle::ExpectedStorage> expected;
    std::vector<std::uint64_t> addresses;  // one for each of `expected`
  };

  Judge() = default;
  Status build(const Options& options);

  Options options_;
  std::unique_ptr<oracle::CheckpointBytes> files_;  // what `expected` refers to
  std::vector<LiveRank> ranks_;
  std::uint64_t wire_bytes_ = 0;
  std::uint64_t live_bytes_ = 0;
};

}  // namespace headrace
