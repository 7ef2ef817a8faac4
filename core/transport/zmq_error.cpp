#include "core/transport/zmq_error.h"

#include <fmt/format.h>
#include <zmq.h>

#include <cerrno>

namespace headrace {
namespace {

Code code_of(int zmq_errno) {
  switch (zmq_errno) {
    case EHOSTUNREACH:
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case ENOTCONN:
    case ENETDOWN:
    case ENETRESET:
    case ENETUNREACH: return Code::kUnavailable;
    case EAGAIN:
    case ENOMEM:
    case ENOBUFS:
    case EMFILE:
    case ENFILE:
    case EMTHREAD: return Code::kResourceExhausted;
    case EADDRINUSE:
    case EACCES:
    case EPERM: return Code::kFailedPrecondition;
    case EINVAL:
    case ENODEV:
    case ENOENT:
    case ENOTDIR:
    case ENAMETOOLONG:
    case EADDRNOTAVAIL:
    case EMSGSIZE: return Code::kInvalidArgument;
    case ETIMEDOUT: return Code::kDeadlineExceeded;
    case EPROTONOSUPPORT:
    case ENOCOMPATPROTO:
    case ENOTSUP: return Code::kUnsupported;
    case EINTR:
    case ETERM: return Code::kCancelled;
    default: return Code::kInternal;
  }
}

}  // namespace

Status zmq_status(int zmq_errno, std::string_view what) {
  return Status(code_of(zmq_errno), fmt::format("{}: {}", what, zmq_strerror(zmq_errno)), ErrorSource::kZmq, zmq_errno);
}

}  // namespace headrace
