#include <fmt/format.h>

#include "sender_sdk/sender_impl.h"

namespace headrace {

Result<SessionId> SenderImpl::doubtful_session() {
  // A connection says HELLO once, so the present states come by connections of their own that only ask.
  std::string states;
  std::optional<SessionId> session;
  bool same = true;
  for (const ReceiverInfo& receiver : receivers_) {
    auto link = greet_receiver(environment_, options_, receiver.endpoint, "");
    if (!link.ok()) return link.status();
    const wire::Welcome& welcome = link.value().welcome;
    const auto state = static_cast<wire::SessionState>(welcome.state);
    states += fmt::format("{}{}: {} in session {:016x}, serving {}", states.empty() ? "" : "; ", link.value().name(),
                          wire::session_state_name(state), welcome.state_session, welcome.version.empty() ? "nothing" : welcome.version);
    const bool decided =
        state == wire::SessionState::kPrepared || state == wire::SessionState::kInDoubt || state == wire::SessionState::kIdle;
    if (!session) session = SessionId{welcome.state_session};
    same = same && decided && welcome.state_session != 0 && *session == SessionId{welcome.state_session};
  }
  if (same && session) return *session;
  return Status(
      Code::kFailedPrecondition,
      fmt::format("resolve: not every rank has the same session prepared or committed ({}); a full update is the way out", states));
}

Result<UpdateReport> SenderImpl::resolve_in_doubt() {
  std::vector<const wire::Welcome*> welcomes;
  for (const ReceiverInfo& receiver : receivers_) welcomes.push_back(&receiver.welcome);
  if (const std::string missing = missing_ranks(welcomes); !missing.empty()) {
    return Status(Code::kFailedPrecondition, fmt::format("resolve: every rank has to be asked; connected are {}", missing));
  }
  HEADRACE_RETURN_IF_ERROR(settle_last_update());
  opened_ns_ = environment_.clock->now_ns();
  const auto session = doubtful_session();
  if (!session.ok()) return session.status();
  Lock lock(mutex_);
  failure_.reset();
  phase_ = Phase::kCommit;
  flow_.begin({}, session.value());
  for (std::size_t r = 0; r < receivers_.size(); ++r) flow_.push(r, wire::Commit{});
  loop_->wake();
  HEADRACE_RETURN_IF_ERROR(wait_all(lock, "COMMITTED", [](const ReceiverFlow& receiver) { return receiver.committed.has_value(); }));
  UpdateReport report;
  report.session = session.value().value;
  report.data_path = data_path_name(path_);
  report.total_ms = ms_since(opened_ns_);
  report.phases_ms.commit = report.total_ms;
  report.proven = true;
  for (const ReceiverFlow& receiver : flow_.receivers()) {
    report.version = receiver.committed->version;
    report.applied_bytes += receiver.committed->applied_bytes;
    report.proven = report.proven && receiver.committed->proven;
    report.receipts.push_back(*receiver.committed);
  }
  flow_.end();
  return report;
}

}  // namespace headrace
