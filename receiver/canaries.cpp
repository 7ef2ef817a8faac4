#include "receiver/canaries.h"

#include <cstring>

#include "core/base/ids.h"

namespace headrace {
namespace {

/// Word `index` of pool `pool`: never the same for two pools or two seeds, never a constant fill.
std::uint64_t pattern(std::uint64_t seed, std::size_t pool, std::int64_t index) {
  std::uint64_t z = seed + 0x9e3779b97f4a7c15ULL * (static_cast<std::uint64_t>(pool) * 0x10001ULL + static_cast<std::uint64_t>(index) + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace

void Canaries::write() {
  seed_ = random_u64();
  for (std::size_t pool = 0; pool < places_.size(); ++pool) {
    for (std::int64_t at = 0; at < places_[pool].bytes; at += 8) {
      const std::uint64_t word = pattern(seed_, pool, at);
      std::memcpy(places_[pool].address + at, &word, sizeof word);
    }
  }
}

std::vector<std::string> Canaries::lost() const {
  std::vector<std::string> pools;
  for (std::size_t pool = 0; pool < places_.size(); ++pool) {
    for (std::int64_t at = 0; at < places_[pool].bytes; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, places_[pool].address + at, sizeof word);
      if (word == pattern(seed_, pool, at)) continue;
      pools.push_back(places_[pool].pool);
      break;
    }
  }
  return pools;
}

}  // namespace headrace
