#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "core/wire/limits.h"
#include "sender_sdk/sender_impl.h"

namespace headrace {
namespace {

constexpr std::int64_t kDefectsGraceMs = 2'000;  // for the other receivers' answers once one has refused
constexpr std::size_t kDefectsTold = 50;

bool equal_wanted(const std::vector<wire::Wanted>& a, const std::vector<wire::Wanted>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const wire::Wanted& x, const wire::Wanted& y) {
    return x.ignored == y.ignored && x.granule == y.granule && x.boxes == y.boxes;
  });
}

}  // namespace

Status SenderImpl::open(const UpdateOptions& options) {
  senders_ = options.senders.empty() ? std::vector{options_.sender} : options.senders;
  HEADRACE_RETURN_IF_ERROR(check_update(options));
  HEADRACE_RETURN_IF_ERROR(settle_last_update());
  HEADRACE_RETURN_IF_ERROR(entries_.assign(options.entries));
  HEADRACE_RETURN_IF_ERROR(read_values(options.entries, options.senders.size() < 2));
  begin_update(options);
  HEADRACE_RETURN_IF_ERROR(lead_ ? open_session(options) : join_session(options));
  HEADRACE_RETURN_IF_ERROR(await_answers());
  if (Status status = take_answers(); !status.ok()) return fail_here(status);
  if (Status status = start_transfer(); !status.ok()) return fail_here(status);
  return ok_status();
}

Status SenderImpl::check_update(const UpdateOptions& options) const {
  const auto refused = [](std::string why) { return Status(Code::kInvalidArgument, "open: " + std::move(why)); };
  if (!valid_run_id(options.version.run)) return refused(fmt::format("run id '{}' of the version", options.version.run));
  if (options.scopes.empty()) return refused("no scope");
  if (senders_.size() > limits::kSendersMax) return refused(fmt::format("{} senders, at most {}", senders_.size(), limits::kSendersMax));
  if (std::set<std::string>(senders_.begin(), senders_.end()).size() != senders_.size()) {
    return refused(fmt::format("a sender stands twice in [{}]", fmt::join(senders_, ", ")));
  }
  if (std::find(senders_.begin(), senders_.end(), options_.sender) == senders_.end()) {
    return refused(fmt::format("this sender, {}, is not one of [{}]", options_.sender, fmt::join(senders_, ", ")));
  }
  std::vector<const wire::Welcome*> welcomes;
  for (const ReceiverInfo& receiver : receivers_) welcomes.push_back(&receiver.welcome);
  const std::string missing = missing_ranks(welcomes);
  if (!missing.empty() && !options.repair) {
    return Status(Code::kFailedPrecondition, fmt::format("open: an update needs every rank of an engine; connected are {}", missing));
  }
  return ok_status();
}

Status SenderImpl::settle_last_update() {
  Lock lock(mutex_);
  if (flow_.active()) return Status(Code::kFailedPrecondition, "open: an update is open, finish() or abort() it first");
  for (const ReceiverFlow& receiver : flow_.receivers()) {
    if (!receiver.lost) continue;
    return Status(Code::kUnavailable, fmt::format("open: {} is gone ({}), connect again", receiver.name(), receiver.lost->message()));
  }
  // What add_async() still has of the last update is given back before anything of this one can be mistaken for it.
  // Nor does a new session overtake the ABORT of the old one.
  sleep(lock, [&] {
    return queue_.empty() && !packing_ &&
           all_receivers([](const ReceiverFlow& receiver) { return receiver.lost || receiver.outbox.empty(); });
  });
  return ok_status();
}

void SenderImpl::begin_update(const UpdateOptions& options) {
  Lock lock(mutex_);
  lead_ = senders_.front() == options_.sender;
  alone_ = senders_.size() == 1;
  version_ = options.version;
  unwanted_ = options.repair                                                     ? Unwanted::kAllow
              : options.overlap == wire::OverlapRule::kFirstSenderOwns && !lead_ ? Unwanted::kAllowEntirely
                                                                                 : Unwanted::kRefuse;
  if (failure_) {
    // After a failure nothing is taken for granted: manifests travel whole again.
    for (Answer& answer : answers_) answer.committed = false;
  }
  added_.assign(entries_.entries().size(), false);
  next_entry_ = 0;
  phases_ = {};
  transfer_started_ = false;
  opened_ns_ = environment_.clock->now_ns();
  failure_.reset();
  phase_ = Phase::kOpen;
  flow_.begin(options.version, lead_ ? std::optional(SessionId{random_u64()}) : std::nullopt);
  drop_released(lock);
}

Status SenderImpl::open_session(const UpdateOptions& options) {
  Lock lock(mutex_);
  wire::Open open{options.version.to_string(), options.scopes, senders_, static_cast<std::uint32_t>(options.overlap), {}};
  for (std::size_t r = 0; r < receivers_.size(); ++r) {
    if (options.repair) open.ranks = repaired_ranks(r);
    flow_.push(r, open);
  }
  // What it brings does not depend on the answer, so it does not wait for it.
  push_manifests();
  send_queued(lock);
  HEADRACE_RETURN_IF_ERROR(wait_all(
      lock, "OPENED", [&](const ReceiverFlow& receiver) { return receiver.opened && receiver.opened_session == flow_.session(); }));
  return check_expert_maps();
}

