#include "tests/oracle/deepseek_experts.h"

#include <stdexcept>

namespace headrace::oracle {
namespace {

/// Place of row i of gate (u = 0) or up (u = 1) in the interleaved matrix.
std::uint64_t interleaved(std::uint64_t i, std::uint64_t u) {
  return i / 8 * 16 + u * 8 + i % 8;
}
/// Place of a row among the kernel's scale words: of 128 rows, four stretches of 32 are taken in turns.
std::uint64_t permuted(std::uint64_t r) {
  return r / 128 * 128 + r % 32 * 4 + r % 128 / 32;
}

std::uint8_t& at(ExpertBytes& bytes, std::uint64_t offset) {
  if (offset >= bytes.size()) throw std::runtime_error("an expert's byte lies outside of its slot");
  return bytes[offset];
}

void expect_size(ExpertView bytes, std::uint64_t expected) {
  if (bytes.size() != expected) throw std::runtime_error("an expert's tensor has another size than its widths say");
}

std::uint64_t scale_byte(std::uint64_t height, std::uint64_t row, std::uint64_t g) {
  return (g / 4 * height + row) * 4 + g % 4;
}

}  // namespace

ExpertBytes expert_l1_weight(const ExpertWidths& widths, std::uint64_t bits, ExpertView gate, ExpertView up) {
  const std::uint64_t row = widths.hidden * bits / 8;
  ExpertBytes slot(2 * widths.padded * row, 0);
  for (const std::uint64_t u : {0U, 1U}) {
    const ExpertView source = u == 0 ? gate : up;
    expect_size(source, widths.moe_intermediate * row);
    for (std::uint64_t i = 0; i < widths.moe_intermediate; ++i) {
      for (std::uint64_t c = 0; c < row; ++c) at(slot, interleaved(i, u) * row + c) = source[i * row + c];
    }
  }
  return slot;
}

ExpertBytes expert_l2_weight(const ExpertWidths& widths, std::uint64_t bits, ExpertView down) {
  const std::uint64_t from = widths.moe_intermediate * bits / 8;
  const std::uint64_t to = widths.padded * bits / 8;
  expect_size(down, widths.hidden * from);
  ExpertBytes slot(widths.hidden * to, 0);
  for (std::uint64_t h = 0; h < widths.hidden; ++h) {
    for (std::uint64_t c = 0; c < from; ++c) at(slot, h * to + c) = down[h * from + c];
  }
  return slot;
}

ExpertBytes expert_l1_scale(const ExpertWidths& widths, std::uint64_t group, bool kernel, ExpertView gate, ExpertView up) {
  const std::uint64_t groups = widths.hidden / group;
  ExpertBytes slot(2 * widths.padded * groups, 0);
  for (const std::uint64_t u : {0U, 1U}) {
    const ExpertView source = u == 0 ? gate : up;
    expect_size(source, widths.moe_intermediate * groups);
    for (std::uint64_t i = 0; i < widths.moe_intermediate; ++i) {
      const std::uint64_t row = kernel ? permuted(interleaved(i, u)) : interleaved(i, u);
      for (std::uint64_t g = 0; g < groups; ++g) at(slot, scale_byte(2 * widths.padded, row, g)) = source[i * groups + g];
    }
  }
  return slot;
}

ExpertBytes expert_l2_scale(const ExpertWidths& widths, std::uint64_t group, bool kernel, ExpertView down) {
  const std::uint64_t groups = widths.moe_intermediate / group;
  expect_size(down, widths.hidden * groups);
  ExpertBytes slot(widths.hidden * (widths.padded / group), 0);
  for (std::uint64_t h = 0; h < widths.hidden; ++h) {
    for (std::uint64_t g = 0; g < groups; ++g) at(slot, scale_byte(widths.hidden, kernel ? permuted(h) : h, g)) = down[h * groups + g];
  }
  return slot;
}

ExpertBytes expand_block_scale(std::uint64_t rows, std::uint64_t columns, std::uint64_t block, ExpertView scale) {
  expect_size(scale, rows / block * (columns / block));
  ExpertBytes wide;
  for (std::uint64_t r = 0; r < rows; ++r) {
    for (std::uint64_t c = 0; c < columns; c += 32) wide.push_back(scale[r / block * (columns / block) + c / block]);
  }
  return wide;
}

}  // namespace headrace::oracle
