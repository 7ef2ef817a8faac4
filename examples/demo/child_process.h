#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/unique_fd.h"

namespace headrace {

struct ChildOptions {
  std::string name;                // for messages
  std::vector<std::string> words;  // program and arguments
  std::string error_log;           // file for its standard error; empty: ours
  int death_signal = 9;            // what it gets when we die
};

/// A process of ours that talks in lines over its standard input and output. It gets a signal when this process dies, and is killed when
/// this object goes. One thread, which must be the one that lives longest (the kernel watches the thread that started the child).
class ChildProcess {
 public:
  static Result<ChildProcess> start(const ChildOptions& options);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const noexcept { return pid_; }
  const std::string& name() const noexcept { return name_; }
  /// The next line of its output without the newline; nullopt when none came in time. kUnavailable when its output has ended.
  Result<std::optional<std::string>> read_line(std::int64_t timeout_ms);
  Status write_line(const std::string& line);
  void send_signal(int signal) const noexcept;
  /// Waits for its end: the exit code, or minus the signal that ended it. kDeadlineExceeded when it still runs.
  Result<int> wait(std::int64_t timeout_ms);
  /// A descriptor that becomes readable when there is output.
  int output_fd() const noexcept { return output_.get(); }

 private:
  ChildProcess(std::string name, pid_t pid, UniqueFd input, UniqueFd output, UniqueFd handle)
      : name_(std::move(name)), pid_(pid), input_(std::move(input)), output_(std::move(output)), handle_(std::move(handle)) {}
  void end() noexcept;
  std::optional<std::string> take_line();

  std::string name_;
  pid_t pid_ = -1;  // -1: waited for
  UniqueFd input_;
  UniqueFd output_;
  UniqueFd handle_;  // pidfd
  std::string buffer_;
};

}  // namespace headrace
