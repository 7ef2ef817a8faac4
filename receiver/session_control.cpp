#include "receiver/session_control.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include "core/wire/codec.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

SlotState slot_state(SessionState state, SessionState resting, bool has_version) {
  switch (state == SessionState::kOpen ? resting : state) {
    case SessionState::kIdle:
    case SessionState::kOpen: return has_version ? SlotState::kCommitted : SlotState::kNone;
    case SessionState::kApplying: return SlotState::kApplying;
    case SessionState::kPrepared: return SlotState::kPrepared;
    case SessionState::kTorn: return SlotState::kTorn;
    case SessionState::kInDoubt: return SlotState::kInDoubt;
  }
  return SlotState::kNone;
}

}  // namespace

SessionControl::SessionControl(Environment environment)
    : env_(std::move(environment)),
      experts_(env_.index->experts_at_load()),
      captured_(env_.values->constants().size()),
      written_(*env_.index, *env_.geometry, env_.options->optional_names) {}

void SessionControl::describe(wire::Welcome& welcome) const {
  welcome.state = static_cast<std::uint32_t>(state_);
  welcome.state_session =
      session_ != nullptr ? session_->id.value : (state_ == SessionState::kTorn ? failed_session_.value : last_session_.value);
  welcome.version = version_ ? version_->to_string() : "";
  welcome.expert_map = experts_->digest();
}

void SessionControl::describe(wire::StatusReply& reply) const {
  reply.state = static_cast<std::uint32_t>(state_);
  reply.version = version_ ? version_->to_string() : "";
  reply.attempted_version = session_ != nullptr ? session_->version.to_string() : (state_ == SessionState::kTorn ? attempted_ : "");
  reply.serving = env_.guard->view().open();
  reply.updates = updates_;
  reply.engram_calls = engram_calls_;
  reply.memory_extra_bytes_max = meter_.extra_bytes_max();
  reply.last_failure = last_failure_.substr(0, limits::kTextBytesMax);
  reply.discards = discards_;
}

// ---- states ---------------------------------------------------------------------------------------------------------------------

bool SessionControl::apply(SessionEvent event) {
  const Transition t = transition(state_, event);
  if (t.answer != Answer::kTake) return false;
  if (event == SessionEvent::kOpen) resting_ = state_;
  if (t.forget_version && state_ == SessionState::kOpen && resting_ == SessionState::kInDoubt) {
    // What was prepared in the doubtful session is gone too: nobody may commit it any more.
    resting_ = SessionState::kTorn;
    doubtful_.reset();
  }
  state_ = t.back ? resting_ : t.next;
  if (t.forget_version) version_.reset();
  publish();
  return true;
}

void SessionControl::publish() {
  const SlotState next = slot_state(state_, resting_, version_.has_value());
  const WeightVersion shown = session_ != nullptr && next != SlotState::kCommitted ? session_->version : version_.value_or(WeightVersion{});
  if (next == published_ && next != SlotState::kCommitted) return;
  const std::uint64_t session = session_ != nullptr && next != SlotState::kCommitted ? session_->id.value : last_session_.value;
  env_.guard->publish(next, session, shown);
  published_ = next;
}

void SessionControl::first_enqueue() {
  if (state_ != SessionState::kOpen) return;
  apply(SessionEvent::kFirstEnqueue);
  if (session_->plan != nullptr) {
    written_.begin(*session_->plan);
  } else {
    written_.forget();
  }
  restore_after_discard();
}

void SessionControl::restore_after_discard() {
  if (std::exchange(discarded_, false)) (void)env_.applier->run_async(env_.restore);
}

std::string SessionControl::phase() const {
  switch (state_) {
    case SessionState::kIdle:
    case SessionState::kTorn: return "idle";
    case SessionState::kOpen:
      return session_ != nullptr && session_->begun ? "transfer" : (session_ != nullptr && session_->opened ? "manifest" : "open");
    case SessionState::kApplying:
      return session_ != nullptr && session_->coverage != nullptr && session_->coverage->complete() ? "prepare" : "transfer";
    case SessionState::kPrepared:
    case SessionState::kInDoubt: return "commit";
  }
  return "";
}

void SessionControl::name_rank(wire::Failure& failure) const {
  failure.engine = env_.options->engine;
  failure.rank = env_.options->rank;
}

