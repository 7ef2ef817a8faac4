#pragma once

#include <cstdint>
#include <string>

#include "receiver/models/deepseek_v4_parts.h"

namespace headrace {

/// How the engine keeps the routed experts of a block.
struct DeepseekV4ExpertForm {
  std::int64_t padded = 0;  // P: rows of one half of L1 and columns of L2, as the kernel has them
  /// SGLang's form: scales live twice, as rows of the interleaved matrix and in the fused kernel's order. Names are SGLang's.
  bool two_scales = false;
};

/// The routed experts "<block>ffn.experts.<id>." of one block in the fused kernel's layout, whose slots are those of the layout's expert
/// map `map`. FP4 experts have block scales; NVFP4 ones global scales besides and a launch constant; BF16 ones no scales. Sizes that do not
/// divide fail the writer, and so does a form that experts of this format have not.
void write_deepseek_v4_experts(const DeepseekV4Parts& parts, const std::string& block, std::uint32_t map, DeepseekV4ExpertFormat format,
                               const DeepseekV4ExpertForm& form);

/// The shared experts of one block as one more slot of the fused kernel: FP8, scales repeated from their blocks to rows of 32 columns.
/// `padded` is P of the routed experts; a width of the shared experts that differs fails the writer.
void write_deepseek_v4_fused_shared(const DeepseekV4Parts& parts, const std::string& block, std::int64_t padded);

}  // namespace headrace
