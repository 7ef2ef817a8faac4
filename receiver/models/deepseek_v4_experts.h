#pragma once

#include <cstdint>
#include <string>

#include "receiver/models/deepseek_v4_parts.h"

namespace headrace {

/// How the engine keeps the routed experts of a block.
struct DeepseekV4ExpertForm {
  std::int64_t padded = 0;  // P: rows of one half of L1 and columns of L2, as the kernel has them
};

/// The routed experts "<block>ffn.experts.<id>." of one block in the fused kernel's layout, whose slots are those of the layout's expert
/// map `map`. Sizes that do not divide fail the writer.
void write_deepseek_v4_experts(const DeepseekV4Parts& parts, const std::string& block, std::uint32_t map, const DeepseekV4ExpertForm& form);

}  // namespace headrace
