#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

namespace headrace {

/// A set of the numbers [0, size) as a bitmap. Any one thread at a time.
class ByteSet {
 public:
  explicit ByteSet(std::int64_t size) : words_(static_cast<std::size_t>((size + 63) / 64), 0) {}

  /// Adds [first, first + count); the first number that was there already, if any, is returned and nothing after it is added.
  std::optional<std::int64_t> insert(std::int64_t first, std::int64_t count) {
    while (count > 0) {
      const std::int64_t bit = first % 64;
      const std::int64_t here = count < 64 - bit ? count : 64 - bit;
      const std::uint64_t mask = (here == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << here) - 1) << bit;
      std::uint64_t& word = words_[static_cast<std::size_t>(first / 64)];
      if ((word & mask) != 0) return first - bit + std::countr_zero(word & mask);
      word |= mask;
      first += here;
      count -= here;
    }
    return std::nullopt;
  }

  /// The first number of [0, size) that is not in the set; `size` is what the set was made for.
  std::optional<std::int64_t> first_missing(std::int64_t size) const {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      if (words_[i] == ~std::uint64_t{0}) continue;
      const std::int64_t missing = static_cast<std::int64_t>(i) * 64 + std::countr_one(words_[i]);
      return missing < size ? std::optional(missing) : std::nullopt;
    }
    return std::nullopt;
  }

 private:
  std::vector<std::uint64_t> words_;
};

}  // namespace headrace
