#include "core/transport/wake_event.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace headrace {

Result<WakeEvent> WakeEvent::create() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) return errno_status(errno, "create an eventfd");
  return WakeEvent(std::move(fd));
}

void WakeEvent::set() noexcept {
  const std::uint64_t one = 1;
  // It can only fail when the counter is full, and then it is set.
  [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof one);
}

bool WakeEvent::take() noexcept {
  std::uint64_t count = 0;
  return ::read(fd_.get(), &count, sizeof count) == static_cast<ssize_t>(sizeof count);
}

}  // namespace headrace
