#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace [[gnu::visibility("default")]] headrace {

/// Which weights: the training run and its step. Steps rise within a run; a new run may start anywhere. Written RUN/STEP.
struct WeightVersion {
  std::string run;  // 1 to 64 characters of [A-Za-z0-9._-]
  std::uint64_t step = 0;

  bool operator==(const WeightVersion&) const = default;
  std::string to_string() const { return run + "/" + std::to_string(step); }
};

/// Whether `run` is 1 to 64 characters of [A-Za-z0-9._-].
bool valid_run_id(std::string_view run) noexcept;
/// Parses RUN/STEP; nullopt when the form is wrong.
std::optional<WeightVersion> parse_weight_version(std::string_view text);
/// A stable 64-bit number of a run id (FNV-1a), for places with no room for text, such as the guard page.
std::uint64_t run_number(std::string_view run) noexcept;

}  // namespace headrace
