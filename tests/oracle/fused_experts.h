#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

/// One parameter that holds a matrix of each local expert, byte by byte from the format's formula.
namespace headrace::oracle {

/// What the tensors of the experts look like. i counts along the intermediate size, h along the other dimension.
struct ExpertMatrix {
  std::int64_t intermediate = 0;
  std::int64_t block = 1;   // intermediate elements that one entry stands for: 1, 2 when packed, or a block that shares a scale
  bool scale = false;       // entries may be repeated
  std::int64_t others = 0;  // entries along h
  std::int64_t elem_bytes = 1;
  bool rows = true;  // i counts rows in the checkpoint
};

/// What the engine's parameter looks like on one rank.
struct ExpertShare {
  std::int64_t tp = 1;
  std::int64_t rank = 0;
  std::int64_t padded = 0;          // intermediate elements of one half
  bool rows = true;                 // i counts rows in the parameter
  std::int64_t halves = 2;          // gate and up, or 1
  std::vector<std::int64_t> slots;  // the expert in each slot
};

/// The bytes of one expert's tensor; `half` is 0 for gate and down, 1 for up.
using ExpertBytesOf = std::function<std::vector<std::uint8_t>(std::int64_t expert, std::int64_t half)>;

/// Entry j of a half on this rank stands for intermediate elements from rank * intermediate / tp + j * unit on; unit is the block, or the
/// largest part of it that divides a rank's elements. Entries behind the rank's elements are zero.
std::vector<std::uint8_t> fused_experts(const ExpertMatrix& matrix, const ExpertShare& share, const ExpertBytesOf& bytes);

/// Experts of rank `rank` of `ranks`, in slot order.
std::vector<std::int64_t> linear_experts(std::int64_t experts, std::int64_t ranks, std::int64_t rank);
std::vector<std::int64_t> round_robin_experts(std::int64_t experts, std::int64_t ranks, std::int64_t rank);

}  // namespace headrace::oracle
