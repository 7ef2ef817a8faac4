#pragma once

#include <string>

#include "core/base/status.h"
#include "core/checkpoint/json.h"

namespace headrace::cli {

/// SVG of a document of `push` or `plan`, or of a report or a receipt alone: an update as a timeline, a plan as who sends how much to whom.
/// Widths are to scale. kInvalidArgument: it is none of them, names a field that is missing or of another kind, or has too many ranks.
Result<std::string> draw(const JsonValue& document);

}  // namespace headrace::cli
