#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

/// How the demo's weights change from version to version. Standard library only, so that any program can repeat it.
///
/// Byte o of a tensor at version v is its byte in the checkpoint XOR byte o % 8, counted from the lowest, of
/// demo_mask(demo_name_key(name), v, o / 8). Version 0 is the checkpoint as it is. Every byte differs from version 0 and from the version
/// before, so that one byte left behind is always seen.
namespace headrace {

/// The mixing step of SplitMix64.
constexpr std::uint64_t demo_mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// FNV-1a of the checkpoint name, mixed.
constexpr std::uint64_t demo_name_key(std::string_view name) noexcept {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return demo_mix(hash);
}

/// Where the random bits of one (tensor, version) start.
constexpr std::uint64_t demo_stream(std::uint64_t name_key, std::uint64_t version) noexcept {
  return demo_mix(name_key ^ (version * 0x9E3779B97F4A7C15u));
}

/// The mask of one 8-byte word. The two lowest bits of each byte say version % 3 + 1: never zero, never those of the version before.
constexpr std::uint64_t demo_word(std::uint64_t stream, std::uint64_t low_bits, std::uint64_t word_index) noexcept {
  return (demo_mix(stream + word_index * 0x9E3779B97F4A7C15u) & 0xFCFCFCFCFCFCFCFCu) | low_bits;
}

constexpr std::uint64_t demo_low_bits(std::uint64_t version) noexcept {
  return (version % 3 + 1) * 0x0101010101010101u;
}

constexpr std::uint64_t demo_mask(std::uint64_t name_key, std::uint64_t version, std::uint64_t word_index) noexcept {
  return version == 0 ? 0 : demo_word(demo_stream(name_key, version), demo_low_bits(version), word_index);
}

/// Writes the tensor's bytes at `version` to `out`, which holds base.size() bytes and may be where `base` is.
inline void apply_demo_version(std::string_view name, std::uint64_t version, std::span<const std::byte> base, std::byte* out) noexcept {
  if (version == 0) {
    if (!base.empty()) std::memmove(out, base.data(), base.size());
    return;
  }
  const std::uint64_t name_key = demo_name_key(name);
  const std::uint64_t stream = demo_stream(name_key, version);
  const std::uint64_t low_bits = demo_low_bits(version);
  const std::size_t words = base.size() / 8;
  if constexpr (std::endian::native == std::endian::little) {
    for (std::size_t w = 0; w < words; ++w) {
      std::uint64_t word = 0;
      std::memcpy(&word, base.data() + 8 * w, 8);
      word ^= demo_word(stream, low_bits, w);
      std::memcpy(out + 8 * w, &word, 8);
    }
  }
  const std::size_t done = std::endian::native == std::endian::little ? 8 * words : 0;
  for (std::size_t o = done; o < base.size(); ++o) {
    out[o] = base[o] ^ static_cast<std::byte>(demo_word(stream, low_bits, o / 8) >> (8 * (o % 8)));
  }
}

}  // namespace headrace
