// The plain call of SessionControl: an engine hands over named tensors itself, between begin and finish.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "receiver/session_control.h"

namespace headrace {
namespace {

// Less may be in a cache when it is read a second time, or be joined with copies of neighbours.
constexpr std::size_t kSummedBytesMin = 1 << 20;

bool is_whole(const Box& box, const Shape& shape) {
  return box.hi == shape && std::all_of(box.lo.begin(), box.lo.end(), [](std::int64_t at) { return at == 0; });
}

bool wants_whole(const PlanEntry& entry, const Shape& shape) {
  return entry.wanted.size() == 1 && is_whole(entry.wanted.front(), shape);
}

/// What this rank wants of an entry of a one-sender plan, summed over the packed bytes of the whole tensor; with a cast also over what it
/// becomes.
CastSums wanted_sums(const SyncPlan& plan, std::uint32_t entry, std::span<const std::byte> bytes) {
  CastSums sums;
  const PlanEntry& planned = plan.entries(0)[entry];
  if (planned.tensor < 0) return sums;
  const PlanTensor& tensor = plan.tensors()[static_cast<std::size_t>(planned.tensor)];
  const Shape& shape = plan.entry(0, entry).shape;
  if (tensor.cast.none() && wants_whole(planned, shape)) {
    sums.read = fingerprint(tensor.key, 0, bytes);
    return sums;
  }
  const auto strides = packed_strides(shape, tensor.elem_bytes);
  for (const Box& box : planned.wanted) {
    const Result<StridedCopy> nest = plan.tensor_nest(tensor, box, strides);
    HEADRACE_CHECK(nest.ok(), "a box of a packed tensor is a nest");
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < strides.size(); ++d) offset += box.lo[d] * strides[d];
    if (tensor.cast.none()) {
      sums.read += fingerprint_nest(tensor.key, inverse(nest.value()), bytes.data() + offset);
    } else {
      const CastSums part = fingerprint_cast(tensor.key, tensor.live_key, tensor.cast, nest.value(), bytes.data() + offset);
      sums.read += part.read;
      sums.converted += part.converted;
    }
  }
  return sums;
}

}  // namespace

void SessionControl::begin_plain(const WeightVersion& version, Done done) {
  if (!valid_run_id(version.run)) return done(Status(Code::kInvalidArgument, fmt::format("run id \"{}\"", version.run)));
  if (transition(state_, SessionEvent::kOpen).answer != Answer::kTake) {
    return done(Status(Code::kFailedPrecondition, fmt::format("an update is open (state {})", wire::session_state_name(state_))));
  }
  if (Status status = check_version(version); !status.ok()) return done(status);
  auto session = std::make_unique<UpdateSession>(SessionId{random_u64()}, version, *env_.clock, env_.options->deadline_ms);
  session->options = PlanOptions{env_.index->scopes(), wire::OverlapRule::kRefuse, env_.options->optional_names};
  plain_sums_.clear();
  plain_inputs_.clear();
  if (!env_.values->empty()) session->values.emplace(*env_.values);
  const SessionId id = session->id;
  plain_begun_ = std::move(done);  // fail() answers too: whoever gives the update up does not wait for a slow hook
  start_session(std::move(session), [this, id](const Status& attested) {
    if (!current(id)) return;
    if (!attested.ok()) return fail(SessionEvent::kFailure, attested, "open");
    session_->opened = session_->begun = true;
    plain_calls_.begin((session_->options.experts != nullptr ? session_->options.experts : env_.index->experts_at_load())->digest());
    std::exchange(plain_begun_, nullptr)(ok_status());
  });
}

