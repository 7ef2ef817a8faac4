#pragma once

#include "receiver/models/deepseek_v4_parts.h"

namespace headrace {

/// What a draft has beside the blocks of its stages: the projection of the target's states, the heads behind its last stage, and the
/// target's embedding and output head, whose storages must be in the layout already. `parts` is the draft's, `target` the target's.
void write_deepseek_v4_draft(const DeepseekV4Parts& parts, const DeepseekV4Draft& draft, const DeepseekV4Parts& target);

}  // namespace headrace
