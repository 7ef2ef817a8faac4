#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/check.h"

namespace [[gnu::visibility("default")]] headrace {

/// Failure codes, ordered by what the caller does about them.
enum class Code : std::uint8_t {
  kOk = 0,
  kInvalidArgument = 1,     // fix the call or the input
  kFailedPrecondition = 2,  // resynchronise, then try again
  kCorruption = 3,          // resend
  kDeadlineExceeded = 4,    // retry
  kUnavailable = 5,         // reconnect
  kResourceExhausted = 6,   // shrink or wait
  kCancelled = 7,           // somebody asked for it
  kUnsupported = 8,         // use another backend
  kDeviceLost = 9,          // restart the process
  kInternal = 10,           // report a bug
};

/// The name of a code as it stands in messages and in JSON, e.g. "failed_precondition".
std::string_view code_name(Code code) noexcept;

/// Where a foreign error number came from.
enum class ErrorSource : std::uint8_t { kHeadrace = 0, kErrno = 1, kZmq = 2, kCuda = 3, kNccl = 4, kUcx = 5 };

/// Where a failure of an update was, for callers who want it in parts. Its text says the same.
struct StatusDetail {
  std::string engine;
  std::int64_t rank = -1;    // a receiver's; -1: not of one
  std::string sender;        // empty: not of one
  std::string phase;         // "hello", "open", "manifest", "transfer", "prepare", "commit"
  std::int64_t bucket = -1;  // sequence number; -1: not of one
  std::string name;          // tensor
  std::string expected;
  std::string actual;
};

/// The outcome of something that may fail for reasons outside this process. A value; free to copy.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message, ErrorSource source = ErrorSource::kHeadrace, int native = 0)
      : code_(code), source_(source), native_(native), message_(std::move(message)) {}

  bool ok() const noexcept { return code_ == Code::kOk; }
  Code code() const noexcept { return code_; }
  ErrorSource source() const noexcept { return source_; }
  /// The foreign library's own number, 0 when there is none.
  int native() const noexcept { return native_; }
  const std::string& message() const noexcept { return message_; }
  /// null where nothing more is known than the text.
  const StatusDetail* detail() const noexcept { return detail_.get(); }
  /// The same outcome with this detail.
  Status with(StatusDetail detail) const {
    Status status = *this;
    status.detail_ = std::make_shared<const StatusDetail>(std::move(detail));
    return status;
  }
  /// "failed_precondition: <message>".
  std::string to_string() const;

 private:
  Code code_ = Code::kOk;
  ErrorSource source_ = ErrorSource::kHeadrace;
  int native_ = 0;
  std::string message_;
  std::shared_ptr<const StatusDetail> detail_;  // shared: a Status is copied freely, and most have none
};

inline Status ok_status() {
  return Status{};
}
/// Translates errno: `what` says what was tried and on what.
Status errno_status(int error_number, std::string_view what);

/// Thrown where a constructor or a synchronous public call cannot go on. Carries its Status.
class Error : public std::runtime_error {
 public:
  explicit Error(Status status) : std::runtime_error(status.to_string()), status_(std::move(status)) {}
  const Status& status() const noexcept { return status_; }

 private:
  Status status_;
};

/// Throws Error unless `status` is ok.
inline void throw_if_error(Status status) {
  if (!status.ok()) throw Error(std::move(status));
}

/// A value or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    HEADRACE_CHECK(!status_.ok(), "a Result without a value needs a reason");
  }

  bool ok() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }
  T& value() & {
    HEADRACE_CHECK(ok(), "value() of a failed Result");
    return *value_;
  }
  const T& value() const& {
    HEADRACE_CHECK(ok(), "value() of a failed Result");
    return *value_;
  }
  T&& value() && {
    HEADRACE_CHECK(ok(), "value() of a failed Result");
    return std::move(*value_);
  }
  /// The value, or throws Error.
  T value_or_throw() && {
    if (!ok()) throw Error(status_);
    return std::move(*value_);
  }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace headrace

/// Returns the Status of `expr` from the enclosing function unless it is ok.
#define HEADRACE_RETURN_IF_ERROR(expr)                                               \
  do {                                                                               \
    if (::headrace::Status hr_status_ = (expr); !hr_status_.ok()) return hr_status_; \
  } while (false)