wire::Failure SessionControl::own_failure(const Status& status, std::string phase) const {
  wire::Failure failure = wire::make_failure(status, std::move(phase));
  name_rank(failure);
  return failure;
}

void SessionControl::fail(SessionEvent event, const Status& status, std::string phase) {
  fail(event, wire::make_failure(status, std::move(phase)));
}

void SessionControl::fail(SessionEvent event, wire::Failure failure) {
  const Transition t = transition(state_, event);
  if (t.answer != Answer::kTake) return;
  // An ABORT may carry what another rank found.
  if (failure.engine.empty()) name_rank(failure);
  last_failure_ = wire::to_status(failure).to_string();
  std::unique_ptr<UpdateSession> ended;
  // In doubt the session lives on: it may still be committed.
  if (t.next != SessionState::kInDoubt) ended = std::move(session_);
  apply(event);
  if (state_ == SessionState::kInDoubt && session_ == nullptr) session_ = std::move(doubtful_);
  doubtful_.reset();
  const UpdateSession* session = ended != nullptr ? ended.get() : session_.get();
  if (session == nullptr) return;
  attempted_ = session->version.to_string();
  if (ended != nullptr) {
    failed_session_ = ended->id;
    failure_ = failure;
  }
  for (const SessionSender& sender : session->senders) {
    if (sender.peer) env_.send(*sender.peer, session->id, wire::ErrorReport{failure, static_cast<std::uint32_t>(state_)});
  }
  waits_.end(session->version, failed_update(session->version, wire::to_status(failure)));
  if (plain_begun_) std::exchange(plain_begun_, nullptr)(wire::to_status(failure));
  if (plain_done_) std::exchange(plain_done_, nullptr)(wire::to_status(failure));
}

void SessionControl::to_senders(const UpdateSession& session, const wire::Body& body) {
  for (const SessionSender& sender : session.senders)
    if (sender.peer) env_.send(*sender.peer, session.id, body);
}

// ---- messages -------------------------------------------------------------------------------------------------------------------

void SessionControl::on_message(const PeerId& peer, PeerBook::Peer& from, wire::Message message, std::vector<std::byte> attachment) {
  if (const auto* open = std::get_if<wire::Open>(&message.body)) return on_open(peer, from.sender, message.session, *open);
  if (std::holds_alternative<wire::Commit>(message.body)) return on_commit(peer, message.session);
  if (!current(message.session)) {
    // Of a session that failed here: whoever still talks in it hears why. Anything else is late or lost its way, and harms nobody.
    if (message.session == failed_session_ && failed_session_.value != 0 && !std::holds_alternative<wire::Abort>(message.body)) {
      env_.send(peer, message.session, wire::ErrorReport{failure_, static_cast<std::uint32_t>(state_)});
    }
    return;
  }
  UpdateSession& session = *session_;
  SessionSender* sender = session.find(peer);
  if (sender == nullptr) return;
  if (!std::holds_alternative<wire::Ping>(message.body)) session.deadline.touch();
  if (auto* manifest = std::get_if<wire::Manifest>(&message.body)) {
    on_manifest(session, *sender, std::move(*manifest));
  } else if (std::holds_alternative<wire::Confirm>(message.body)) {
    on_confirm(session, *sender);
  } else if (const auto* bucket = std::get_if<wire::Bucket>(&message.body)) {
    on_bucket(session, *sender, from, *bucket, std::move(attachment));
  } else if (const auto* end = std::get_if<wire::End>(&message.body)) {
    on_end(session, *sender, *end);
  } else if (auto* abort = std::get_if<wire::Abort>(&message.body)) {
    abort->failure.sender = sender->name;
    fail(SessionEvent::kAbort, std::move(abort->failure));
  } else if (const auto* ping = std::get_if<wire::Ping>(&message.body)) {
    if (ping->progress > sender->progress) session.deadline.touch();
    sender->progress = ping->progress;
    env_.send(peer, session.id, wire::Pong{env_.applier->progress() + session.receipt.buckets, static_cast<std::uint32_t>(state_)});
  } else {
    fail(SessionEvent::kFailure,
         Status(Code::kInvalidArgument, fmt::format("{} from a sender in a session", wire::message_name(wire::type_of(message.body)))),
         phase());
  }
}

