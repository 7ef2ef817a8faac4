// How SessionControl knows and checks the values that every rank must have before it accepts an update.
#include <utility>

#include "kernels/fingerprint.h"
#include "receiver/session_control.h"

namespace headrace {

Status SessionControl::read_constants(Attested& attested) const {
  if (env_.hooks->launch_constants == nullptr) return ok_status();
  return call_hook("launch_constants", [&]() -> Status {
    Result<std::vector<std::optional<double>>> said = env_.values->by_constant(env_.hooks->launch_constants());
    if (!said.ok()) return said.status();
    attested.constants = std::move(said).value();
    return ok_status();
  });
}

wire::Reject SessionControl::read_values(UpdateSession& session, std::span<const SenderPart> parts) const {
  wire::Reject odd;
  if (env_.values->empty()) return odd;
  session.values.emplace(*env_.values);
  if (session.asked == nullptr)
    session.asked = std::make_shared<const std::vector<AskedValue>>(env_.values->asked(parts, session.options.scopes));
  std::vector<std::span<const wire::EntryValue>> given;
  for (const SessionSender& sender : session.senders) given.emplace_back(sender.values);
  take_values(parts, given, *session.asked, *session.values, odd);
  return odd;
}

void SessionControl::check_values(const UpdateSession& session, wire::Reject odd, wire::Reject& refusal) const {
  if (!session.values) return;
  // What is missing has been said by its own name.
  const bool whole = refusal.defects_total == 0 && odd.defects_total == 0;
  session.values->check(session.values->present(), captured_, whole, odd);
  const std::uint64_t total = refusal.defects_total + odd.defects_total;
  for (wire::Failure& defect : odd.defects) add_defect(refusal, std::move(defect));
  refusal.defects_total = total;
}

Status SessionControl::values_plain(std::span<const NamedView> tensors) {
  if (!session_->values) return ok_status();
  std::vector<wire::ValueNames::Match> taken;
  wire::Reject refusal;
  for (const NamedView& view : tensors) {
    const std::optional<wire::ValueNames::Match> at = env_.values->names().find(view.name);
    if (!at) continue;
    if (const std::string* to = env_.values->names().tied_to(view.name)) {
      if (session_->values->set(*at, fingerprint(tensor_key(*to, view.dtype, view.shape), 0, view.bytes))) taken.push_back(*at);
      continue;
    }
    const Result<double> number = read_number(view.dtype, view.bytes);
    if (!number.ok()) {
      wire::Failure failure = wire::make_failure(number.status(), "transfer");
      failure.name = view.name;
      add_defect(refusal, std::move(failure));
    } else if (session_->values->set(*at, number.value())) {
      taken.push_back(*at);
    }
  }
  session_->values->check(taken, captured_, false, refusal);
  if (refusal.defects_total == 0) return ok_status();
  for (const wire::ValueNames::Match& at : taken) session_->values->unset(at);
  return wire::to_status(refusal.defects.front());
}

}  // namespace headrace
