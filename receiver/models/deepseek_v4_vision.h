#pragma once

#include "receiver/models/deepseek_v4_parts.h"

namespace headrace {

/// The image tower, the aligner that brings its tokens to the text model's width, and the marks around an image. Whole on every rank.
void write_deepseek_v4_vision(const DeepseekV4Parts& parts, const DeepseekV4Vision& vision);

}  // namespace headrace
