#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace headrace {

/// One tensor of a routed expert, or of all experts of a layer together.
struct MoeName {
  std::string prefix;        // up to and with "experts."
  std::string suffix;        // behind the expert: "gate_proj.weight", or "gate_up_proj" of all experts
  std::int64_t expert = -1;  // -1: all experts of the layer in one tensor
  enum class Projection : std::uint8_t { kGate, kUp, kDown, kGateUp } projection = Projection::kGate;
  std::string leaf;  // "weight", "weight_scale_inv", …
};

/// Of `…experts.<id>.{gate_proj,up_proj,down_proj,w1,w3,w2}.<leaf>`, `…experts.gate_up_proj` and `…experts.down_proj`.
std::optional<MoeName> moe_name(std::string_view name);

}  // namespace headrace
