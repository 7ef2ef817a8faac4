#pragma once

#include <string_view>

#include "core/base/status.h"
#include "receiver/models/family.h"

namespace [[gnu::visibility("default")]] headrace {

/// One layout for two models that are updated together, each of which takes its part of what a sender brings: a tensor that both take lands
/// in the places of both. What belongs to `second` (storages, parameters, groups, launch constants) is called `prefix` and its name; its
/// expert maps stand behind those of `first`. A name that one of them drops or does not know is what the other makes of it.
///
/// kInvalidArgument: two storages of one name. kUnsupported, by name: a tensor that both take and that one of them gathers in a staged
/// group, keeps as another dtype, has in another shape or scope, or knows under a second name; one of which they take boxes that overlap
/// without being equal; experts of one name, since each model may place its own elsewhere.
Result<ModelLayout> join_layouts(ModelLayout first, ModelLayout second, std::string_view prefix);

}  // namespace headrace
