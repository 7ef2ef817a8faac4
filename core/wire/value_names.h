#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/wire/reports.h"

namespace headrace::wire {

/// Finds the names that rules of values mean. Immutable after construction; any thread.
class ValueNames {
 public:
  ValueNames() = default;
  /// Of rules with equal prefix and suffix the one with most experts counts.
  explicit ValueNames(std::span<const ValueRule> rules);

  struct Match {
    std::uint32_t rule = 0;
    std::uint32_t expert = 0;
    bool operator==(const Match&) const = default;
  };
  std::optional<Match> find(std::string_view name) const;
  bool empty() const noexcept { return by_suffix_.empty(); }

 private:
  struct Known {
    std::uint32_t rule = 0;
    std::uint32_t experts = 0;
  };
  using ByPrefix = std::map<std::string, Known, std::less<>>;
  std::map<std::string, ByPrefix, std::less<>> by_suffix_;  // few: most names end the search here
};

}  // namespace headrace::wire
