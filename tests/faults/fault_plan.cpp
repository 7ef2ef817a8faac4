#include "tests/faults/fault_plan.h"

#include <fmt/format.h>

namespace headrace {

std::string FaultPlan::describe() const {
  std::string text =
      fmt::format("fault seed {}: drop {} duplicate {} corrupt {} delay {} fail {}", seed, drop, duplicate, corrupt, delay, fail);
  if (at_step) text += fmt::format(", fault {} at step {}", static_cast<int>(at_step_fault), *at_step);
  if (die_at_step) text += fmt::format(", die at step {}", *die_at_step);
  return text;
}

Fault FaultInjector::next() {
  const std::uint64_t step = step_++;
  // Drawn at every step, so that a fixed fault does not shift the others.
  double draw = std::uniform_real_distribution<double>(0, 1)(random_);
  if (plan_.die_at_step && step >= *plan_.die_at_step) dead_ = true;
  if (dead_) return Fault::kDie;
  if (plan_.at_step == step) return plan_.at_step_fault;
  const std::pair<Fault, double> chances[] = {{Fault::kDrop, plan_.drop},
                                              {Fault::kDuplicate, plan_.duplicate},
                                              {Fault::kCorrupt, plan_.corrupt},
                                              {Fault::kDelay, plan_.delay},
                                              {Fault::kFail, plan_.fail}};
  for (const auto& [fault, chance] : chances) {
    if (draw < chance) return fault;
    draw -= chance;
  }
  return Fault::kNone;
}

void FaultInjector::corrupt(std::span<std::byte> bytes) {
  const std::size_t place = std::uniform_int_distribution<std::size_t>(0, bytes.size() - 1)(random_);
  bytes[place] ^= static_cast<std::byte>(std::uniform_int_distribution<unsigned>(1, 255)(random_));
}

}  // namespace headrace
