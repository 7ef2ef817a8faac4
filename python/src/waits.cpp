#include "python/src/waits.h"

#include <nanobind/nanobind.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

namespace nb = nanobind;

namespace headrace::python {
namespace {
constexpr std::chrono::milliseconds kSignalStep{50};

bool hears_signals() {
  const nb::module_ threading = nb::module_::import_("threading");
  return threading.attr("get_ident")().equal(threading.attr("main_thread")().attr("ident"));
}
}  // namespace

struct Waits::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> work;  // this and what follows guarded by mutex
  bool busy = false;
  bool stop = false;
  std::exception_ptr thrown;
};

Waits::Waits() : shared_(std::make_shared<Shared>()) {}

Waits::~Waits() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->changed.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Waits::serve(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  while (true) {
    shared->changed.wait(lock, [&] { return shared->work != nullptr || shared->stop; });
    if (shared->work == nullptr) return;
    std::function<void()> work = std::exchange(shared->work, nullptr);
    lock.unlock();
    std::exception_ptr thrown;
    try {
      work();
    } catch (...) {
      thrown = std::current_exception();
    }
    work = nullptr;
    lock.lock();
    shared->thrown = thrown;
    shared->busy = false;
    shared->changed.notify_all();
  }
}

void Waits::run(std::function<void()> work, const std::function<void()>& interrupt) {
  const bool alone = !hears_signals();
  std::optional<nb::python_error> interrupted;  // begins and ends with the GIL
  std::exception_ptr thrown;
  {
    const nb::gil_scoped_release without_gil;
    if (alone) return work();
    std::unique_lock lock(shared_->mutex);
    if (shared_->busy) {
      // A signal's handler that asks while its thread waits below.
      lock.unlock();
      return work();
    }
    if (!thread_.joinable()) thread_ = std::thread([shared = shared_] { serve(shared); });
    shared_->work = std::move(work);
    shared_->busy = true;
    shared_->changed.notify_all();
    while (!shared_->changed.wait_for(lock, kSignalStep, [this] { return !shared_->busy; })) {
      if (interrupted) continue;
      lock.unlock();
      {
        const nb::gil_scoped_acquire with_gil;
        if (PyErr_CheckSignals() != 0) interrupted.emplace();
      }
      if (interrupted && interrupt) interrupt();
      lock.lock();
      if (interrupted && !interrupt) break;
    }
    if (shared_->busy) {
      shared_->stop = true;
      thread_.detach();
      lock.unlock();
      shared_ = std::make_shared<Shared>();
    } else {
      thrown = std::exchange(shared_->thrown, nullptr);
    }
  }
  if (interrupted) throw nb::python_error(std::move(*interrupted));
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace headrace::python
