#include "receiver/progress_loop.h"

#include <string>
#include <system_error>
#include <utility>

namespace headrace {

Status ProgressLoop::start(OnEvent on_event, Work tick) {
  on_event_ = std::move(on_event);
  tick_ = std::move(tick);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kResourceExhausted, std::string("start a thread: ") + error.what());
  }
  return ok_status();
}

void ProgressLoop::post(Work work) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(work));
  }
  listener_->wake();
}

void ProgressLoop::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true);
  listener_->wake();
  thread_.join();
  run_posted();
}

void ProgressLoop::run() {
  while (!stop_.load()) {
    Result<std::optional<ControlEvent>> event = listener_->poll(tick_ms_);
    // A failed poll is of one peer's making at worst; the next one waits its tick again, so this cannot spin.
    if (event.ok() && event.value()) on_event_(std::move(*event.value()));
    run_posted();
    tick_();
  }
}

void ProgressLoop::run_posted() {
  std::vector<Work> work;
  {
    const std::lock_guard lock(mutex_);
    work.swap(posted_);
  }
  for (Work& each : work) each();
}

}  // namespace headrace
