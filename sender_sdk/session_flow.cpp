#include "sender_sdk/session_flow.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/wire/codec.h"

namespace headrace {
namespace {

constexpr std::size_t kDeadSessionsKept = 16;

SessionFlow::Outcome advanced() {
  SessionFlow::Outcome outcome;
  outcome.progress = true;
  return outcome;
}

}  // namespace

std::int64_t ReceiverFlow::waiting_bucket() const {
  if (!unanswered.empty()) return static_cast<std::int64_t>(unanswered.front().sequence);
  for (const Outgoing& outgoing : outbox) {
    if (outgoing.sequence) return static_cast<std::int64_t>(*outgoing.sequence);
  }
  return -1;
}

wire::Failure receiver_failure(const ReceiverFlow& receiver, const Status& status, std::string phase) {
  wire::Failure failure = wire::make_failure(status, std::move(phase));
  failure.engine = receiver.engine;
  failure.rank = receiver.rank;
  return failure;
}

void SessionFlow::begin(const WeightVersion& version, std::optional<SessionId> session) {
  active_ = true;
  version_ = version.to_string();
  session_ = session.value_or(SessionId{});
  for (ReceiverFlow& receiver : receivers_) {
    receiver.accept.reset();
    receiver.reject.reset();
    receiver.prepared.reset();
    receiver.committed.reset();
    receiver.ended = false;
    receiver.credits = 0;
    receiver.next_sequence = 0;
    receiver.unanswered.clear();
    receiver.outbox.clear();
  }
}

std::optional<SessionId> SessionFlow::agreed_session() const {
  for (const ReceiverFlow& receiver : receivers_) {
    if (!receiver.opened || receiver.opened->version != version_) return std::nullopt;
    if (receiver.opened_session != receivers_.front().opened_session) return std::nullopt;
  }
  return receivers_.front().opened_session;
}

void SessionFlow::end() {
  active_ = false;
  remember_dead(session_);
  for (ReceiverFlow& receiver : receivers_) {
    if (!receiver.opened) continue;
    // Without a session of its own this side gives up on whatever was opened with the version it waited for. An OPENED of the next
    // update may be here already and stays.
    const bool waited_for = session_.value == 0 && receiver.opened->version == version_;
    if (waited_for) remember_dead(receiver.opened_session);
    if (waited_for || receiver.opened_session == session_) receiver.opened.reset();
  }
}

void SessionFlow::remember_dead(SessionId session) {
  if (session.value == 0 || std::find(dead_.begin(), dead_.end(), session) != dead_.end()) return;
  dead_.push_back(session);
  if (dead_.size() > kDeadSessionsKept) dead_.pop_front();
}

void SessionFlow::push(std::size_t r, wire::Body body) {
  ReceiverFlow& receiver = receivers_[r];
  Outgoing outgoing;
  outgoing.message = wire::encode({session_, receiver.incarnation, std::move(body)});
  receiver.outbox.push_back(std::move(outgoing));
}

void SessionFlow::confirm(bool alone) {
  for (std::size_t r = 0; r < receivers_.size(); ++r) {
    push(r, wire::Confirm{});
    if (alone) receivers_[r].credits = 1;
  }
}

void SessionFlow::push_abort(std::size_t r, const wire::Failure& failure) {
  ReceiverFlow& receiver = receivers_[r];
  receiver.outbox.clear();
  if (receiver.lost || receiver.ended || receiver.reject) return;
  SessionId session = session_;
  if (session.value == 0) {
    if (!receiver.opened || receiver.opened->version != version_) return;
    session = receiver.opened_session;
  }
  Outgoing outgoing;
  outgoing.message = wire::encode({session, receiver.incarnation, wire::Abort{failure}});
  receiver.outbox.push_back(std::move(outgoing));
}

std::optional<Outgoing> SessionFlow::take_sendable(std::size_t r) {
  ReceiverFlow& receiver = receivers_[r];
  if (receiver.outbox.empty()) return std::nullopt;
  Outgoing& next = receiver.outbox.front();
  if (next.sequence) {
    if (receiver.unanswered.size() >= receiver.credits) return std::nullopt;
    receiver.unanswered.push_back({*next.sequence, next.slot});
  }
  std::optional<Outgoing> taken(std::move(next));
  receiver.outbox.pop_front();
  return taken;
}

SessionFlow::Outcome SessionFlow::on_message(std::size_t r, wire::Message message) {
  ReceiverFlow& receiver = receivers_[r];
  if (auto* welcome = std::get_if<wire::Welcome>(&message.body)) {
    receiver.welcome = std::move(*welcome);
    return advanced();
  }
  if (auto* opened = std::get_if<wire::Opened>(&message.body)) return on_opened(receiver, message.session, std::move(*opened));
  if (auto* error = std::get_if<wire::ErrorReport>(&message.body)) return on_error(receiver, message.session, std::move(error->failure));
  if (!active_ || session_.value == 0 || message.session != session_) {
    // ABORTs are answered after the session has ended here; whoever waits for that sees it by ERROR alone.
    return {};
  }
  if (message.incarnation != receiver.incarnation) return unexpected(receiver, "a message of another life of its process");
  return on_session_message(receiver, std::move(message.body));
}

SessionFlow::Outcome SessionFlow::on_opened(ReceiverFlow& receiver, SessionId session, wire::Opened opened) {
  if (std::find(dead_.begin(), dead_.end(), session) != dead_.end()) return {};
  receiver.opened = std::move(opened);
  receiver.opened_session = session;
  return advanced();
}

SessionFlow::Outcome SessionFlow::on_error(ReceiverFlow& receiver, SessionId session, wire::Failure failure) {
  // Behind a REJECT it repeats the first of the defects, to a message that was on the way.
  if (active_ && session == session_ && receiver.reject) return {};
  const bool dead = std::find(dead_.begin(), dead_.end(), session) != dead_.end();
  const bool concerns_us = active_ && !dead && (session == session_ || session_.value == 0);
  if (session == session_) receiver.ended = true;
  if (receiver.opened && receiver.opened_session == session) receiver.opened.reset();
  if (!concerns_us && session != session_) remember_dead(session);
  if (!concerns_us) return {};
  if (failure.code == 0) failure.code = static_cast<std::uint32_t>(Code::kInternal);
  Outcome outcome = advanced();
  outcome.failure = std::move(failure);
  return outcome;
}

SessionFlow::Outcome SessionFlow::on_consumed(ReceiverFlow& receiver, std::uint64_t sequence) {
  if (receiver.unanswered.empty() || receiver.unanswered.front().sequence != sequence) {
    Outcome outcome = unexpected(receiver, fmt::format("CONSUMED of bucket {}", sequence));
    outcome.failure->bucket = static_cast<std::int64_t>(sequence);
    outcome.failure->expected = receiver.unanswered.empty() ? "none on the way" : std::to_string(receiver.unanswered.front().sequence);
    outcome.failure->actual = std::to_string(sequence);
    return outcome;
  }
  Outcome outcome = advanced();
  outcome.freed_slot = receiver.unanswered.front().slot;
  receiver.unanswered.pop_front();
  return outcome;
}

SessionFlow::Outcome SessionFlow::on_session_message(ReceiverFlow& receiver, wire::Body body) {
  if (auto* accept = std::get_if<wire::Accept>(&body)) {
    if (receiver.accept) return unexpected(receiver, "a second ACCEPT");
    receiver.accept = std::move(*accept);
    return advanced();
  }
  if (auto* reject = std::get_if<wire::Reject>(&body)) {
    receiver.reject = std::move(*reject);
    return advanced();
  }
  if (const auto* begin = std::get_if<wire::Begin>(&body)) {
    if (!receiver.accept) return unexpected(receiver, "BEGIN before ACCEPT");
    if (begin->credits == 0) return unexpected(receiver, "BEGIN without credits");
    receiver.credits = begin->credits;
    return advanced();
  }
  if (const auto* consumed = std::get_if<wire::Consumed>(&body)) return on_consumed(receiver, consumed->sequence);
  if (auto* prepared = std::get_if<wire::Prepared>(&body)) {
    if (receiver.waiting_bucket() >= 0) return unexpected(receiver, "PREPARED before all buckets were consumed");
    receiver.prepared = std::move(prepared->receipt);
    return advanced();
  }
  if (auto* committed = std::get_if<wire::Committed>(&body)) {
    receiver.committed = std::move(committed->receipt);
    return advanced();
  }
  if (const auto* pong = std::get_if<wire::Pong>(&body)) {
    Outcome outcome;
    outcome.progress = pong->progress != std::exchange(receiver.pong_progress, pong->progress);
    return outcome;
  }
  return unexpected(receiver, fmt::format("{} in a session", wire::message_name(wire::type_of(body))));
}

SessionFlow::Outcome SessionFlow::unexpected(const ReceiverFlow& receiver, std::string_view what) const {
  Outcome outcome;
  outcome.failure = receiver_failure(receiver, Status(Code::kInternal, fmt::format("the receiver sent {}", what)), "");
  return outcome;
}

}  // namespace headrace
