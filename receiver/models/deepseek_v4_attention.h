#pragma once

#include <string>

#include "receiver/models/deepseek_v4_parts.h"

namespace headrace {

/// How the engine keeps the attention of a block, beyond what the parts say of all linears.
struct DeepseekV4AttentionForm {
  bool mega = false;          // features of the heads in turns, as the fused kernel reads them
  bool grouped_wo_a = false;  // wo_a's scales as words of 4, a group of rows after the other
};

/// The projections, norms and sinks "<block>attn." of one block, and the block's two norms. Heads divide over the ranks by wq_b's rows and
/// with the groups of wo_a, whose outputs are wo_b's columns; the low-rank projections are whole on each. Sizes that do not divide fail the
/// writer.
void write_deepseek_v4_attention(const DeepseekV4Parts& parts, const std::string& block, const DeepseekV4AttentionForm& form);

}  // namespace headrace
