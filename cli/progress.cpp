#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "cli/output.h"

namespace headrace::cli {

std::string progress_line(const std::string& what, std::uint64_t done, std::uint64_t total, double seconds) {
  const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
  const double percent = total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100.0;
  std::string line = fmt::format("{}  {:3.0f} %  {} of {}  {}/s", what, percent, human_bytes(done), human_bytes(total),
                                 human_bytes(static_cast<std::uint64_t>(rate)));
  if (rate > 0 && done < total) line += fmt::format("  {:.0f} s left", static_cast<double>(total - done) / rate);
  return line;
}

Progress::Progress(std::string what, std::uint64_t bytes_total)
    : what_(std::move(what)), bytes_total_(bytes_total), terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) say("\r\033[K");
}

void Progress::update(std::uint64_t bytes_done) {
  if (!terminal_) return;
  const Clock::time_point now = Clock::now();
  if (now < next_) return;
  next_ = now + std::chrono::milliseconds(100);
  shown_ = true;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  say(fmt::format("\r\033[K{}", progress_line(what_, bytes_done, bytes_total_, seconds)));
}

}  // namespace headrace::cli
