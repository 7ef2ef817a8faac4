#pragma once

#include <compare>
#include <cstdint>

namespace [[gnu::visibility("default")]] headrace {

/// A number that cannot be mistaken for another kind of number.
template <class Tag, class Value = std::uint32_t>
struct Id {
  Value value{};
  auto operator<=>(const Id&) const = default;
};

using StorageId = Id<struct StorageTag>;                       // index into a StorageTable
using SessionId = Id<struct SessionTag, std::uint64_t>;        // random, one per update
using Incarnation = Id<struct IncarnationTag, std::uint64_t>;  // random, one per life of a receiver process
using MemoryId = Id<struct MemoryTag, std::uint64_t>;          // unique within one sender's life

/// 64 random bits from the kernel; never 0.
std::uint64_t random_u64();

}  // namespace headrace
