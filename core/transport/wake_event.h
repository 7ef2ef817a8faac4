#pragma once

#include "core/base/status.h"
#include "core/base/unique_fd.h"

namespace headrace {

/// An eventfd that stays readable from set() until take(). Any thread.
class WakeEvent {
 public:
  static Result<WakeEvent> create();
  int fd() const noexcept { return fd_.get(); }
  void set() noexcept;
  /// Whether it was set; it no longer is.
  bool take() noexcept;

 private:
  explicit WakeEvent(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

}  // namespace headrace
