#include "core/base/status.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace headrace {

void check_failed(const char* file, int line, const char* condition, const char* reason) noexcept {
  std::fprintf(stderr, "headrace: check failed at %s:%d: %s (%s)\n", file, line, condition, reason);
  std::abort();
}

std::string_view code_name(Code code) noexcept {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kInvalidArgument: return "invalid_argument";
    case Code::kFailedPrecondition: return "failed_precondition";
    case Code::kCorruption: return "corruption";
    case Code::kDeadlineExceeded: return "deadline_exceeded";
    case Code::kUnavailable: return "unavailable";
    case Code::kResourceExhausted: return "resource_exhausted";
    case Code::kCancelled: return "cancelled";
    case Code::kUnsupported: return "unsupported";
    case Code::kDeviceLost: return "device_lost";
    case Code::kInternal: return "internal";
  }
  return "unknown";
}

std::string Status::to_string() const {
  if (ok()) return "ok";
  std::string text(code_name(code_));
  text += ": ";
  text += message_;
  return text;
}

namespace {
Code code_of_errno(int error_number) {
  switch (error_number) {
    case ENOMEM:
    case ENOSPC:
    case EMFILE:
    case ENFILE:
    case EDQUOT:
    case EFBIG: return Code::kResourceExhausted;
    case EINVAL:
    case ENAMETOOLONG:
    case ENOENT:
    case ENOTDIR:
    case EISDIR: return Code::kInvalidArgument;
    case EADDRINUSE:
    case EEXIST:
    case EACCES:
    case EPERM: return Code::kFailedPrecondition;
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
    case ENOTCONN: return Code::kUnavailable;
    case ETIMEDOUT: return Code::kDeadlineExceeded;
    case ENOSYS:
    case EOPNOTSUPP: return Code::kUnsupported;
    default: return Code::kInternal;
  }
}
}  // namespace

Status errno_status(int error_number, std::string_view what) {
  std::string text(what);
  text += ": ";
  text += std::strerror(error_number);  // NOLINT(concurrency-mt-unsafe): glibc returns constant text for known numbers
  return Status(code_of_errno(error_number), std::move(text), ErrorSource::kErrno, error_number);
}

}  // namespace headrace
