#include "receiver/name_table.h"

#include <bit>
#include <cstring>

namespace headrace {
namespace {

constexpr std::uint64_t kMultiplier = 0x9E3779B97F4A7C15;

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
  const std::uint64_t product = (hash ^ word) * kMultiplier;
  return product ^ (product >> 32);
}

template <class Word>
Word load(const char* text) noexcept {
  Word word = 0;
  std::memcpy(&word, text, sizeof(word));
  return word;
}

/// Words of 8 bytes, the last one overlapping its neighbour: no byte by byte end.
std::uint64_t absorb(std::uint64_t hash, std::string_view text) noexcept {
  const char* const begin = text.data();
  const std::size_t bytes = text.size();
  if (bytes >= 8) {
    for (std::size_t at = 0; at + 8 < bytes; at += 8) hash = mix(hash, load<std::uint64_t>(begin + at));
    hash = mix(hash, load<std::uint64_t>(begin + bytes - 8));
  } else if (bytes >= 4) {
    hash = mix(hash, std::uint64_t{load<std::uint32_t>(begin)} << 32 | load<std::uint32_t>(begin + bytes - 4));
  } else {
    for (const char c : text) hash = mix(hash, static_cast<std::uint8_t>(c));
  }
  return mix(hash, bytes);
}

/// Peers choose the names that are asked for, never those in the table: no more than the table's own chains can be walked.
std::uint32_t hash_of(std::string_view head, std::string_view tail) noexcept {
  return static_cast<std::uint32_t>(absorb(absorb(kMultiplier, head), tail));
}

}  // namespace

NameTable::NameTable(std::size_t count) : slots_(std::bit_ceil(2 * count + 1)) {}

std::size_t NameTable::probe(std::uint32_t hash, std::string_view head, std::string_view tail) const noexcept {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t at = hash & mask;; at = (at + 1) & mask) {
    const Slot& slot = slots_[at];
    if (slot.tail_bytes == kFree) return at;
    if (slot.hash != hash || slot.head_bytes != head.size() || slot.tail_bytes != tail.size()) continue;
    const char* text = text_.data() + slot.text;
    if (std::string_view(text, head.size()) == head && std::string_view(text + head.size(), tail.size()) == tail) return at;
  }
}

void NameTable::add(std::string_view head, std::string_view tail, std::uint32_t value) {
  const std::uint32_t hash = hash_of(head, tail);
  Slot& slot = slots_[probe(hash, head, tail)];
  if (slot.tail_bytes != kFree) return;
  slot = {.hash = hash,
          .value = value,
          .text = static_cast<std::uint32_t>(text_.size()),
          .head_bytes = static_cast<std::uint32_t>(head.size()),
          .tail_bytes = static_cast<std::uint32_t>(tail.size())};
  text_.append(head).append(tail);
}

std::optional<std::uint32_t> NameTable::find(std::string_view head, std::string_view tail) const noexcept {
  const Slot& slot = slots_[probe(hash_of(head, tail), head, tail)];
  if (slot.tail_bytes == kFree) return std::nullopt;
  return slot.value;
}

}  // namespace headrace
