#pragma once

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/base/status.h"
#include "python/src/errors.h"
#include "python/src/waits.h"

namespace headrace::python {

/// A Receiver or a Sender as threads of Python use it: close() may meet calls of other threads, which it makes end first, and a process
/// that was forked from the one that made it has no part in it.
template <class End>
class OpenEnd {
 public:
  explicit OpenEnd(const char* what) : what_(what) {}
  ~OpenEnd() {
    if (!forked()) return;
    // Their threads are in the process that this one was forked from, and whatever they had locked stays locked here.
    [[maybe_unused]] const End* end = end_.release();
    [[maybe_unused]] const Waits* waits = waits_.release();
  }
  OpenEnd(const OpenEnd&) = delete;
  OpenEnd& operator=(const OpenEnd&) = delete;

  void set(std::unique_ptr<End> end) { end_ = std::move(end); }
  Waits& waits() noexcept { return *waits_; }
  bool closed() const noexcept { return end_ == nullptr; }
  bool forked() const noexcept { return ::getpid() != process_; }
  /// Needs the GIL, as all but the destructor. Throws headrace.FailedPrecondition.
  End& get() const {
    if (end_ == nullptr) raise(Status(Code::kFailedPrecondition, fmt::format("the {} is closed", what_)));
    if (forked()) {
      raise(Status(Code::kFailedPrecondition, fmt::format("the {} is of process {}, which this one was forked from", what_, process_)));
    }
    return *end_;
  }
  /// What keeps the end in place; close() waits for it. Made with the GIL, where get() has found one.
  class Use {
   public:
    explicit Use(OpenEnd& end) : end_(end) {
      const std::lock_guard lock(end_.mutex_);
      ++end_.uses_;
    }
    ~Use() {
      const std::lock_guard lock(end_.mutex_);
      if (--end_.uses_ == 0) end_.unused_.notify_all();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    OpenEnd& end_;
  };
  /// `work` with the end, which stays until it has returned; `interrupt` as for Waits::run.
  void run(const std::function<void(End&)>& work, const std::function<void(End&)>& interrupt) {
    End& end = get();
    const Use use(*this);
    waits_->run([&] { work(end); }, [&] { interrupt(end); });
  }
  /// Ends calls of other threads by `interrupt`, waits for them and destroys the end; false if there was none.
  bool close(const std::function<void(End&)>& interrupt) {
    if (end_ == nullptr || forked()) return false;
    std::unique_ptr<End> end = std::move(end_);
    const nanobind::gil_scoped_release without_gil;  // its threads may be in a hook
    std::unique_lock lock(mutex_);
    if (uses_ != 0) {
      lock.unlock();
      interrupt(*end);
      lock.lock();
      unused_.wait(lock, [this] { return uses_ == 0; });
    }
    end.reset();
    return true;
  }

 private:
  const char* what_;
  const pid_t process_ = ::getpid();
  std::unique_ptr<End> end_;
  std::unique_ptr<Waits> waits_ = std::make_unique<Waits>();
  std::mutex mutex_;
  std::condition_variable unused_;
  int uses_ = 0;  // guarded by mutex_
};

}  // namespace headrace::python
