#pragma once

#include <cstdint>
#include <span>
#include <vector>

/// One slot of the fused expert kernel's tensors, byte by byte from the formulas of the format, for every kind of expert.
namespace headrace::oracle {

/// H, I and P of one expert; `padded` is moe_intermediate where nothing is padded.
struct ExpertWidths {
  std::uint64_t hidden = 0;
  std::uint64_t moe_intermediate = 0;
  std::uint64_t padded = 0;
};

using ExpertBytes = std::vector<std::uint8_t>;
using ExpertView = std::span<const std::uint8_t>;

/// Gate and up rows in turns of 8, 2P rows of H columns; `bits` of one element.
ExpertBytes expert_l1_weight(const ExpertWidths& widths, std::uint64_t bits, ExpertView gate, ExpertView up);
/// H rows of P columns.
ExpertBytes expert_l2_weight(const ExpertWidths& widths, std::uint64_t bits, ExpertView down);
/// Scales of L1, one byte for `group` columns: words of four, a column of 2P words after the other. `kernel`: rows in the fused kernel's
/// order, else in that of the weight.
ExpertBytes expert_l1_scale(const ExpertWidths& widths, std::uint64_t group, bool kernel, ExpertView gate, ExpertView up);
ExpertBytes expert_l2_scale(const ExpertWidths& widths, std::uint64_t group, bool kernel, ExpertView down);

/// A scale for `block` rows and columns becomes one for each row and 32 columns.
ExpertBytes expand_block_scale(std::uint64_t rows, std::uint64_t columns, std::uint64_t block, ExpertView scale);

}  // namespace headrace::oracle
