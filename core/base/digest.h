#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace [[gnu::visibility("default")]] headrace {

/// A 128-bit BLAKE2b digest. Equal digests mean equal content, also against somebody who tries.
struct Digest {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const Digest&) const = default;
  /// 32 lower-case hexadecimal digits.
  std::string hex() const;
  static std::optional<Digest> from_bytes(std::span<const std::byte> bytes) noexcept;
};

/// Hashes a sequence of pieces. Strings and numbers are framed with their length, so that pieces cannot run together. Not thread-safe.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  /// Raw bytes, without framing.
  Hasher& bytes(std::span<const std::byte> data);
  /// Length as u64 little-endian, then the characters.
  Hasher& text(std::string_view text);
  /// 8 bytes little-endian.
  Hasher& number(std::uint64_t number);
  Digest finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// BLAKE2b-128 of the bytes alone.
Digest digest_of(std::span<const std::byte> data);

}  // namespace headrace
