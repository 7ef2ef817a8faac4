#include "core/device/host_stream.h"

#include <fmt/format.h>
#include <pthread.h>

#include <chrono>
#include <utility>

namespace headrace {

void HostEvent::finish(Status outcome) {
  {
    const std::lock_guard lock(mutex_);
    if (done_) return;
    done_ = true;
    outcome_ = std::move(outcome);
  }
  finished_.notify_all();
}

bool HostEvent::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

Status HostEvent::wait(std::int64_t timeout_ms) const {
  std::unique_lock lock(mutex_);
  const bool finished = finished_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return done_; });
  if (!finished) return Status(Code::kDeadlineExceeded, fmt::format("wait for a host event: not finished after {} ms", timeout_ms));
  return outcome_;
}

HostStream::HostStream(std::string label) : label_(std::move(label)), queue_(kQueueItemsMax), thread_([this] { run(); }) {
  ::pthread_setname_np(thread_.native_handle(), label_.substr(0, 15).c_str());
}

HostStream::~HostStream() {
  queue_.close();
  thread_.join();
}

Status HostStream::enqueue(std::function<void()> work) {
  if (!work) return Status(Code::kInvalidArgument, fmt::format("stream {}: enqueue of an empty function", label_));
  return push(Item{std::move(work), nullptr, nullptr});
}

Result<std::shared_ptr<Event>> HostStream::record() {
  auto event = std::make_shared<HostEvent>();
  HEADRACE_RETURN_IF_ERROR(push(Item{nullptr, event, nullptr}));
  return std::shared_ptr<Event>(std::move(event));
}

Status HostStream::wait(std::shared_ptr<Event> event) {
  if (event == nullptr) return Status(Code::kInvalidArgument, fmt::format("stream {}: wait for no event", label_));
  return push(Item{nullptr, nullptr, std::move(event)});
}

Status HostStream::synchronize(std::int64_t timeout_ms) {
  if (std::this_thread::get_id() == thread_.get_id()) {
    return Status(Code::kFailedPrecondition, fmt::format("stream {}: synchronize on its own thread", label_));
  }
  auto event = record();
  if (!event.ok()) return event.status();
  return event.value()->wait(timeout_ms);
}

Status HostStream::push(Item item) {
  if (queue_.try_push(std::move(item))) return ok_status();
  if (std::this_thread::get_id() == thread_.get_id()) {
    return Status(Code::kResourceExhausted, fmt::format("stream {}: {} items queued, its own thread cannot wait", label_, kQueueItemsMax));
  }
  if (queue_.push(std::move(item))) return ok_status();  // NOLINT(bugprone-use-after-move): a refused try_push leaves the item alone
  return Status(Code::kCancelled, fmt::format("stream {}: it is being destroyed", label_));
}

void HostStream::run() {
  // What follows a failed wait must not run: it would read what was never finished.
  Status failed;
  while (auto item = queue_.pop()) {
    if (item->mark) {
      item->mark->finish(failed);
    } else if (!failed.ok()) {
      continue;
    } else if (item->gate) {
      Status outcome;
      do {
        outcome = item->gate->wait(1'000);
      } while (outcome.code() == Code::kDeadlineExceeded && !item->gate->done());
      if (!outcome.ok()) failed = std::move(outcome);
    } else {
      item->work();
    }
  }
}

}  // namespace headrace
