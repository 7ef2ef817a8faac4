#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace headrace::cli {

/// One line on standard error that says how far a long piece of work is, at which rate, and how long it will take. Silent for the first
/// second and wherever standard error is no terminal. One thread.
class Progress {
 public:
  Progress(std::string what, std::uint64_t bytes_total);
  /// Wipes the line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(std::uint64_t bytes_done);

 private:
  using Clock = std::chrono::steady_clock;
  const std::string what_;
  const std::uint64_t bytes_total_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point next_ = start_ + std::chrono::seconds(1);
  bool shown_ = false;
};

/// The text of that line.
std::string progress_line(const std::string& what, std::uint64_t done, std::uint64_t total, double seconds);

}  // namespace headrace::cli
