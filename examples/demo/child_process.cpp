#include "examples/demo/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <utility>

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Result<Pipe> make_pipe() {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC) != 0) return errno_status(errno, "make a pipe");
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

int milliseconds_left(Clock::time_point due) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(due - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

/// Between fork and exec: only what is safe in a copy of one thread of a program of several.
[[noreturn]] void become(const std::vector<char*>& arguments, const ChildOptions& options, pid_t parent, int in, int out, int err) {
  ::prctl(PR_SET_PDEATHSIG, options.death_signal);
  if (::getppid() != parent) ::_exit(127);
  sigset_t none;
  sigemptyset(&none);
  ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
  if (::dup2(in, STDIN_FILENO) < 0 || ::dup2(out, STDOUT_FILENO) < 0 || (err >= 0 && ::dup2(err, STDERR_FILENO) < 0)) ::_exit(127);
  ::execv(arguments.front(), arguments.data());
  ::_exit(127);
}

}  // namespace

Result<ChildProcess> ChildProcess::start(const ChildOptions& options) {
  Result<Pipe> input = make_pipe();
  if (!input.ok()) return input.status();
  Result<Pipe> output = make_pipe();
  if (!output.ok()) return output.status();
  UniqueFd log;
  if (!options.error_log.empty()) {
    log = UniqueFd(::open(options.error_log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!log.valid()) return errno_status(errno, "create " + options.error_log);
  }
  std::vector<char*> arguments;
  for (const std::string& word : options.words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  if (::access(arguments.front(), X_OK) != 0) return errno_status(errno, fmt::format("start {}", options.words.front()));
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return errno_status(errno, fmt::format("start {}", options.name));
  if (pid == 0) become(arguments, options, parent, input.value().read.get(), output.value().write.get(), log.get());
  UniqueFd handle(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  const int error = errno;
  ChildProcess child(options.name, pid, std::move(input.value().write), std::move(output.value().read), std::move(handle));
  if (!child.handle_.valid()) return errno_status(error, fmt::format("watch {}", options.name));
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : name_(std::move(other.name_)),
      pid_(std::exchange(other.pid_, -1)),
      input_(std::move(other.input_)),
      output_(std::move(other.output_)),
      handle_(std::move(other.handle_)),
      buffer_(std::move(other.buffer_)) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this == &other) return *this;
  end();
  name_ = std::move(other.name_);
  pid_ = std::exchange(other.pid_, -1);
  input_ = std::move(other.input_);
  output_ = std::move(other.output_);
  handle_ = std::move(other.handle_);
  buffer_ = std::move(other.buffer_);
  return *this;
}

ChildProcess::~ChildProcess() {
  end();
}

void ChildProcess::end() noexcept {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

std::optional<std::string> ChildProcess::take_line() {
  const std::size_t end = buffer_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string line = buffer_.substr(0, end);
  buffer_.erase(0, end + 1);
  return line;
}

Result<std::optional<std::string>> ChildProcess::read_line(std::int64_t timeout_ms) {
  const Clock::time_point due = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (true) {
    if (std::optional<std::string> line = take_line()) return line;
    pollfd ready{output_.get(), POLLIN, 0};
    const int count = ::poll(&ready, 1, milliseconds_left(due));
    if (count < 0 && errno != EINTR) return errno_status(errno, fmt::format("wait for {}", name_));
    if (count <= 0) {
      if (Clock::now() >= due) return std::optional<std::string>();
      continue;
    }
    std::array<char, 65536> piece{};
    const ssize_t got = ::read(output_.get(), piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(errno, fmt::format("read from {}", name_));
    if (got == 0) return Status(Code::kUnavailable, fmt::format("{} has ended", name_));
    buffer_.append(piece.data(), static_cast<std::size_t>(got));
  }
}

Status ChildProcess::write_line(const std::string& line) {
  const std::string text = line + "\n";
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t put = ::write(input_.get(), text.data() + done, text.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno_status(errno, fmt::format("write to {}", name_));
    done += static_cast<std::size_t>(put);
  }
  return ok_status();
}

void ChildProcess::send_signal(int signal) const noexcept {
  if (pid_ > 0) ::kill(pid_, signal);
}

Result<int> ChildProcess::wait(std::int64_t timeout_ms) {
  if (pid_ <= 0) return Status(Code::kFailedPrecondition, fmt::format("{} has been waited for", name_));
  const Clock::time_point due = Clock::now() + std::chrono::milliseconds(timeout_ms);
  pollfd ended{handle_.get(), POLLIN, 0};
  while (::poll(&ended, 1, milliseconds_left(due)) <= 0) {
    if (Clock::now() >= due) return Status(Code::kDeadlineExceeded, fmt::format("{} still runs after {} ms", name_, timeout_ms));
  }
  int status = 0;
  if (::waitpid(pid_, &status, 0) != pid_) return errno_status(errno, fmt::format("wait for {}", name_));
  pid_ = -1;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace headrace
