#pragma once

#include <cstdint>
#include <span>
#include <vector>

/// Which rows or columns of a checkpoint tensor one rank of tensor parallelism holds, by number, and the bytes that they make up.
namespace headrace::oracle {

/// In place of a number: zeros.
inline constexpr std::int64_t kZeros = -1;

/// Rows [rank * rows / tp, (rank + 1) * rows / tp).
std::vector<std::int64_t> even_share(std::int64_t rows, std::int64_t tp, std::int64_t rank);
/// Rows of this rank's heads, each of `head_dim` rows. With fewer heads than ranks, tp / heads neighbours hold the same head.
std::vector<std::int64_t> head_share(std::int64_t heads, std::int64_t head_dim, std::int64_t tp, std::int64_t rank);
/// Rows of a vocabulary that is filled up with zeros to a multiple of 64.
std::vector<std::int64_t> vocabulary_share(std::int64_t vocabulary, std::int64_t tp, std::int64_t rank);

std::vector<std::uint8_t> gather_rows(std::span<const std::uint8_t> tensor, std::int64_t row_bytes, std::span<const std::int64_t> rows);
std::vector<std::uint8_t> gather_columns(std::span<const std::uint8_t> tensor, std::int64_t row_bytes, std::int64_t elem_bytes,
                                         std::span<const std::int64_t> columns);

}  // namespace headrace::oracle