void SessionControl::on_manifest(UpdateSession& session, SessionSender& sender, wire::Manifest manifest) {
  // The lead chose the session's number, so its manifest may follow OPEN at once.
  const bool told = session.opened || &sender == session.senders.data();
  if (sender.part || !told) {
    return fail(SessionEvent::kFailure,
                Status(Code::kFailedPrecondition, fmt::format("MANIFEST of sender {} before OPENED, or twice", sender.name)), "manifest");
  }
  // What was committed last is still here, so a sender may name it by its digest; one that starts anew sends it again.
  const bool held = last_part(sender.name, manifest.digest) != nullptr;
  if (manifest.known && !held) {
    return fail(
        SessionEvent::kFailure,
        Status(Code::kFailedPrecondition, fmt::format("manifest {} of sender {} is not known here", manifest.digest.hex(), sender.name)),
        "manifest");
  }
  if (!manifest.known && digest_of(manifest.entries) != manifest.digest) {
    return fail(SessionEvent::kFailure,
                Status(Code::kCorruption, fmt::format("manifest of sender {} does not hash to its digest", sender.name)), "manifest");
  }
  sender.known_manifest = manifest.known;
  sender.values = std::move(manifest.values);
  std::sort(sender.values.begin(), sender.values.end(), [](const auto& a, const auto& b) { return a.entry < b.entry; });
  SenderPart part{sender.name, manifest.digest, {}};
  if (!held) {
    Result<std::vector<wire::ManifestEntry>> entries = wire::decode_entries(manifest.entries);
    if (!entries.ok()) return fail(SessionEvent::kFailure, entries.status(), "manifest");
    part.entries = std::move(entries).value();
  }
  sender.part = std::move(part);
  answer_when_complete(session);
}

void SessionControl::answer_when_complete(UpdateSession& session) {
  // Not before the engine has said which experts live where.
  if (!session.opened) return;
  if (std::all_of(session.senders.begin(), session.senders.end(), [](const SessionSender& s) { return s.part.has_value(); })) {
    answer_manifests(session);
  }
}

const SenderPart* SessionControl::last_part(const std::string& sender, const Digest& digest) const {
  if (last_plan_ == nullptr) return nullptr;
  for (const SenderPart& part : last_plan_->parts())
    if (part.sender == sender && part.digest == digest) return &part;
  return nullptr;
}

void SessionControl::answer_manifests(UpdateSession& session) {
  std::vector<SenderPart> parts;
  for (SessionSender& sender : session.senders) parts.push_back(std::move(*sender.part));
  const Digest key = SyncPlan::key_of(*env_.index, env_.table->digest(), parts, session.options);
  wire::Reject refusal;
  wire::Reject values;
  if (last_plan_ != nullptr && last_plan_->key() == key) {
    session.receipt.plan_cached = true;
    session.asked = last_asked_;
    session.adopt(last_plan_);
    values = read_values(session, last_plan_->parts());
  } else {
    for (std::size_t s = 0; s < parts.size(); ++s) {
      if (const SenderPart* held = last_part(parts[s].sender, parts[s].digest)) parts[s] = *held;
    }
    values = read_values(session, parts);
    SyncPlan::Outcome outcome = SyncPlan::compile(*env_.index, *env_.geometry, env_.table->digest(), std::move(parts), session.options);
    refusal = {outcome.defects_total, std::move(outcome.defects)};
    if (outcome.plan != nullptr) session.adopt(std::move(outcome.plan));
    meter_.sample();
  }
  if (session.plan != nullptr) {
    for (wire::Failure& missing : written_.missing(*session.plan)) add_defect(refusal, std::move(missing));
  }
  check_values(session, std::move(values), refusal);
  if (refusal.defects_total != 0) return reject(session, std::move(refusal));
  if (const Status status = give_scratch(session); !status.ok()) return fail(SessionEvent::kFailure, status, "manifest");
  for (std::uint32_t s = 0; s < session.senders.size(); ++s) {
    SessionSender& sender = session.senders[s];
    if (!sender.peer) continue;
    // Whoever knows the manifest by its digest has kept what we wanted of it.
    wire::Accept accept = session.plan->accept_for(s, session.receipt.plan_cached && sender.known_manifest);
    accept.bucket_bytes_max = env_.options->bucket_bytes_max;
    env_.send(*sender.peer, session.id, std::move(accept));
  }
  session.receipt.phases.manifest = session.lap_ms();
}