std::vector<std::uint32_t> SenderImpl::repaired_ranks(std::size_t r) const {
  std::vector<std::uint32_t> ranks;
  for (const ReceiverInfo& each : receivers_) {
    if (each.welcome.engine == receivers_[r].welcome.engine) ranks.push_back(each.welcome.rank);
  }
  return ranks.size() < receivers_[r].welcome.ranks ? ranks : std::vector<std::uint32_t>{};
}

Status SenderImpl::check_expert_maps() {
  // A rank with an older map than its peers would write the right bytes into slots that the others take for another expert's.
  const auto& all = flow_.receivers();
  for (const ReceiverFlow& receiver : all) {
    const auto first = std::find_if(all.begin(), all.end(), [&](const ReceiverFlow& other) { return other.engine == receiver.engine; });
    if (receiver.opened->expert_map == first->opened->expert_map) continue;
    wire::Failure failure =
        receiver_failure(receiver,
                         Status(Code::kFailedPrecondition,
                                fmt::format("its expert map is not that of rank {}: the engine is still rebalancing", first->rank)),
                         "open");
    failure.expected = first->opened->expert_map.hex();
    failure.actual = receiver.opened->expert_map.hex();
    fail(std::move(failure));
    return *failure_;
  }
  return ok_status();
}

Status SenderImpl::join_session(const UpdateOptions& options) {
  Lock lock(mutex_);
  const std::string version = options.version.to_string();
  HEADRACE_RETURN_IF_ERROR(wait(
      lock, true, fmt::format("one OPENED with version {}", version), [&] { return flow_.agreed_session().has_value(); },
      [&](const ReceiverFlow& receiver) {
        return receiver.opened && receiver.opened->version == version &&
               receiver.opened_session == flow_.receivers().front().opened_session;
      }));
  flow_.adopt(*flow_.agreed_session());
  for (const ReceiverFlow& receiver : flow_.receivers()) {
    if (receiver.opened->senders == senders_) continue;
    wire::Failure failure = wire::make_failure(
        Status(Code::kFailedPrecondition, fmt::format("the lead opened {} with other senders than this one expects", version)), "open");
    failure.sender = options_.sender;
    failure.expected = fmt::format("[{}]", fmt::join(senders_, ", "));
    failure.actual = fmt::format("[{}]", fmt::join(receiver.opened->senders, ", "));
    fail(std::move(failure));
    return *failure_;
  }
  push_manifests();
  send_queued(lock);
  return ok_status();
}

void SenderImpl::push_manifests() {
  for (std::size_t r = 0; r < receivers_.size(); ++r) {
    const bool known = answers_[r].committed && answers_[r].manifest == entries_.digest();
    flow_.push(r, wire::Manifest{entries_.digest(), known, known ? std::vector<std::byte>{} : entries_.encoded(), values_});
  }
}

Status SenderImpl::await_answers() {
  Lock lock(mutex_);
  HEADRACE_RETURN_IF_ERROR(outcome());
  phase_ = Phase::kManifest;
  const auto answered = [](const ReceiverFlow& receiver) { return receiver.accept || receiver.reject; };
  const auto rejected = [](const ReceiverFlow& receiver) { return receiver.reject.has_value(); };
  const auto& all = flow_.receivers();
  std::int64_t first_refusal_ns = 0;
  Status waited = wait(
      lock, true, "ACCEPT",
      [&] {
        if (std::all_of(all.begin(), all.end(), answered)) return true;
        if (std::none_of(all.begin(), all.end(), rejected)) return false;
        if (first_refusal_ns == 0) first_refusal_ns = environment_.clock->now_ns();
        return ms_since(first_refusal_ns) >= static_cast<double>(kDefectsGraceMs);
      },
      answered);
  if (std::none_of(all.begin(), all.end(), rejected)) return waited;
  // Another sender may have given up already for the same reason; the defects say more than its ABORT.
  const Status defects = rejected_status();
  wire::Failure failure = wire::make_failure(defects, "manifest");
  failure.sender = options_.sender;
  fail(std::move(failure));
  failure_ = defects;
  return defects;
}

Status SenderImpl::rejected_status() const {
  std::string text;
  std::uint64_t total = 0;
  std::size_t told = 0;
  std::string who;
  StatusDetail first;
  for (const ReceiverFlow& receiver : flow_.receivers()) {
    if (!receiver.reject) continue;
    who += (who.empty() ? "" : ", ") + receiver.name();
    total += std::max<std::uint64_t>(receiver.reject->defects_total, receiver.reject->defects.size());
    for (wire::Failure defect : receiver.reject->defects) {
      if (told++ >= kDefectsTold) break;
      if (defect.rank < 0) {
        defect.engine = receiver.engine;
        defect.rank = receiver.rank;
      }
      const Status status = wire::to_status(defect);
      if (told == 1) first = *status.detail();
      text += "\n  " + status.message();
    }
  }
  return Status(Code::kInvalidArgument,
                fmt::format("manifest refused by {}: {} defects, nothing was written{}{}", who, total, text, total > told ? "\n  ..." : ""))
      .with(std::move(first));
}

