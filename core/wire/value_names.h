#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/fingerprint_sum.h"
#include "core/wire/reports.h"

namespace headrace::wire {

/// Finds the names that rules of values mean. Immutable after construction; any thread.
class ValueNames {
 public:
  ValueNames() = default;
  /// Rules without experts mean one name, `suffix`: its value is a fingerprint, with `prefix` as the name in its key.
  /// Of rules with equal prefix and suffix the one with most experts counts.
  explicit ValueNames(std::span<const ValueRule> rules);

  struct Match {
    std::uint32_t rule = 0;
    std::uint32_t expert = 0;
    bool operator==(const Match&) const = default;
  };
  std::optional<Match> find(std::string_view name) const;
  bool empty() const noexcept { return by_suffix_.empty() && ties_.empty(); }
  /// Of a name whose value is a fingerprint (a rule of no experts): the name in that fingerprint's key. Null for others.
  const std::string* tied_to(std::string_view name) const;
  /// A name that rules tie to different ones; empty for none.
  const std::string& conflict() const noexcept { return conflict_; }

 private:
  struct Known {
    std::uint32_t rule = 0;
    std::uint32_t experts = 0;
  };
  using ByPrefix = std::map<std::string, Known, std::less<>>;
  struct Tie {
    std::uint32_t rule = 0;
    std::string to;
  };
  std::map<std::string, Tie, std::less<>> ties_;  // by whole name
  std::string conflict_;
  std::map<std::string, ByPrefix, std::less<>> by_suffix_;  // few: most names end the search here
};

/// A fingerprint as the value of an entry, and back; nullopt for other lengths.
std::vector<std::byte> value_of(const FingerprintSum& sum);
std::optional<FingerprintSum> fingerprint_of(std::span<const std::byte> value);

}  // namespace headrace::wire
