#pragma once

#include <string_view>

#include "core/base/status.h"

namespace headrace {

/// Translates ZeroMQ's errno, its own numbers included: `what` says what was tried and on what.
Status zmq_status(int zmq_errno, std::string_view what);

}  // namespace headrace
