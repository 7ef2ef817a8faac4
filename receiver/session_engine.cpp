// What SessionControl asks of the engine around it, and what the engine asks and tells: hooks, places, expert maps, lost content, waits.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "receiver/session_control.h"

namespace headrace {

Status SessionControl::call_hook(std::string_view name, const std::function<Status()>& hook) {
  try {
    if (hook == nullptr) return ok_status();
    Status status = hook();
    if (status.ok()) return status;
    return Status(status.code(), fmt::format("the engine's {} hook: {}", name, status.message()));
  } catch (const std::exception& error) {
    return Status(Code::kFailedPrecondition, fmt::format("the engine's {} hook threw: {}", name, error.what()));
  }
}

Status SessionControl::discard_status(std::span<const std::string> pools) {
  return Status(Code::kFailedPrecondition,
                fmt::format("the content of memory pool {} was discarded and nobody said so", fmt::join(pools, ", ")));
}

SessionControl::Attested SessionControl::attest() const {
  if (Status status = call_hook("quiescent", env_.hooks->quiescent); !status.ok()) return {status, nullptr};
  if (env_.hooks->locate != nullptr) {
    const Status placed = call_hook("locate", [&] { return env_.table->check_identity(env_.hooks->locate()); });
    if (!placed.ok()) return {placed, nullptr};
  }
  // The map moves until the engine is quiescent, so it is read last.
  Result<std::shared_ptr<const ExpertMaps>> experts = read_experts();
  if (!experts.ok()) return {experts.status(), nullptr};
  env_.experts_moved(experts.value());
  Attested attested{ok_status(), std::move(experts).value(), env_.canaries->lost()};
  attested.status = read_constants(attested);
  return attested;
}

Result<std::shared_ptr<const ExpertMaps>> SessionControl::read_experts() const {
  if (env_.hooks->expert_map == nullptr) return std::shared_ptr<const ExpertMaps>(env_.index->experts_at_load());
  std::shared_ptr<const ExpertMaps> read;
  const Status status = call_hook("expert_map", [&]() -> Status {
    Result<ExpertMaps> maps = env_.index->rebalanced(env_.hooks->expert_map());
    if (!maps.ok()) return maps.status();
    read = std::make_shared<const ExpertMaps>(std::move(maps).value());
    return ok_status();
  });
  if (!status.ok()) return status;
  return read;
}

Status SessionControl::attest_again(const SyncPlan& plan) const {
  if (env_.hooks->locate == nullptr && env_.hooks->expert_map == nullptr) return ok_status();
  const Attested now = attest();
  if (!now.status.ok() || now.experts->digest() == plan.experts().digest()) return now.status;
  return Status(Code::kFailedPrecondition, fmt::format("experts were rebalanced during the update: it was written by map {}, now it is {}",
                                                       plan.experts().digest().hex(), now.experts->digest().hex()));
}

void SessionControl::forget_content() {
  discarded_ = true;
  ++discards_;
  written_.forget();
}

void SessionControl::on_discard_found(std::span<const std::string> pools) {
  // Known, and not yet made good: the canaries come back with the first byte.
  if (discarded_) return;
  forget_content();
  apply(SessionEvent::kDiscardFound);
  last_failure_ = discard_status(pools).to_string();
}

void SessionControl::read_experts_async() {
  const auto read = [this] {
    Result<std::shared_ptr<const ExpertMaps>> experts = read_experts();
    if (experts.ok()) env_.experts_moved(experts.value());
    env_.post([this, experts = std::move(experts)] {
      // One that does not fit refuses the next OPEN; until then it is only said.
      if (experts.ok()) experts_ = experts.value();
      if (!experts.ok()) last_failure_ = experts.status().to_string();
    });
  };
  if (env_.hooks->expert_map != nullptr) (void)env_.applier->run_async(read);
}

void SessionControl::on_engine_event(EngineEvent event) {
  static constexpr std::pair<SessionEvent, std::string_view> kEvents[] = {
      {SessionEvent::kSleep, "the engine went to sleep"},
      {SessionEvent::kDiscard, "the engine discarded its weights"},
      {SessionEvent::kExpertRebalance, "the engine rebalanced its experts"},
      {SessionEvent::kLoraLoad, "the engine loaded a LoRA"},
      {SessionEvent::kForeignReload, "somebody else reloaded the weights"},
      {SessionEvent::kRecapture, "the engine captures its graphs again"}};
  const auto& [session_event, text] = kEvents[static_cast<std::size_t>(event)];
  if (event == EngineEvent::kDiscard || event == EngineEvent::kForeignReload) forget_content();
  if (event == EngineEvent::kExpertRebalance) read_experts_async();
  if (event == EngineEvent::kRecapture) captured_.recapture();
  if (session_ == nullptr) {
    apply(session_event);
    return;
  }
  fail(session_event, Status(Code::kCancelled, std::string(text) + " during an update"), phase());
}

void SessionControl::wait_for(UpdateWaits::Wait wait, std::optional<std::uint64_t> mark) {
  if (!waits_ended_.empty()) return wait.done(Status(Code::kCancelled, waits_ended_));
  if (!valid_run_id(wait.version.run)) return wait.done(Status(Code::kInvalidArgument, fmt::format("run id \"{}\"", wait.version.run)));
  if (wait.deadline_ms < 0) return wait.done(Status(Code::kInvalidArgument, fmt::format("a deadline of {} ms", wait.deadline_ms)));
  if (wait.deadline_ms == 0) wait.deadline_ms = env_.options->deadline_ms;
  if (const auto* outcome = waits_.first_after(mark.value_or(waits_.ended()), wait.version)) return wait.done(*outcome);
  if (version_ == wait.version && last_receipt_ && !committing_) return wait.done(*last_receipt_);
  wait.since_ns = env_.clock->now_ns();
  waits_.add(std::move(wait));
}

void SessionControl::end_waits(const std::string& reason) {
  waits_ended_ = reason;
  waits_.answer_failed([&](const UpdateWaits::Wait&) { return Status(Code::kCancelled, reason); });
}

Status SessionControl::failed_update(const WeightVersion& version, const Status& failure) const {
  // Whatever it was, this engine can only wait for the next one: both sides have to begin anew.
  const Status status(Code::kFailedPrecondition,
                      fmt::format("the update to {} has failed, rank {} of {} is {}: {}", version.to_string(), env_.options->rank,
                                  env_.options->engine, wire::session_state_name(state_), failure.to_string()));
  return failure.detail() != nullptr ? status.with(*failure.detail()) : status;
}

Status SessionControl::overdue(const UpdateWaits::Wait& wait) const {
  constexpr std::int64_t kNsPerMs = 1'000'000;
  // It is decided: what is left is the engine's own hook.
  if (committing_ && last_receipt_->version == wait.version) return ok_status();
  const bool begun = session_ != nullptr && session_->version == wait.version;
  const std::int64_t sign = begun ? std::max(wait.since_ns, session_->deadline.touched_ns()) : wait.since_ns;
  if ((env_.clock->now_ns() - sign) / kNsPerMs < wait.deadline_ms) return ok_status();
  const std::string held = version_ ? version_->to_string() : "none";
  StatusDetail detail;
  detail.engine = env_.options->engine;
  detail.rank = env_.options->rank;
  detail.expected = wait.version.to_string();
  detail.actual = held;
  return Status(Code::kDeadlineExceeded,
                fmt::format("the update to {} {} within {} ms: rank {} of {} is {}, its version {}{}{}", wait.version.to_string(),
                            begun ? "made no progress" : "did not begin", wait.deadline_ms, env_.options->rank, env_.options->engine,
                            wire::session_state_name(state_), held, last_failure_.empty() ? "" : ", its last failure: ", last_failure_))
      .with(std::move(detail));
}

}  // namespace headrace
