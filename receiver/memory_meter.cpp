#include "receiver/memory_meter.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace headrace {
namespace {

/// RssAnon + RssShmem of /proc/self/status; 0 where the kernel does not say.
std::uint64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  std::uint64_t kib = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:") || line.starts_with("RssShmem:")) kib += std::stoull(line.substr(line.find(':') + 1));
  }
  return kib * 1024;
}

}  // namespace

void MemoryMeter::start() {
  if (started_) return;
  started_ = true;
  base_ = resident_bytes();
}

void MemoryMeter::sample() {
  if (!started_) return;
  const std::uint64_t now = resident_bytes();
  extra_max_ = std::max(extra_max_, now > base_ ? now - base_ : 0);
}

}  // namespace headrace
