#include "receiver/update_waits.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace headrace {

const UpdateWaits::Outcome* UpdateWaits::first_after(std::uint64_t mark, const WeightVersion& version) const {
  const auto is_meant = [&](const End& end) { return end.number >= mark && end.version == version; };
  const End* refused = refused_ && is_meant(*refused_) ? &*refused_ : nullptr;
  const auto ended = std::find_if(ends_.begin(), ends_.end(), is_meant);
  if (ended != ends_.end() && (refused == nullptr || ended->number < refused->number)) return &ended->outcome;
  return refused != nullptr ? &refused->outcome : nullptr;
}

void UpdateWaits::end(const WeightVersion& version, const Outcome& outcome) {
  ends_.push_back({ended_++, version, outcome});
  if (ends_.size() > kEndsKept) ends_.pop_front();
  answer(version, outcome);
}

void UpdateWaits::refuse(const WeightVersion& version, const Status& why) {
  refused_ = End{ended_++, version, why};
  answer(version, why);
}

void UpdateWaits::answer(const WeightVersion& version, const Outcome& outcome) {
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
