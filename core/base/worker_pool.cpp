#include "core/base/worker_pool.h"

#include <sched.h>

#include <algorithm>
#include <system_error>

#include "core/base/check.h"

namespace headrace {
namespace {

/// hardware_concurrency() may count those of the whole host. A container's quota of time is not in it.
std::uint32_t usable_cores() noexcept {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return std::thread::hardware_concurrency();
  return static_cast<std::uint32_t>(CPU_COUNT(&cores));
}

}  // namespace

std::uint32_t thread_count(std::uint32_t threads) noexcept {
  return threads != 0 ? threads : std::clamp(usable_cores(), 1U, 4U);
}

WorkerPool::WorkerPool(std::size_t threads) {
  workers_.reserve(threads);
  try {
    for (std::size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    return;  // the system gives no more threads: the loops are as right with those that there are
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::run(std::size_t count, const std::function<void(std::size_t)>& body) {
  std::unique_lock lock(mutex_);
  HEADRACE_CHECK(body_ == nullptr, "one loop at a time");
  body_ = &body;
  next_ = 0;
  count_ = count;
  if (count > 1) start_.notify_all();
  drain(lock);
  done_.wait(lock, [&] { return running_ == 0; });
  body_ = nullptr;
}

void WorkerPool::drain(std::unique_lock<std::mutex>& lock) {
  while (body_ != nullptr && next_ < count_) {
    const std::size_t index = next_++;
    const auto* body = body_;
    ++running_;
    lock.unlock();
    (*body)(index);
    lock.lock();
    if (--running_ == 0) done_.notify_all();
  }
}

void WorkerPool::work() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    start_.wait(lock, [&] { return stop_ || (body_ != nullptr && next_ < count_); });
    drain(lock);
  }
}

}  // namespace headrace
