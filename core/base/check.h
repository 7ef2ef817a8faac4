#pragma once

namespace [[gnu::visibility("default")]] headrace {
/// Prints file, line, condition and reason to standard error, then aborts.
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const char* reason) noexcept;
}  // namespace headrace

/// Always on: for bugs of ours that could publish wrong weights. Never for what a peer, a device or an operator can cause.
#define HEADRACE_CHECK(condition, reason)                                               \
  do {                                                                                  \
    if (!(condition)) ::headrace::check_failed(__FILE__, __LINE__, #condition, reason); \
  } while (false)
