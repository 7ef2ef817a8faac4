#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace headrace::bench {

/// Does a piece of work once and returns the seconds that count; what it prepares before is its own affair.
using TimedWork = std::function<double()>;

/// How long a call takes, in seconds.
template <class Work>
double seconds_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline constexpr std::size_t kRoundsMin = 5;

/// Runs all works in turn, A B C A B C, for `rounds` rounds after one that is not counted, so that a machine that slows down does it to
/// all of them alike. Returns the seconds of each work, round by round. Exceptions pass through. One caller at a time.
std::vector<std::vector<double>> interleave(const std::string& name, std::size_t rounds, std::span<const TimedWork> works);

}  // namespace headrace::bench
