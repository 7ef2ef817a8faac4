#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/oracle/storages.h"

namespace headrace::oracle {

/// What of a DeepSeek-V4.1 model shapes the storages. H, I and P below stand for hidden, moe_intermediate and padded.
struct OracleModel {
  std::uint64_t hidden = 0;            // a multiple of 128
  std::uint64_t moe_intermediate = 0;  // a multiple of 128
  std::uint64_t padded = 0;            // moe_intermediate, or the next multiple of 512
  std::uint64_t experts = 0;
  std::uint64_t layers = 0;
};

/// Reads config.json of the checkpoint's folder. `padded`: P is I rounded up to 512, else I.
OracleModel read_oracle_model(const CheckpointBytes& checkpoint, bool padded);

/// One slot of the four MegaMoE tensors, padding zero. `w1` gate, `w3` up, `w2` down: the bytes of one expert's tensors.
/// L1 weight: 2P rows of H/2 bytes, gate and up rows in turns of 8.
std::vector<std::uint8_t> l1_weight_slot(const OracleModel& model, std::span<const std::uint8_t> w1, std::span<const std::uint8_t> w3);
/// L1 scale: H/128 columns of 2P words of 4 bytes.
std::vector<std::uint8_t> l1_scale_slot(const OracleModel& model, std::span<const std::uint8_t> w1, std::span<const std::uint8_t> w3);
/// L2 weight: H rows of P/2 bytes.
std::vector<std::uint8_t> l2_weight_slot(const OracleModel& model, std::span<const std::uint8_t> w2);
/// L2 scale: P/128 columns of H words of 4 bytes.
std::vector<std::uint8_t> l2_scale_slot(const OracleModel& model, std::span<const std::uint8_t> w2);

/// The name at run time of a tensor that is no routed expert's, and its place among the tensors that share the storage (0 when alone).
struct RuntimePlace {
  std::string name;
  int shard = 0;
};
RuntimePlace runtime_place(const std::string& checkpoint_name);

/// Every storage of `rank` of `ep` ranks that hold equal, contiguous parts of the experts and whole copies of everything else: each layer's
/// four expert storages, then one for each plain or stacked tensor. Every tensor of the checkpoint must have its place, else it throws.
std::vector<ExpectedStorage> deepseek_v41_storages(const CheckpointBytes& checkpoint, const OracleModel& model, std::uint64_t rank,
                                                   std::uint64_t ep);

}  // namespace headrace::oracle
