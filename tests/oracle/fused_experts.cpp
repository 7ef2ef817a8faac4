#include "tests/oracle/fused_experts.h"

#include <stdexcept>

namespace headrace::oracle {
namespace {

std::int64_t up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Intermediate elements that one entry of the parameter stands for.
std::int64_t unit_of(const ExpertMatrix& matrix, const ExpertShare& share) {
  if (!matrix.scale || (share.tp == 1 && share.padded == matrix.intermediate)) return matrix.block;
  const std::int64_t local = matrix.intermediate / share.tp;
  std::int64_t unit = matrix.block;
  while (matrix.block % unit != 0 || local % unit != 0) --unit;
  return unit;
}

}  // namespace

std::vector<std::uint8_t> fused_experts(const ExpertMatrix& matrix, const ExpertShare& share, const ExpertBytesOf& bytes) {
  const std::int64_t unit = unit_of(matrix, share);
  const std::int64_t local = matrix.intermediate / share.tp;
  const std::int64_t entries = up(share.padded, unit);
  const std::int64_t source_entries = up(matrix.intermediate, matrix.block);
  const std::int64_t slot_entries = share.halves * entries * matrix.others;
  std::vector<std::uint8_t> result(share.slots.size() * static_cast<std::size_t>(slot_entries * matrix.elem_bytes), 0);
  for (std::size_t s = 0; s < share.slots.size(); ++s) {
    for (std::int64_t half = 0; half < share.halves; ++half) {
      const std::vector<std::uint8_t> source = bytes(share.slots[s], half);
      if (static_cast<std::int64_t>(source.size()) != source_entries * matrix.others * matrix.elem_bytes)
        throw std::runtime_error("expert tensor of another size");
      for (std::int64_t j = 0; j * unit < local; ++j) {
        const std::int64_t i = (share.rank * local + j * unit) / matrix.block;
        const std::int64_t d = half * entries + j;
        for (std::int64_t h = 0; h < matrix.others; ++h) {
          const std::int64_t from = matrix.rows ? i * matrix.others + h : h * source_entries + i;
          const std::int64_t to = share.rows ? d * matrix.others + h : h * share.halves * entries + d;
          for (std::int64_t b = 0; b < matrix.elem_bytes; ++b) {
            result[static_cast<std::size_t>((static_cast<std::int64_t>(s) * slot_entries + to) * matrix.elem_bytes + b)] =
                source[static_cast<std::size_t>(from * matrix.elem_bytes + b)];
          }
        }
      }
    }
  }
  return result;
}

std::vector<std::int64_t> linear_experts(std::int64_t experts, std::int64_t ranks, std::int64_t rank) {
  std::int64_t next = 0;
  for (std::int64_t r = 0;; ++r) {
    std::vector<std::int64_t> mine;
    const std::int64_t count = experts / ranks + (r < experts % ranks ? 1 : 0);
    for (std::int64_t k = 0; k < count; ++k) mine.push_back(next++);
    if (r == rank) return mine;
  }
}

std::vector<std::int64_t> round_robin_experts(std::int64_t experts, std::int64_t ranks, std::int64_t rank) {
  std::vector<std::int64_t> mine;
  for (std::int64_t e = 0; e < experts; ++e) {
    if (e % ranks == rank) mine.push_back(e);
  }
  return mine;
}

}  // namespace headrace::oracle
