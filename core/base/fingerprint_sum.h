#pragma once

#include <array>
#include <cstdint>

namespace [[gnu::visibility("default")]] headrace {

/// The two 64-bit lanes of a fingerprint; sums of parts add up to the sum of the whole (kernels/fingerprint.h says of what).
struct FingerprintSum {
  std::array<std::uint64_t, 2> lanes{0, 0};
  FingerprintSum& operator+=(const FingerprintSum& other) noexcept {
    lanes[0] += other.lanes[0];
    lanes[1] += other.lanes[1];
    return *this;
  }
  friend FingerprintSum operator+(FingerprintSum a, const FingerprintSum& b) noexcept { return a += b; }
  bool operator==(const FingerprintSum&) const = default;
};

}  // namespace headrace