Status SenderImpl::take_answers() {
  std::vector<wire::Accept> accepts;
  {
    const std::lock_guard lock(mutex_);
    HEADRACE_RETURN_IF_ERROR(outcome());
    for (ReceiverFlow& receiver : flow_.receivers()) accepts.push_back(*receiver.accept);
  }
  phases_.manifest = ms_since(opened_ns_);
  bucket_bytes_ = options_.bucket_bytes != 0 ? options_.bucket_bytes : limits::kBucketBytesDefault;
  if (path_ == DataPathKind::kInline) bucket_bytes_ = std::min(bucket_bytes_, static_cast<std::int64_t>(limits::kAttachmentBytesMax));
  bool same = plan_.has_value();
  for (std::size_t r = 0; r < accepts.size(); ++r) {
    for (const std::int64_t most : {receivers_[r].welcome.bucket_bytes_max, accepts[r].bucket_bytes_max}) {
      if (most > 0) bucket_bytes_ = std::min(bucket_bytes_, most);
    }
    same = same && accepts[r].digest == answers_[r].manifest && (accepts[r].known || equal_wanted(accepts[r].wanted, wanted_[r]));
  }
  std::vector<std::vector<wire::EntryGroup>> groups;
  for (const wire::Accept& accept : accepts) groups.push_back(accept.groups);
  HEADRACE_RETURN_IF_ERROR(groups_.begin(entries_.entries().size(), groups));
  // A plan is used again only where every answer is the one that it was made for.
  if (!same || planned_bucket_bytes_ != bucket_bytes_ || planned_unwanted_ != unwanted_) plan_.reset();
  for (std::size_t r = 0; r < accepts.size(); ++r) HEADRACE_RETURN_IF_ERROR(take_answer(r, std::move(accepts[r])));
  if (plan_) return ok_status();
  std::vector<std::span<const wire::Wanted>> wanted(wanted_.begin(), wanted_.end());
  std::vector<std::string> names;
  for (const ReceiverInfo& receiver : receivers_)
    names.push_back(fmt::format("{} rank {}", receiver.welcome.engine, receiver.welcome.rank));
  auto plan = make_bucket_plan({entries_.entries(), wanted, names, bucket_bytes_, unwanted_});
  if (!plan.ok()) return plan.status();
  plan_ = std::move(plan).value();
  planned_bucket_bytes_ = bucket_bytes_;
  planned_unwanted_ = unwanted_;
  return ok_status();
}

Status SenderImpl::take_answer(std::size_t r, wire::Accept accept) {
  Answer& answer = answers_[r];
  const std::string name = fmt::format("{} rank {}", receivers_[r].welcome.engine, receivers_[r].welcome.rank);
  if (accept.digest != entries_.digest()) {
    return Status(Code::kCorruption,
                  fmt::format("{}: ACCEPT answers manifest {}, sent was {}", name, accept.digest.hex(), entries_.digest().hex()));
  }
  if (accept.known) {
    if (answer.manifest == accept.digest && answer.plan_key == accept.plan_key && wanted_[r].size() == entries_.entries().size())
      return ok_status();
    answer = {};
    return Status(Code::kFailedPrecondition,
                  fmt::format("{}: ACCEPT refers to plan {}, which this sender was never told", name, accept.plan_key.hex()));
  }
  answer = {accept.digest, accept.plan_key, false};
  wanted_[r] = std::move(accept.wanted);
  return ok_status();
}

Status SenderImpl::start_transfer() {
  const std::lock_guard packing(pack_mutex_);
  filler_.begin_update(*plan_, wanted_, bucket_bytes_);
  std::size_t registered = 0;
  for (const Registered& each : registered_) registered += each.bytes.size();
  // A sender whose tensors can all be read in place may never need a staging buffer; every other one has it before anything is written.
  if (registered < entries_.bytes()) HEADRACE_RETURN_IF_ERROR(ensure_staging());
  Lock lock(mutex_);
  HEADRACE_RETURN_IF_ERROR(outcome());
  // Every receiver has opened this session, so none reads buffers of an earlier one any more.
  pool_.reset(dropped_);
  flow_.confirm(alone_);
  // Nothing waits for it where the first bucket follows: it goes with that, or with the loop's next round.
  if (!alone_) send_queued(lock);
  HEADRACE_RETURN_IF_ERROR(wait_all(lock, "BEGIN", [](const ReceiverFlow& receiver) { return receiver.credits != 0; }));
  phase_ = Phase::kTransfer;
  phase_ns_ = environment_.clock->now_ns();
  return ok_status();
}

}  // namespace headrace
