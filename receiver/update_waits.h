#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "core/base/status.h"
#include "core/base/weight_version.h"
#include "core/wire/reports.h"

namespace headrace {

/// How the last sessions ended here, and who waits for one to end. An end is remembered over the next kEndsKept - 1, so that whoever looks
/// late still sees it. An OPEN that was refused is an end too, but no session: only the last of these is remembered, so that they push out
/// nothing. Progress thread only.
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

  /// How many ends there were so far.
  std::uint64_t ended() const noexcept { return ended_; }
  /// The first remembered end of an update to `version` behind the first `mark` ends; null where there is none, or it is forgotten.
  const Outcome* first_after(std::uint64_t mark, const WeightVersion& version) const;
  void end(const WeightVersion& version, const Outcome& outcome);
  /// The same of an OPEN that was refused.
  void refuse(const WeightVersion& version, const Status& why);

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

  void answer(const WeightVersion& version, const Outcome& outcome);

  std::uint64_t ended_ = 0;
  std::deque<End> ends_;  // of sessions
  std::optional<End> refused_;
  std::vector<Wait> waits_;
};

}  // namespace headrace
