#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/base/dtype.h"

// The oracle of conversions: numbers as what they are worth (sign, an integer, a power of two), rounded by comparing with both neighbours.
namespace headrace::naive {

/// How a format of 16 or 32 bits is made up.
struct FloatFormat {
  int exponent_bits = 0;
  int fraction_bits = 0;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint32_t infinity() const { return ((1U << exponent_bits) - 1) << fraction_bits; }
  std::uint32_t sign() const { return 1U << (exponent_bits + fraction_bits); }
};

inline FloatFormat format_of(Dtype dtype) {
  if (dtype == Dtype::kF32) return {8, 23};
  if (dtype == Dtype::kF16) return {5, 10};
  return {8, 7};
}

/// The magnitude that finite bits without their sign stand for; exact, since a double has all of them. The pattern of infinity gives the
/// power of two that would come next.
inline double magnitude(FloatFormat format, std::uint32_t bits) {
  const auto exponent = static_cast<int>(bits >> format.fraction_bits);
  const std::uint32_t fraction = bits & ((1U << format.fraction_bits) - 1);
  if (exponent == 0) return std::ldexp(fraction, 1 - format.bias() - format.fraction_bits);
  return std::ldexp(fraction + (1U << format.fraction_bits), exponent - format.bias() - format.fraction_bits);
}

inline std::uint32_t convert_bits(Dtype from_dtype, Dtype to_dtype, std::uint32_t bits) {
  const FloatFormat from = format_of(from_dtype);
  const FloatFormat to = format_of(to_dtype);
  const std::uint32_t sign = (bits & from.sign()) != 0 ? to.sign() : 0;
  const std::uint32_t rest = bits & (from.sign() - 1);
  if (rest > from.infinity()) {
    const std::uint32_t payload = rest & ((1U << from.fraction_bits) - 1);
    const int narrower = from.fraction_bits - to.fraction_bits;
    const std::uint32_t kept = narrower >= 0 ? payload >> narrower : payload << -narrower;
    return sign | to.infinity() | kept | (1U << (to.fraction_bits - 1));
  }
  if (rest == from.infinity()) return sign | to.infinity();
  const double value = magnitude(from, rest);
  // The largest pattern that is worth no more: patterns rise with their worth.
  std::uint32_t low = 0;
  std::uint32_t high = to.infinity();
  if (value >= magnitude(to, high)) return sign | to.infinity();
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (magnitude(to, middle) <= value ? low : high) = middle;
  }
  const double below = value - magnitude(to, low);
  const double above = magnitude(to, high) - value;
  if (below == 0) return sign | low;
  if (below != above) return sign | (below < above ? low : high);
  return sign | (low % 2 == 0 ? low : high);
}

inline void convert_element(Dtype from, Dtype to, const std::byte* src, std::byte* dst) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, src, from == Dtype::kF32 ? 4 : 2);
  const std::uint32_t converted = convert_bits(from, to, bits);
  std::memcpy(dst, &converted, to == Dtype::kF32 ? 4 : 2);
}

}  // namespace headrace::naive
