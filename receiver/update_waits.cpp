#include "receiver/update_waits.h"

#include <fmt/format.h>

#include <utility>

namespace headrace {

const UpdateWaits::Outcome* UpdateWaits::first_after(std::uint64_t mark, const WeightVersion& version) const {
  for (const End& end : ends_)
    if (end.number >= mark && end.version == version) return &end.outcome;
  return nullptr;
}

void UpdateWaits::end(const WeightVersion& version, const Outcome& outcome) {
  ends_.push_back({ended_++, version, outcome});
  if (ends_.size() > kEndsKept) ends_.pop_front();
  std::erase_if(waits_, [&](const Wait& wait) {
    if (wait.version != version) return false;
    wait.done(outcome);
    return true;
  });
}

void UpdateWaits::cancel(std::uint64_t id) {
  answer_failed([id](const Wait& wait) {
    if (wait.id != id) return ok_status();
    return Status(Code::kCancelled, fmt::format("nobody waits for the update to {} any more", wait.version.to_string()));
  });
}

void UpdateWaits::answer_failed(const std::function<Status(const Wait&)>& failure_of) {
  std::erase_if(waits_, [&](const Wait& wait) {
    const Status failure = failure_of(wait);
    if (failure.ok()) return false;
    wait.done(failure);
    return true;
  });
}

}  // namespace headrace