Result<std::shared_ptr<const SyncPlan>> SessionControl::plan_plain(std::span<const NamedView> tensors) const {
  for (const NamedView& view : tensors) {
    const auto bytes = byte_count(view.dtype, view.shape);
    if (bytes && static_cast<std::size_t>(*bytes) == view.bytes.size()) continue;
    return Status(Code::kInvalidArgument, fmt::format("{}: {} bytes for shape {} of {}", view.name, view.bytes.size(),
                                                      to_string(view.shape), dtype_name(view.dtype)));
  }
  if (std::shared_ptr<const SyncPlan> known = plain_calls_.known(tensors)) return known;
  SenderPart part{"load", {}, {}};
  part.entries.reserve(tensors.size());
  for (const NamedView& view : tensors) {
    Shape shape(view.shape.begin(), view.shape.end());
    part.entries.push_back({std::string(view.name), view.dtype, shape, Box::whole(shape)});
  }
  PlanOptions options = session_->options;
  options.check_coverage = false;
  SyncPlan::Outcome outcome = SyncPlan::compile(*env_.index, *env_.geometry, env_.table->digest(), {std::move(part)}, options);
  if (outcome.plan == nullptr) return wire::to_status(outcome.defects.front());
  return outcome.plan;
}

Status SessionControl::jobs_plain(const SyncPlan& plan, std::span<const NamedView> tensors, ApplyWork& work) const {
  const auto scratch = plan.groups(0).empty() ? std::span<std::byte>() : env_.scratch->at(0);
  std::size_t bytes_of_all = 0;
  for (const NamedView& view : tensors) bytes_of_all += view.bytes.size();
  // Where there are enough of them to keep all threads busy, each on one.
  const std::size_t summed_bytes_max = bytes_of_all / env_.applier->threads();
  work.jobs.reserve(plan.tensors().size());
  const auto append = [&](std::uint32_t t) {
    const PlanTensor& tensor = plan.tensors()[t];
    const std::uint32_t e = tensor.entries.front().second;
    const Shape& shape = plan.entry(0, e).shape;
    const PlanEntry& planned = plan.entries(0)[e];
    const std::byte* bytes = tensors[e].bytes.data();
    if (wants_whole(planned, shape)) {
      const std::size_t before = work.jobs.size();
      HEADRACE_RETURN_IF_ERROR(plan.append_jobs(tensor, planned.wanted.front(), bytes, {}, work.jobs, scratch.data()));
      const std::size_t size = tensors[e].bytes.size();
      if (scratch.empty() && size >= kSummedBytesMin && size <= summed_bytes_max && work.jobs.size() == before + 1 &&
          brings_all_once(work.jobs.back().job, tensors[e].bytes)) {
        work.summed.push_back({e, tensor.key, work.jobs.back().job});
        work.jobs.pop_back();
      }
      return ok_status();
    }
    const auto strides = packed_strides(shape, tensor.elem_bytes);
    for (const Box& box : planned.wanted) {
      std::int64_t offset = 0;
      for (std::size_t d = 0; d < strides.size(); ++d) offset += box.lo[d] * strides[d];
      HEADRACE_RETURN_IF_ERROR(plan.append_jobs(tensor, box, bytes + offset, strides, work.jobs, scratch.data()));
    }
    return ok_status();
  };
  // Tensors that land by a copy first, then group by group: one scratch serves them all.
  for (std::uint32_t t = 0; t < plan.tensors().size(); ++t) {
    if (env_.index->rule(plan.tensors()[t].rule).group < 0) HEADRACE_RETURN_IF_ERROR(append(t));
  }
  for (const PlanGroup& group : plan.groups(0)) {
    for (const std::uint32_t t : group.tensors) HEADRACE_RETURN_IF_ERROR(append(t));
    work.groups.push_back({group.group, group.tensors, scratch, work.jobs.size()});
  }
  return ok_status();
}