void SessionControl::reject(UpdateSession& session, wire::Reject refusal) {
  for (wire::Failure& defect : refusal.defects) name_rank(defect);
  last_failure_ = wire::to_status(refusal.defects.front()).to_string();
  failed_session_ = session.id;
  failure_ = refusal.defects.front();
  to_senders(session, std::move(refusal));
  const std::unique_ptr<UpdateSession> ended = std::move(session_);
  apply(SessionEvent::kReject);
  waits_.end(ended->version, failed_update(ended->version, wire::to_status(failure_)));
  if (state_ == SessionState::kInDoubt) session_ = std::move(doubtful_);
}

Status SessionControl::give_scratch(UpdateSession& session) {
  std::size_t count = 0;
  for (std::uint32_t s = 0; s < session.senders.size(); ++s) count += session.plan->groups(s).empty() ? 0U : 1U;
  HEADRACE_RETURN_IF_ERROR(env_.scratch->reserve(count));
  count = 0;
  for (std::uint32_t s = 0; s < session.senders.size(); ++s) {
    if (!session.plan->groups(s).empty()) session.senders[s].scratch = env_.scratch->at(count++);
  }
  return ok_status();
}

void SessionControl::on_confirm(UpdateSession& session, SessionSender& sender) {
  if (session.plan == nullptr || sender.confirmed) {
    return fail(SessionEvent::kFailure,
                Status(Code::kFailedPrecondition, fmt::format("CONFIRM of sender {} before ACCEPT, or twice", sender.name)), "manifest");
  }
  sender.confirmed = true;
  if (!std::all_of(session.senders.begin(), session.senders.end(), [](const SessionSender& s) { return s.confirmed; })) return;
  session.begun = true;
  session.lap_ms();
  to_senders(session, wire::Begin{env_.options->credits});
}

void SessionControl::on_bucket(UpdateSession& session, SessionSender& sender, const PeerBook::Peer& from, const wire::Bucket& bucket,
                               std::vector<std::byte> attachment) {
  if (!session.begun || (state_ != SessionState::kOpen && state_ != SessionState::kApplying)) {
    return fail(SessionEvent::kFailure, Status(Code::kFailedPrecondition, fmt::format("BUCKET of sender {} before BEGIN", sender.name)),
                phase());
  }
  if (session.receipt.data_path.empty()) session.receipt.data_path = attachment.empty() ? "shm" : "inline";
  // Inline bytes live until their copies are done.
  const auto carried = std::make_shared<const std::vector<std::byte>>(std::move(attachment));
  ApplyWork work;
  wire::Failure failure;
  const Status checked = session.check_bucket(
      sender, bucket, env_.options->credits, [&](MemoryId memory) { return PeerBook::resolve(from, memory, *carried); }, work, failure);
  if (!checked.ok()) {
    failure.code = static_cast<std::uint32_t>(checked.code());
    failure.message = checked.message();
    failure.phase = "transfer";
    return fail(SessionEvent::kFailure, std::move(failure));
  }
  first_enqueue();
  const std::string name = sender.name;
  const Status enqueued = env_.applier->apply_async(
      session.plan, std::move(work), [this, id = session.id, name, sequence = bucket.sequence, carried](const ApplyStats& stats) {
        env_.post([this, id, name, sequence, stats] {
          if (!current(id)) return;
          SessionSender* row = session_->find(name);
          if (!stats.status.ok()) return fail(SessionEvent::kFailure, stats.status, "transfer");
          session_->count(stats);
          ++row->consumed;
          session_->deadline.touch();
          meter_.sample();
          if (row->peer) env_.send(*row->peer, id, wire::Consumed{sequence});
          go_on(*session_);
        });
      });
  if (!enqueued.ok()) fail(SessionEvent::kFailure, enqueued, "transfer");
}

void SessionControl::on_end(UpdateSession& session, SessionSender& sender, const wire::End& end) {
  wire::Failure failure;
  const Status checked = session.begun ? session.check_end(sender, end, env_.options->require_proof, failure)
                                       : Status(Code::kFailedPrecondition, "END before BEGIN");
  if (!checked.ok()) {
    failure.code = static_cast<std::uint32_t>(checked.code());
    failure.message = checked.message();
    failure.phase = "transfer";
    return fail(SessionEvent::kFailure, std::move(failure));
  }
  if (!session.all_ended()) return;
  if (!session.coverage->complete()) {
    return fail(SessionEvent::kFailure,
                Status(Code::kFailedPrecondition,
                       fmt::format("all senders have ended, bytes are missing of: {}", fmt::join(session.coverage->missing(5), ", "))),
                "transfer");
  }
  go_on(session);
}

