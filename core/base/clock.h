#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace headrace {

/// Monotonic time in nanoseconds. Any thread.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::int64_t now_ns() const = 0;
};

/// CLOCK_MONOTONIC.
class SteadyClock final : public Clock {
 public:
  std::int64_t now_ns() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

/// Time that only moves when a test says so.
class ManualClock final : public Clock {
 public:
  std::int64_t now_ns() const override { return now_ns_.load(std::memory_order_acquire); }
  void advance_ms(std::int64_t ms) { now_ns_.fetch_add(ms * 1'000'000, std::memory_order_acq_rel); }

 private:
  std::atomic<std::int64_t> now_ns_{0};
};

/// A deadline that follows progress: `touch()` grants the whole period again. Not thread-safe.
class ProgressDeadline {
 public:
  ProgressDeadline(const Clock& clock, std::int64_t period_ms) : clock_(&clock), period_ns_(period_ms * 1'000'000) { touch(); }
  void touch() { due_ns_ = clock_->now_ns() + period_ns_; }
  bool expired() const { return clock_->now_ns() >= due_ns_; }
  /// When it was touched last, on its clock.
  std::int64_t touched_ns() const { return due_ns_ - period_ns_; }
  /// Milliseconds left, at least 0.
  std::int64_t left_ms() const {
    const std::int64_t left = due_ns_ - clock_->now_ns();
    return left > 0 ? left / 1'000'000 : 0;
  }

 private:
  const Clock* clock_;
  std::int64_t period_ns_;
  std::int64_t due_ns_ = 0;
};

}  // namespace headrace
