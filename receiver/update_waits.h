#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "core/base/status.h"
#include "core/base/weight_version.h"
#include "core/wire/reports.h"

namespace headrace {

/// How the last sessions ended here, and who waits for one to end. An end is remembered over the next kEndsKept - 1, so that whoever looks
/// late still sees it. Progress thread only.
class UpdateWaits {
 public:
  static constexpr std::size_t kEndsKept = 16;

  /// A receipt, or why there is none.
  using Outcome = Result<wire::Receipt>;
  struct Wait {
    std::uint64_t id = 0;  // the caller's own
    WeightVersion version;
    std::int64_t deadline_ms = 0;
    std::int64_t since_ns = 0;  // when it began
    std::function<void(Outcome)> done;
  };

  /// How many sessions have ended so far.
  std::uint64_t ended() const noexcept { return ended_; }
  /// The first end of a session of `version` behind the first `mark` ends; null where there is none, or it is forgotten.
  const Outcome* first_after(std::uint64_t mark, const WeightVersion& version) const;
  void end(const WeightVersion& version, const Outcome& outcome);

  std::size_t size() const noexcept { return waits_.size(); }
  void add(Wait wait) { waits_.push_back(std::move(wait)); }
  void cancel(std::uint64_t id);
  /// Answers those that `failure_of` has a failure for; it says ok of the others.
  void answer_failed(const std::function<Status(const Wait&)>& failure_of);

 private:
  struct End {
    std::uint64_t number;
    WeightVersion version;
    Outcome outcome;
  };

  std::uint64_t ended_ = 0;
  std::deque<End> ends_;
  std::vector<Wait> waits_;
};

}  // namespace headrace