void SessionControl::go_on(UpdateSession& session) {
  if (session.applied()) session.receipt.phases.transfer = session.lap_ms();
  if (session.provable()) prove(session);
}

// ---- proof and commit -----------------------------------------------------------------------------------------------------------

void SessionControl::prove(UpdateSession& session) {
  session.proving = true;
  restore_after_discard();  // when nothing was wanted, nothing was enqueued before
  const SessionId id = session.id;
  const bool to_prove = session.sums_given > 0 || session.plain();
  // An update without table rows does no table work at all; the counter proves it.
  const bool tables = session.plan->brings_tables();
  if (tables && env_.hooks->finish_tables != nullptr) {
    ++session.receipt.engram_calls;
    ++engram_calls_;
  }
  auto finish = [this, id, tables, plan = session.plan](ProofOutcome outcome) {
    Status after = ok_status();
    if (outcome.differences_total == 0 && tables) after = call_hook("finish_tables", env_.hooks->finish_tables);
    if (outcome.differences_total == 0 && after.ok()) after = call_hook("derive", env_.hooks->derive);
    if (outcome.differences_total == 0 && after.ok()) after = attest_again(*plan);
    env_.post([this, id, outcome = std::move(outcome), after, lost = env_.canaries->lost()] {
      if (current(id)) on_proven(outcome, after, lost);
    });
  };
  session.receipt.proven = to_prove || session.plan->tensors().empty();
  const Status enqueued =
      to_prove ? env_.applier->prove_async(session.plan, session.sums, session.cast_sums, session.input_sums, std::move(finish))
               : env_.applier->run_async([finish = std::move(finish)] { finish(ProofOutcome{}); });
  if (!enqueued.ok()) fail(SessionEvent::kFailure, enqueued, "prepare");
}

void SessionControl::on_proven(const ProofOutcome& outcome, const Status& after, std::span<const std::string> lost) {
  UpdateSession& session = *session_;
  // Before all else: lost content explains every other difference.
  if (!lost.empty() && !discarded_) {
    forget_content();
    return fail(SessionEvent::kDiscard, discard_status(lost), "prepare");
  }
  session.receipt.fingerprints = outcome.compared;
  if (outcome.differences_total != 0) {
    wire::Failure failure = outcome.differences.front();
    failure.message += fmt::format(" ({} of {} tensors differ)", outcome.differences_total, session.plan->tensors().size());
    return fail(SessionEvent::kFailure, std::move(failure));
  }
  if (!after.ok()) return fail(SessionEvent::kFailure, after, "prepare");
  session.receipt.phases.prepare = session.lap_ms();
  session.receipt.device = device_kind_name(env_.applier->device_kind());
  meter_.sample();
  apply(SessionEvent::kPrepared);
  apply_progress_ = env_.applier->progress();
  session.deadline.touch();
  if (session.plain()) return commit(session);
  to_senders(session, wire::Prepared{session.receipt});
}

void SessionControl::on_commit(const PeerId& peer, SessionId id) {
  if (id == last_session_ && last_receipt_ && id.value != 0) {
    env_.send(peer, id, wire::Committed{*last_receipt_});
    return;
  }
  if (current(id) && (state_ == SessionState::kPrepared || state_ == SessionState::kInDoubt) && !discarded_) {
    // Nothing is on the apply thread now: the last look before the version is published.
    if (const auto lost = env_.canaries->lost(); !lost.empty()) {
      const Status status = discard_status(lost);
      forget_content();
      if (session_->find(peer) == nullptr) {
        env_.send(peer, id, wire::ErrorReport{own_failure(status, "commit"), static_cast<std::uint32_t>(SessionState::kTorn)});
      }
      return fail(SessionEvent::kDiscard, status, "commit");
    }
  }
  const bool from_lead = current(id) && !session_->plain() && session_->senders.front().peer == peer;
  // Without its lead a prepared session is finished by whoever found all ranks prepared.
  const bool may_commit = current(id) && (state_ == SessionState::kInDoubt || (state_ == SessionState::kPrepared && from_lead));
  if (!may_commit) {
    const Status status(Code::kFailedPrecondition,
                        fmt::format("COMMIT of session {:016x} in state {}{}", id.value, wire::session_state_name(state_),
                                    from_lead ? "" : ", not from the lead of an open session"));
    if (from_lead) return fail(SessionEvent::kFailure, status, "commit");
    const bool failed_here = failed_session_ == id && id.value != 0;
    env_.send(peer, id, wire::ErrorReport{failed_here ? failure_ : own_failure(status, "commit"), static_cast<std::uint32_t>(state_)});
    return;
  }
  UpdateSession& session = *session_;
  if (session.find(peer) == nullptr) {
    SessionSender finisher;
    finisher.name = "finisher";
    finisher.peer = peer;
    session.senders.push_back(std::move(finisher));
  }
  commit(session);
}

