#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <string>

#include "core/base/unique_fd.h"

namespace headrace {

/// A forked process that talks to the test in lines. Make it before the test has threads: sanitizers let no threads start in a child of a
/// process with threads. Killed and reaped by its destructor.
class ChildProcess {
 public:
  class Lines {
   public:
    Lines(UniqueFd in, UniqueFd out) : in_(std::move(in)), out_(std::move(out)) {}
    void say(const std::string& line) {
      const std::string text = line + "\n";
      [[maybe_unused]] const ssize_t written = ::write(out_.get(), text.data(), text.size());
    }
    /// The next line; empty after ten seconds without one or when the other side is gone.
    std::string hear() {
      std::string line;
      char character = 0;
      while (true) {
        pollfd item = {in_.get(), POLLIN, 0};
        if (::poll(&item, 1, 10'000) <= 0 || ::read(in_.get(), &character, 1) != 1) return "";
        if (character == '\n') return line;
        line += character;
      }
    }

   private:
    UniqueFd in_;
    UniqueFd out_;
  };

  explicit ChildProcess(const std::function<int(Lines&)>& body) : lines_(UniqueFd(), UniqueFd()) {
    std::array<int, 2> down{};
    std::array<int, 2> up{};
    EXPECT_EQ(::pipe2(down.data(), O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(up.data(), O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(down[1]);
      ::close(up[0]);
      Lines lines{UniqueFd(down[0]), UniqueFd(up[1])};
      ::_exit(body(lines));
    }
    ::close(down[0]);
    ::close(up[1]);
    lines_ = Lines(UniqueFd(up[0]), UniqueFd(down[1]));
  }
  ~ChildProcess() { kill(); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  Lines& lines() { return lines_; }

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
  Lines lines_;
};

}  // namespace headrace
