// How SessionControl takes an OPEN or refuses it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "receiver/session_control.h"

namespace headrace {

wire::Opened SessionControl::opened_message() const {
  wire::Opened opened{session_->version.to_string(), {}, experts_->digest()};
  for (const SessionSender& row : session_->senders) opened.senders.push_back(row.name);
  return opened;
}

Status SessionControl::check_version(const WeightVersion& version) const {
  if (!committed_ || committed_->run != version.run) return ok_status();
  const bool serving_it = version_ && *version_ == *committed_;
  if (version.step > committed_->step || (version.step == committed_->step && !serving_it)) return ok_status();
  return Status(Code::kFailedPrecondition,
                fmt::format("version {} after {} was committed: steps rise within a run", version.to_string(), committed_->to_string()));
}

Status SessionControl::check_open(const std::string& sender, const wire::Open& open, WeightVersion& version) const {
  const auto parsed = parse_weight_version(open.version);
  if (!parsed) return Status(Code::kInvalidArgument, fmt::format("version \"{}\" is not RUN/STEP", open.version));
  version = *parsed;
  if (open.senders.empty() || open.senders.front() != sender) {
    return Status(Code::kInvalidArgument, fmt::format("OPEN of sender {}, which does not stand first among the senders", sender));
  }
  if (std::set<std::string>(open.senders.begin(), open.senders.end()).size() != open.senders.size()) {
    return Status(Code::kInvalidArgument, "a sender is named twice");
  }
  HEADRACE_RETURN_IF_ERROR(check_scopes(open.scopes));
  if (open.overlap > static_cast<std::uint32_t>(wire::OverlapRule::kFirstSenderOwns)) {
    return Status(Code::kInvalidArgument, fmt::format("overlap rule {}", open.overlap));
  }
  if (transition(state_, SessionEvent::kOpen).answer != Answer::kTake) {
    return Status(Code::kFailedPrecondition,
                  fmt::format("an update to {} is open (state {})", session_ != nullptr ? session_->version.to_string() : "?",
                              wire::session_state_name(state_)));
  }
  return open.ranks.empty() ? check_version(version) : check_repair(version, open.ranks);
}

Status SessionControl::check_scopes(std::span<const std::string> scopes) const {
  if (scopes.empty()) return Status(Code::kInvalidArgument, "no scope");
  // A rank may hold nothing of a scope that another holds; a word that no engine has is a slip.
  static constexpr std::string_view kKnown[] = {"target", "draft", "vision", kTablesScope};
  const std::vector<std::string> held = env_.index->scopes();
  for (const std::string& scope : scopes) {
    if (std::find(held.begin(), held.end(), scope) != held.end()) continue;
    if (std::find(std::begin(kKnown), std::end(kKnown), scope) != std::end(kKnown)) continue;
    return Status(Code::kInvalidArgument, fmt::format("scope \"{}\": this rank has {}", scope, fmt::join(held, ", ")));
  }
  return ok_status();
}

Status SessionControl::check_repair(const WeightVersion& version, std::span<const std::uint32_t> ranks) const {
  const auto named = [&](std::size_t rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
  const std::vector<GuardSlot> slots = env_.guard->view().slots;
  for (const std::uint32_t rank : ranks) {
    if (rank >= slots.size()) return Status(Code::kInvalidArgument, fmt::format("repair of rank {} of {}", rank, slots.size()));
  }
  if (!named(env_.options->rank))
    return Status(Code::kInvalidArgument, fmt::format("repair of ranks {}, not of this one", fmt::join(ranks, ", ")));
  std::size_t healthy = 0;
  for (std::size_t rank = 0; rank < slots.size(); ++rank) {
    if (named(rank)) continue;
    const GuardSlot& slot = slots[rank];
    if (slot.state != SlotState::kCommitted || slot.run != run_number(version.run) || slot.step != version.step) {
      return Status(Code::kFailedPrecondition,
                    fmt::format("repair to {}: rank {} holds {}, not that version", version.to_string(), rank,
                                slot.state == SlotState::kCommitted
                                    ? fmt::format("step {} of {}run", slot.step, slot.run == run_number(version.run) ? "that " : "another ")
                                    : std::string(slot_state_name(slot.state))));
    }
    ++healthy;
  }
  // Where nobody else is left it is an update like any other.
  return healthy > 0 ? ok_status() : check_version(version);
}

void SessionControl::on_open(const PeerId& peer, const std::string& sender, SessionId id, const wire::Open& open) {
  WeightVersion version;
  Status status = id.value != 0 ? check_open(sender, open, version) : Status(Code::kInvalidArgument, "OPEN without a session id");
  if (!status.ok()) {
    // The open session, if any, is not disturbed: only the one who asked hears of it.
    const wire::Failure failure = own_failure(status, "open");
    env_.send(peer, id, wire::ErrorReport{failure, static_cast<std::uint32_t>(state_)});
    // Whoever waits for that version waits for this sender.
    if (!version.run.empty() && (session_ == nullptr || session_->version != version))
      waits_.refuse(version, failed_update(version, wire::to_status(failure)));
    return;
  }
  const std::int64_t deadline_ms = env_.options->deadline_ms;
  auto session = std::make_unique<UpdateSession>(id, version, *env_.clock, deadline_ms);
  session->options = PlanOptions{open.scopes, static_cast<wire::OverlapRule>(open.overlap), env_.options->optional_names};
  for (const std::string& name : open.senders) {
    SessionSender row;
    row.name = name;
    if (const PeerId* found = env_.peers->find_sender(name)) row.peer = *found;
    session->senders.push_back(std::move(row));
  }
  start_session(std::move(session), [this, id](const Status& attested) {
    if (!current(id)) return;
    if (!attested.ok()) return fail(SessionEvent::kFailure, attested, "open");
    session_->opened = true;
    session_->deadline.touch();
    to_senders(*session_, opened_message());
    answer_when_complete(*session_);
  });
}

void SessionControl::start_session(std::unique_ptr<UpdateSession> session, std::function<void(const Status&)> opened) {
  if (state_ == SessionState::kInDoubt) doubtful_ = std::move(session_);
  session_ = std::move(session);
  apply(SessionEvent::kOpen);
  meter_.start();
  session_->receipt.engine = env_.options->engine;
  session_->receipt.rank = env_.options->rank;
  session_->receipt.version = session_->version;
  session_->receipt.session = session_->id.value;
  // The hooks belong to the apply thread, and the answer to this one.
  const Status enqueued = env_.applier->run_async([this, opened, id = session_->id] {
    env_.post([this, opened, id, attested = attest()] {
      if (attested.status.ok()) experts_ = attested.experts;
      if (attested.constants) captured_.engine_says(*attested.constants);
      if (!attested.lost.empty() && current(id)) on_discard_found(attested.lost);
      if (current(id)) session_->options.experts = experts_;
      opened(attested.status);
    });
  });
  if (!enqueued.ok()) opened(enqueued);
}

void SessionControl::on_hello(const PeerId& peer, const std::string& sender) {
  if (session_ == nullptr || sender.empty()) return;
  SessionSender* row = session_->find(sender);
  if (row == nullptr || row->peer || state_ != SessionState::kOpen) return;
  row->peer = peer;
  if (!session_->opened) return;
  env_.send(peer, session_->id, opened_message());
}

}  // namespace headrace