void SessionControl::commit(UpdateSession& session) {
  version_ = session.version;
  committed_ = session.version;
  last_session_ = session.id;
  last_plan_ = session.plan;
  last_asked_ = session.asked;
  if (!session.plain()) plain_calls_.forget();
  if (session.values) captured_.commit(session.values->constants());
  written_.commit(*session.plan);
  apply(SessionEvent::kCommit);
  ++updates_;
  last_failure_.clear();
  session.receipt.phases.commit = session.lap_ms();
  last_receipt_ = session.receipt;
  std::shared_ptr<UpdateSession> ended(std::move(session_));
  committing_ = true;
  auto tell = [this, ended](const Status& status) {
    committing_ = false;
    if (!status.ok()) {
      // Committed, but the engine would serve with stale caches: nothing is served until the next update.
      version_.reset();
      publish();
      const wire::Failure failure = own_failure(status, "commit");
      last_failure_ = wire::to_status(failure).to_string();
      to_senders(*ended, wire::ErrorReport{failure, static_cast<std::uint32_t>(state_)});
      waits_.end(ended->version, failed_update(ended->version, wire::to_status(failure)));
      if (plain_done_) std::exchange(plain_done_, nullptr)(status);
      return;
    }
    to_senders(*ended, wire::Committed{ended->receipt});
    waits_.end(ended->version, ended->receipt);
    if (plain_done_) std::exchange(plain_done_, nullptr)(ended->receipt);
  };
  if (env_.hooks->committed == nullptr) return tell(ok_status());
  const Status enqueued = env_.applier->run_async(
      [this, tell] { env_.post([tell, status = call_hook("committed", env_.hooks->committed)] { tell(status); }); });
  if (!enqueued.ok()) tell(enqueued);
}

// ---- losses and deadlines ------------------------------------------------------------------------------------------------------

void SessionControl::on_peer_lost(const PeerId& peer, const Status& how) {
  if (session_ == nullptr) return;
  SessionSender* sender = session_->find(peer);
  if (sender == nullptr) return;
  sender->peer.reset();
  const bool lead = sender == session_->senders.data();
  wire::Failure failure = wire::make_failure(Status(Code::kUnavailable, fmt::format("lost: {}", how.message())), phase());
  failure.sender = sender->name;
  failure.bucket = sender->buckets > 0 ? static_cast<std::int64_t>(sender->buckets) - 1 : -1;
  fail(lead ? SessionEvent::kLeadLost : SessionEvent::kSenderLost, std::move(failure));
}

void SessionControl::on_tick() {
  check_session_deadline();
  if (waits_.size() != 0) waits_.answer_failed([this](const UpdateWaits::Wait& wait) { return overdue(wait); });
}

void SessionControl::check_session_deadline() {
  if (session_ == nullptr || state_ == SessionState::kInDoubt) return;
  if (const std::uint64_t progress = env_.applier->progress(); progress != apply_progress_) {
    apply_progress_ = progress;
    session_->deadline.touch();
  }
  if (!session_->deadline.expired()) return;
  const Status status(Code::kDeadlineExceeded,
                      fmt::format("no progress for {} ms, waiting for {}", env_.options->deadline_ms, session_->waiting_for()));
  fail(state_ == SessionState::kPrepared ? SessionEvent::kLeadLost : SessionEvent::kFailure, status, phase());
}

}  // namespace headrace
