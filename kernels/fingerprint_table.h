#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace headrace {

// The constants of the fingerprint. docs/protocol.md states the same rules and lists test vectors.

inline constexpr std::uint64_t kSplitMixStep = 0x9E3779B97F4A7C15;
/// The letters "Headrace", big-endian.
inline constexpr std::uint64_t kFingerprintSeed = 0x4865616472616365;
inline constexpr std::size_t kFingerprintLaneShift = 16;  // words between the tables of lane 0 and lane 1
inline constexpr std::size_t kFingerprintBlockWords = 1024;
inline constexpr std::uint64_t kFingerprintBlockBytes = 4 * kFingerprintBlockWords;
inline constexpr std::size_t kFingerprintTableWords = kFingerprintBlockWords + kFingerprintLaneShift;

/// SplitMix64: the output for the state that follows `state`.
constexpr std::uint64_t splitmix(std::uint64_t state) noexcept {
  std::uint64_t z = state + kSplitMixStep;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

/// K[0..1040): the upper 32 bits of the SplitMix64 sequence from kFingerprintSeed, zeros skipped.
constexpr std::array<std::uint32_t, kFingerprintTableWords> make_fingerprint_table() noexcept {
  std::array<std::uint32_t, kFingerprintTableWords> table{};
  std::uint64_t state = kFingerprintSeed;
  for (std::size_t i = 0; i < table.size(); state += kSplitMixStep) {
    table[i] = static_cast<std::uint32_t>(splitmix(state) >> 32);
    if (table[i] != 0) ++i;
  }
  return table;
}
alignas(64) inline constexpr std::array<std::uint32_t, kFingerprintTableWords> kFingerprintTable = make_fingerprint_table();

/// kappa_lane(key, block) = splitmix(splitmix(splitmix(key) ^ block) ^ lane) | 1, remembered for the block of the latest call.
/// One thread at a time.
class BlockFactors {
 public:
  explicit BlockFactors(std::uint64_t key) noexcept : root_(splitmix(key)) { set(0); }
  const std::array<std::uint64_t, 2>& of(std::uint64_t block) noexcept {
    if (block != block_) set(block);
    return kappa_;
  }

 private:
  void set(std::uint64_t block) noexcept {
    block_ = block;
    const std::uint64_t chained = splitmix(root_ ^ block);
    kappa_ = {splitmix(chained) | 1, splitmix(chained ^ 1) | 1};
  }

  std::uint64_t root_;
  std::uint64_t block_ = 0;
  std::array<std::uint64_t, 2> kappa_{};
};

}  // namespace headrace