void SessionControl::load_plain(std::span<const NamedView> tensors, Done done) {
  if (session_ == nullptr || !session_->plain() || !session_->begun) {
    return done(Status(Code::kFailedPrecondition, last_failure_.empty() ? "load() outside begin() and finish()" : last_failure_));
  }
  // Every call is a small update of its own up to its first byte: resolved and checked as a whole.
  ApplyWork work;
  const Result<std::shared_ptr<const SyncPlan>> planned = plan_plain(tensors);
  Status checked = planned.ok() ? jobs_plain(*planned.value(), tensors, work) : planned.status();
  if (checked.ok()) checked = values_plain(tensors);
  if (!checked.ok()) {
    // Earlier calls may have written: then what is in storage is half of an update, and says so.
    if (state_ == SessionState::kApplying) fail(SessionEvent::kFailure, checked, "transfer");
    return done(checked);
  }
  const std::shared_ptr<const SyncPlan>& plan = planned.value();
  first_enqueue();
  session_->deadline.touch();
  const SessionId id = session_->id;
  work.given = tensors.size();
  work.sum_given = [plan, tensors](std::size_t e) { return wanted_sums(*plan, static_cast<std::uint32_t>(e), tensors[e].bytes); };
  const Status enqueued = env_.applier->apply_async(plan, std::move(work), [this, id, tensors, done, plan](const ApplyStats& stats) {
    env_.post([this, id, stats = ApplyStats(stats), done, tensors, plan]() mutable {
      if (!current(id)) return done(Status(Code::kCancelled, last_failure_));
      if (!stats.status.ok()) {
        fail(SessionEvent::kFailure, stats.status, "transfer");
        return done(stats.status);
      }
      const std::size_t before = plain_sums_.size();
      plain_inputs_.resize(before + tensors.size());
      for (const auto& [t, sum] : stats.input_sums) plain_inputs_[before + plan->tensors()[t].entries.front().second] = sum;
      stats.input_sums.clear();  // kept until there is a plan of the whole
      session_->count(stats);
      plain_sums_.insert(plain_sums_.end(), stats.given_sums.begin(), stats.given_sums.end());
      plain_calls_.take(plan);
      done(ok_status());
    });
  });
  if (!enqueued.ok()) done(enqueued);
}

void SessionControl::finish_plain(ReceiptDone done) {
  if (session_ == nullptr || !session_->plain()) {
    return done(Status(Code::kFailedPrecondition, last_failure_.empty() ? "finish() without begin()" : last_failure_));
  }
  plain_done_ = std::move(done);
  wire::Reject refusal;
  std::shared_ptr<const SyncPlan> plan = plain_calls_.whole();
  session_->receipt.plan_cached = plan != nullptr;
  if (plan == nullptr) {
    SenderPart part{"load", {}, plain_calls_.entries()};
    SyncPlan::Outcome outcome = SyncPlan::compile(*env_.index, *env_.geometry, env_.table->digest(), {std::move(part)}, session_->options);
    refusal = {outcome.defects_total, std::move(outcome.defects)};
    plan = std::move(outcome.plan);
    plain_calls_.keep_whole(plan);
  }
  check_values(*session_, {}, refusal);
  if (refusal.defects_total != 0) {
    wire::Failure failure = refusal.defects.front();
    if (refusal.defects_total > 1) failure.message += fmt::format(" (and {} more)", refusal.defects_total - 1);
    return fail(SessionEvent::kFailure, std::move(failure));
  }
  session_->adopt(std::move(plan));
  for (std::size_t t = 0; t < session_->sums.size(); ++t) {
    const CastSums& given = plain_sums_[session_->plan->tensors()[t].entries.front().second];
    session_->sums[t] = given.read;
    if (session_->plan->converts()) session_->cast_sums[t] = given;
    if (!session_->input_sums.empty()) session_->input_sums[t] = plain_inputs_[session_->plan->tensors()[t].entries.front().second];
  }
  session_->receipt.data_path = "load";
  prove(*session_);
}

Status SessionControl::abort_plain(const std::string& reason) {
  if (session_ == nullptr || !session_->plain()) return Status(Code::kFailedPrecondition, "abort() without begin()");
  fail(SessionEvent::kAbort, Status(Code::kCancelled, reason), phase());
  return ok_status();
}

}  // namespace headrace
