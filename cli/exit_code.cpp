#include "cli/exit_code.h"

namespace headrace::cli {

ExitCode exit_code(Code code) noexcept {
  switch (code) {
    case Code::kOk: return ExitCode::kDone;
    case Code::kInvalidArgument:
    case Code::kFailedPrecondition:
    case Code::kCorruption:
    case Code::kResourceExhausted:
    case Code::kUnsupported: return ExitCode::kRefused;
    case Code::kDeadlineExceeded:
    case Code::kUnavailable:
    case Code::kCancelled:
    case Code::kDeviceLost: return ExitCode::kPeerOrDeadline;
    case Code::kInternal: return ExitCode::kInternal;
  }
  return ExitCode::kInternal;
}

}  // namespace headrace::cli
