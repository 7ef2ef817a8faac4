#pragma once

#include "core/base/status.h"

namespace headrace::cli {

/// What the program tells its caller (docs/cli.md).
enum class ExitCode : int {
  kDone = 0,
  kDifference = 1,      // a check found a difference or missed a target
  kUsage = 2,           // the command line
  kRefused = 3,         // an input or a request that was not taken
  kPeerOrDeadline = 4,  // a peer was lost, could not be reached, or was too slow
  kInternal = 5,        // our bug
};

ExitCode exit_code(Code code) noexcept;
constexpr int to_int(ExitCode code) noexcept {
  return static_cast<int>(code);
}

}  // namespace headrace::cli
