#pragma once

#include <functional>
#include <mutex>
#include <utility>

#include "core/base/status.h"

namespace headrace {

/// Tells a caller, once, that its memory is no longer read. Shared by everything that still reads it: the last one to let go calls, which
/// must not happen under a lock. Any thread.
class ReleaseOnce {
 public:
  explicit ReleaseOnce(std::function<void(const Status&)> released) : released_(std::move(released)) {}
  ~ReleaseOnce() {
    if (released_) released_(outcome_);
  }
  ReleaseOnce(const ReleaseOnce&) = delete;
  ReleaseOnce& operator=(const ReleaseOnce&) = delete;

  /// The first failure is what the caller hears.
  void fail(const Status& outcome) {
    const std::lock_guard lock(mutex_);
    if (outcome_.ok()) outcome_ = outcome;
  }

 private:
  std::function<void(const Status&)> released_;
  std::mutex mutex_;
  Status outcome_;  // guarded by mutex_
};

}  // namespace headrace
