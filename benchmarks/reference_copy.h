#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/worker_pool.h"

namespace headrace::bench {

/// The plain copies that everything is compared with.
enum class CopyKind : std::uint8_t { kGlibc, kStreaming, kRepMovsb };
std::string_view copy_kind_name(CopyKind kind) noexcept;
/// Those that this processor has.
std::vector<CopyKind> copy_kinds();

/// Copies `source` to `destination`, which do not overlap. Precondition: equal sizes.
void plain_copy(CopyKind kind, std::span<const std::byte> source, std::span<std::byte> destination);
/// The same, in one contiguous part per thread of the pool.
void plain_copy(CopyKind kind, WorkerPool& pool, std::span<const std::byte> source, std::span<std::byte> destination);

/// The sum of all 64-bit words and trailing bytes: reads everything, writes nothing, and is as fast as reading gets.
std::uint64_t read_sum(std::span<const std::byte> bytes) noexcept;

}  // namespace headrace::bench
