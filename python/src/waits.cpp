#include "python/src/waits.h"

#include <nanobind/nanobind.h>

#include <chrono>
#include <optional>
#include <utility>

namespace nb = nanobind;

namespace headrace::python {
namespace {
constexpr std::chrono::milliseconds kSignalStep{50};
}

Waits::~Waits() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Waits::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return work_ != nullptr || stop_; });
    if (stop_) return;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      (*work_)();
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    thrown_ = thrown;
    work_ = nullptr;
    changed_.notify_all();
  }
}

void Waits::run(const std::function<void()>& work, const std::function<void()>& interrupt) {
  std::optional<nb::python_error> interrupted;  // begins and ends with the GIL
  std::exception_ptr thrown;
  {
    const nb::gil_scoped_release without_gil;
    std::unique_lock lock(mutex_);
    if (work_ != nullptr) {
      // A hook that asks while the main thread waits: it has no signals to look for.
      lock.unlock();
      work();
      return;
    }
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    work_ = &work;
    changed_.notify_all();
    while (!changed_.wait_for(lock, kSignalStep, [this] { return work_ == nullptr; })) {
      if (interrupted) continue;
      lock.unlock();
      {
        const nb::gil_scoped_acquire with_gil;
        if (PyErr_CheckSignals() != 0) interrupted.emplace();
      }
      if (interrupted && interrupt) interrupt();
      lock.lock();
    }
    thrown = std::exchange(thrown_, nullptr);
  }
  if (interrupted) throw nb::python_error(std::move(*interrupted));
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace headrace::python
