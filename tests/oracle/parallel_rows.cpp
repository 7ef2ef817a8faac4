#include "tests/oracle/parallel_rows.h"

namespace headrace::oracle {

std::vector<std::int64_t> even_share(std::int64_t rows, std::int64_t tp, std::int64_t rank) {
  std::vector<std::int64_t> share;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (row * tp / rows == rank) share.push_back(row);
  }
  return share;
}

std::vector<std::int64_t> head_share(std::int64_t heads, std::int64_t head_dim, std::int64_t tp, std::int64_t rank) {
  std::vector<std::int64_t> share;
  for (std::int64_t head = 0; head < heads; ++head) {
    const bool mine = heads >= tp ? head / (heads / tp) == rank : rank / (tp / heads) == head;
    for (std::int64_t d = 0; mine && d < head_dim; ++d) share.push_back(head * head_dim + d);
  }
  return share;
}

std::vector<std::int64_t> vocabulary_share(std::int64_t vocabulary, std::int64_t tp, std::int64_t rank) {
  std::int64_t padded = vocabulary;
  while (padded % 64 != 0) ++padded;
  std::vector<std::int64_t> share;
  for (const std::int64_t row : even_share(padded, tp, rank)) share.push_back(row < vocabulary ? row : kZeros);
  return share;
}

std::vector<std::uint8_t> gather_rows(std::span<const std::uint8_t> tensor, std::int64_t row_bytes, std::span<const std::int64_t> rows) {
  std::vector<std::uint8_t> bytes;
  for (const std::int64_t row : rows) {
    for (std::int64_t b = 0; b < row_bytes; ++b) {
      bytes.push_back(row == kZeros ? std::uint8_t{0} : tensor[static_cast<std::size_t>(row * row_bytes + b)]);
    }
  }
  return bytes;
}

std::vector<std::uint8_t> gather_columns(std::span<const std::uint8_t> tensor, std::int64_t row_bytes, std::int64_t elem_bytes,
                                         std::span<const std::int64_t> columns) {
  std::vector<std::uint8_t> bytes;
  for (std::int64_t at = 0; at < static_cast<std::int64_t>(tensor.size()); at += row_bytes) {
    for (const std::int64_t column : columns) {
      for (std::int64_t b = 0; b < elem_bytes; ++b) bytes.push_back(tensor[static_cast<std::size_t>(at + column * elem_bytes + b)]);
    }
  }
  return bytes;
}

}  // namespace headrace::oracle
