#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace headrace {

/// Numbers by names that come in two pieces. One probe of a flat table and one comparison, and everything that either touches lies in two
/// arrays small enough for the second-level cache: names in random order cost little more than in order. Immutable once all are added; then
/// any thread.
class NameTable {
 public:
  /// Makes room for `count` names.
  explicit NameTable(std::size_t count);
  /// The first of equal pairs stays. Precondition: no more names than there is room for, and their text fits 4 GiB.
  void add(std::string_view head, std::string_view tail, std::uint32_t value);
  std::optional<std::uint32_t> find(std::string_view head, std::string_view tail) const noexcept;

 private:
  struct Slot {
    std::uint32_t hash = 0;
    std::uint32_t value = 0;
    std::uint32_t text = 0;  // where head and tail stand, one behind the other
    std::uint32_t head_bytes = 0;
    std::uint32_t tail_bytes = kFree;
  };
  static constexpr std::uint32_t kFree = UINT32_MAX;

  /// The slot that holds the pair, or the free one where it belongs.
  std::size_t probe(std::uint32_t hash, std::string_view head, std::string_view tail) const noexcept;

  std::vector<Slot> slots_;  // a power of two, at most half full
  std::string text_;
};

}  // namespace headrace
