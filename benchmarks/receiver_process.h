#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/unique_fd.h"
#include "receiver/models/family.h"

namespace headrace::bench {

/// Models that both processes of a row can build from their name: "v41" (true widths, two layers of 96 experts, a small vocabulary),
/// "tiny:N" (N tensors of 4 KiB) and "flat-experts:N" (the tensors of N experts as they are).
ModelLayout e2e_layout(const std::string& model, std::int32_t ranks, std::int32_t rank);

/// A job name of this process; what a killed run leaves under such names is removed by the next one.
std::string job_name(std::string_view row);

/// Packets of text between the two processes of a row. Throws Error when the other one is gone.
class PacketChannel {
 public:
  PacketChannel() = default;
  explicit PacketChannel(UniqueFd socket) : socket_(std::move(socket)) {}
  void send(std::string_view text) const;
  /// Empty: the other side has closed.
  std::string receive() const;
  /// The answer to a question; throws what the other side reports as an error.
  std::string ask(std::string_view question) const;

 private:
  UniqueFd socket_;
};

/// A rank in a process of its own: this program again, with a receiver on the public interface and storage of its own. It ends when this
/// object or this process does, and takes its place in the run directory along.
class ReceiverProcess {
 public:
  struct Options {
    std::string job;
    std::string model;
    std::int32_t rank = 0;
    std::int32_t ranks = 1;
  };
  /// Returns when the receiver listens.
  explicit ReceiverProcess(const Options& options);
  ~ReceiverProcess();
  ReceiverProcess(const ReceiverProcess&) = delete;
  ReceiverProcess& operator=(const ReceiverProcess&) = delete;

  const PacketChannel& channel() const noexcept { return channel_; }
  /// The receiver's own figure: its peak beyond what it held before its first update.
  std::uint64_t memory_extra_bytes_max() const;
  /// A line of /proc/PID/status in bytes, such as "VmHWM".
  std::uint64_t status_bytes(std::string_view key) const;

 private:
  PacketChannel channel_;
  pid_t pid_ = -1;
};

inline constexpr std::string_view kReceiverRole = "--receiver-process";
/// The other process: arguments behind kReceiverRole. Returns its exit code.
int receiver_process_main(std::span<char*> arguments);

/// Removes what killed runs left in the run directory.
void remove_leftovers();

}  // namespace headrace::bench
