#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <string>

namespace headrace {

enum class Fault : std::uint8_t { kNone, kDrop, kDuplicate, kCorrupt, kDelay, kFail, kDie };

/// Which faults a decorator injects. Everything follows from the seed, so a printed plan repeats its run.
struct FaultPlan {
  std::uint64_t seed = 0;
  // Chances at each step, 0 to 1; their sum is at most 1.
  double drop = 0;
  double duplicate = 0;
  double corrupt = 0;
  double delay = 0;
  double fail = 0;
  /// One fault at one step (counted from 0), whatever the chances say.
  std::optional<std::uint64_t> at_step = std::nullopt;
  Fault at_step_fault = Fault::kNone;
  /// From this step on everything is dead.
  std::optional<std::uint64_t> die_at_step = std::nullopt;

  /// For SCOPED_TRACE and messages.
  std::string describe() const;
};

/// Draws the fault of each step. One thread.
class FaultInjector {
 public:
  explicit FaultInjector(const FaultPlan& plan) : plan_(plan), random_(plan.seed) {}

  /// The fault of the present step; counts it.
  Fault next();
  std::uint64_t steps() const noexcept { return step_; }
  bool dead() const noexcept { return dead_; }
  /// Changes one byte at a drawn place; `bytes` is not empty.
  void corrupt(std::span<std::byte> bytes);
  const FaultPlan& plan() const noexcept { return plan_; }

 private:
  const FaultPlan plan_;
  std::mt19937_64 random_;
  std::uint64_t step_ = 0;
  bool dead_ = false;
};

}  // namespace headrace
