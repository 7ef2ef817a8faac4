#include "core/base/digest.h"

#include <sodium.h>

#include <cstring>

#include "core/base/check.h"

namespace headrace {

std::string Digest::hex() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(32);
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::optional<Digest> Digest::from_bytes(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() != 16) return std::nullopt;
  Digest digest;
  std::memcpy(digest.bytes.data(), bytes.data(), 16);
  return digest;
}

struct Hasher::State {
  crypto_generichash_state state;
};

Hasher::Hasher() : state_(std::make_unique<State>()) {
  HEADRACE_CHECK(crypto_generichash_init(&state_->state, nullptr, 0, 16) == 0, "BLAKE2b takes a 16-byte output");
}

Hasher::~Hasher() = default;

Hasher& Hasher::bytes(std::span<const std::byte> data) {
  crypto_generichash_update(&state_->state, reinterpret_cast<const unsigned char*>(data.data()), data.size());
  return *this;
}

Hasher& Hasher::text(std::string_view text) {
  number(text.size());
  return bytes(std::as_bytes(std::span(text.data(), text.size())));
}

Hasher& Hasher::number(std::uint64_t number) {
  std::array<std::byte, 8> little{};
  for (std::size_t i = 0; i < 8; ++i) little[i] = static_cast<std::byte>(number >> (8 * i));
  return bytes(little);
}

Digest Hasher::finish() {
  Digest digest;
  crypto_generichash_final(&state_->state, digest.bytes.data(), digest.bytes.size());
  return digest;
}

Digest digest_of(std::span<const std::byte> data) {
  Hasher hasher;
  return hasher.bytes(data).finish();
}

}  // namespace headrace
