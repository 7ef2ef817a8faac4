#include "sender_sdk/sender_impl.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/weight_version.h"
#include "core/wire/codec.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

constexpr std::int64_t kRoundMs = 50;     // the loop's pace when nothing arrives
constexpr std::int64_t kWaitStepMs = 20;  // between looks at the clock, which need not be the one that the wait runs on
constexpr std::int64_t kFarewellMs = 200;
constexpr std::uint32_t kStagingBuffersMax = 64;

Status check_options(const SenderOptions& options) {
  const auto refused = [](std::string why) { return Status(Code::kInvalidArgument, "connect: " + std::move(why)); };
  if (options.job.empty() || options.job.size() > limits::kIdBytesMax) return refused(fmt::format("job name '{}'", options.job));
  if (options.sender.empty() || options.sender.size() > limits::kIdBytesMax)
    return refused(fmt::format("sender name '{}'", options.sender));
  if (options.data_path != "auto" && !parse_data_path(options.data_path)) {
    return refused(fmt::format("data path '{}', expected auto, shm or inline", options.data_path));
  }
  if (options.bucket_bytes != 0 && (options.bucket_bytes < limits::kBucketBytesMin || options.bucket_bytes > limits::kBucketBytesMax)) {
    return refused(
        fmt::format("buckets of {} bytes, allowed are {} to {}", options.bucket_bytes, limits::kBucketBytesMin, limits::kBucketBytesMax));
  }
  if (options.staging_buffers > kStagingBuffersMax) {
    return refused(fmt::format("{} staging buffers, at most {}", options.staging_buffers, kStagingBuffersMax));
  }
  if (options.connect_timeout_ms < 0 || options.deadline_ms < 0) return refused("negative timeouts");
  return ok_status();
}

std::vector<ReceiverFlow> flows_of(const std::vector<ReceiverLink>& links) {
  std::vector<ReceiverFlow> flows(links.size());
  for (std::size_t r = 0; r < links.size(); ++r) {
    flows[r].engine = links[r].welcome.engine;
    flows[r].rank = links[r].welcome.rank;
    flows[r].incarnation = links[r].incarnation;
  }
  return flows;
}

void shorten(std::string& text) {
  // Room for what to_status() puts around it.
  if (text.size() > limits::kTextBytesMax / 2) text = text.substr(0, limits::kTextBytesMax / 2) + " ...";
}

}  // namespace

SenderEnvironment SenderEnvironment::real() {
  return {connect_zmq, std::make_shared<SteadyClock>(), make_host_device()};
}

Result<std::unique_ptr<SenderImpl>> SenderImpl::connect(const SenderOptions& options, SenderEnvironment environment) {
  HEADRACE_RETURN_IF_ERROR(check_options(options));
  auto links = connect_receivers(environment, options);
  if (!links.ok()) return links.status();
  auto path = choose_data_path(options, environment.device->identity(), links.value());
  if (!path.ok()) return path.status();
  auto wake = WakeEvent::create();
  if (!wake.ok()) return wake.status();
  std::unique_ptr<SenderImpl> sender(
      new SenderImpl(options, std::move(environment), std::move(links).value(), path.value(), std::move(wake).value()));
  HEADRACE_RETURN_IF_ERROR(sender->loop_->start());
  return sender;
}

SenderImpl::SenderImpl(SenderOptions options, SenderEnvironment environment, std::vector<ReceiverLink> links, DataPathKind path,
                       WakeEvent wake)
    : options_(std::move(options)),
      environment_(std::move(environment)),
      path_(path),
      deadline_ms_(options_.deadline_ms != 0 ? options_.deadline_ms : limits::kDeadlineMsDefault),
      answers_(links.size()),
      wanted_(links.size()),
      source_(make_data_source(path, *environment_.device)),
      packer_(options_.threads, options_.fingerprints),
      flow_(flows_of(links)),
      pool_(options_.staging_buffers != 0 ? options_.staging_buffers : limits::kStagingBuffersDefault),
      deadline_(*environment_.clock, deadline_ms_) {
  std::vector<std::unique_ptr<ControlConnection>> connections;
  for (ReceiverLink& link : links) {
    receivers_.push_back({link.connection->endpoint(), std::move(link.welcome)});
    connections.push_back(std::move(link.connection));
  }
  value_names_ = asked_of(receivers_);
  loop_ = std::make_unique<ConnectionLoop>(std::move(connections), std::move(wake), *this, kRoundMs);
}

SenderImpl::~SenderImpl() {
  {
    Lock lock(mutex_);
    const bool was_open = flow_.active();
    if (was_open) {
      wire::Failure failure = wire::make_failure(Status(Code::kCancelled, "the sender was closed during an update"), "");
      failure.sender = options_.sender;
      fail(std::move(failure));
    }
    stop_packing_ = true;
    wake_sleepers();
    if (was_open) {
      // Messages still queued die with their socket, so what was just said gets a moment to be heard.
      const auto heard = [&] { return all_receivers([](const ReceiverFlow& receiver) { return receiver.lost || receiver.ended; }); };
      sleep(lock, heard, kFarewellMs);
    }
  }
  if (packing_thread_.joinable()) packing_thread_.join();
  loop_->stop();
  Lock lock(mutex_);
  pool_.reset(dropped_);
  drop_released(lock);
}

void SenderImpl::on_event(std::size_t r, ControlEvent event) {
  switch (event.kind) {
    case ControlEventKind::kMessage: return on_message(r, event.message);
    case ControlEventKind::kAcknowledged: {
      const std::lock_guard lock(mutex_);
      acknowledged_.insert_or_assign({r, event.memory}, event.status);
      deadline_.touch();
      wake_sleepers();
      return;
    }
    case ControlEventKind::kPeerLost: {
      const std::lock_guard lock(mutex_);
      ReceiverFlow& receiver = flow_.receivers()[r];
      receiver.lost = event.status;
      receiver.outbox.clear();
      receiver.opened.reset();
      fail(receiver_failure(receiver, Status(Code::kUnavailable, fmt::format("the receiver is gone: {}", event.status.message())), ""));
      wake_sleepers();
      return;
    }
    case ControlEventKind::kDescriptor:
    case ControlEventKind::kReleased: return;  // the listening end's
  }
}

void SenderImpl::on_message(std::size_t r, std::span<const std::byte> bytes) {
  auto message = wire::decode(bytes);
  const std::lock_guard lock(mutex_);
  ReceiverFlow& receiver = flow_.receivers()[r];
  if (!message.ok()) {
    fail(receiver_failure(receiver, Status(Code::kCorruption, fmt::format("unreadable message: {}", message.status().message())), ""));
    return;
  }
  const SessionFlow::Outcome outcome = flow_.on_message(r, std::move(message).value());
  if (outcome.freed_slot) pool_.consumed(*outcome.freed_slot, dropped_);
  if (outcome.failure) fail(*outcome.failure);
  if (outcome.progress) deadline_.touch();
  go_on();
  wake_sleepers();
}

void SenderImpl::send_ready() {
  for (std::size_t r = 0; r < receivers_.size(); ++r) pump(r);
  send_pings();
}

void SenderImpl::on_round() {
  Lock lock(mutex_);
  drop_released(lock);
}

void SenderImpl::pump(std::size_t r) {
  while (true) {
    std::optional<Outgoing> next;
    {
      const std::lock_guard lock(mutex_);
      next = flow_.take_sendable(r);
      if (!next) return;
      go_on();
      wake_sleepers();
    }
    const Status status = loop_->connection(r).send(next->message, next->own_attachment.empty() ? next->attachment : next->own_attachment);
    if (status.ok()) continue;
    const std::lock_guard lock(mutex_);
    fail(receiver_failure(flow_.receivers()[r], status, ""));
  }
}

void SenderImpl::send_pings() {
  std::vector<std::pair<std::size_t, std::vector<std::byte>>> pings;
  {
    const std::lock_guard lock(mutex_);
    const std::int64_t now = environment_.clock->now_ns();
    if (!flow_.active() || flow_.session().value == 0 || now - pinged_ns_ < limits::kPingIntervalMs * 1'000'000) return;
    pinged_ns_ = now;
    for (std::size_t r = 0; r < receivers_.size(); ++r) {
      const ReceiverFlow& receiver = flow_.receivers()[r];
      if (receiver.lost || receiver.ended || receiver.reject) continue;
      pings.emplace_back(r, wire::encode({flow_.session(), receiver.incarnation, wire::Ping{progress_.load(std::memory_order_relaxed)}}));
    }
  }
  // One that cannot be sent is followed by a lost peer or by messages that cannot be sent either.
  for (const auto& [r, message] : pings) (void)loop_->connection(r).send(message);
}

void SenderImpl::fail(wire::Failure failure) {
  if (!flow_.active()) return;
  if (failure.phase.empty()) failure.phase = phase_name(phase_);
  shorten(failure.message);
  shorten(failure.expected);
  shorten(failure.actual);
  failure_ = wire::to_status(failure);
  for (StagingPool::Slot& slot : pool_.slots()) {
    for (const auto& release : slot.releases) release->fail(*failure_);
    std::move(slot.releases.begin(), slot.releases.end(), std::back_inserter(dropped_));
    slot.releases.clear();
  }
  // From COMMIT on the outcome is the receivers': an ABORT could only tear some of what others publish.
  if (phase_ != Phase::kCommit) {
    // A receiver that passes it on speaks in its own name, so the text has to say where it began.
    if (failure.rank >= 0) failure.message = failure_->message();
    for (std::size_t r = 0; r < receivers_.size(); ++r) flow_.push_abort(r, failure);
  }
  flow_.end();
  wake_sleepers();
  loop_->wake();
}

Status SenderImpl::fail_here(const Status& status) {
  const std::lock_guard lock(mutex_);
  wire::Failure failure = wire::make_failure(status, "");
  failure.sender = options_.sender;
  fail(std::move(failure));
  return failure_.value_or(status);
}

Status SenderImpl::outcome() const {
  if (failure_) return *failure_;
  if (!flow_.active()) return Status(Code::kFailedPrecondition, "no update is open");
  return ok_status();
}

bool SenderImpl::all_receivers(const PerReceiver& hold) const {
  return std::all_of(flow_.receivers().begin(), flow_.receivers().end(), hold);
}

void SenderImpl::send_queued(Lock& lock) {
  lock.unlock();
  loop_->send_ready();
  lock.lock();
}

void SenderImpl::sleep(Lock& lock, const std::function<bool()>& done, std::optional<std::int64_t> ms_max) {
  sleepers_.push_back(&done);
  if (ms_max) {
    changed_.wait_for(lock, std::chrono::milliseconds(*ms_max), done);
  } else {
    changed_.wait(lock, done);
  }
  std::erase(sleepers_, &done);
}

void SenderImpl::wake_sleepers() {
  if (std::any_of(sleepers_.begin(), sleepers_.end(), [](const auto* done) { return (*done)(); })) changed_.notify_all();
}

void SenderImpl::go_on() {
  if (!flow_.active()) return;
  const auto lap = [&] { return ms_since(std::exchange(phase_ns_, environment_.clock->now_ns())); };
  if (phase_ == Phase::kEnd && all_receivers([](const ReceiverFlow& receiver) { return receiver.outbox.empty(); })) {
    phases_.transfer = lap();
    phase_ = Phase::kPrepare;
  }
  if (phase_ != Phase::kPrepare) return;
  if (!all_receivers([](const ReceiverFlow& receiver) { return receiver.prepared || receiver.committed; })) return;
  phases_.prepare = lap();
  phase_ = Phase::kCommit;
  for (std::size_t r = 0; lead_ && r < receivers_.size(); ++r) flow_.push(r, wire::Commit{});
}

Status SenderImpl::wait_for(Lock& lock, bool in_session, const std::function<Due()>& due, const std::function<bool()>& done) {
  const auto lost = [&]() -> const ReceiverFlow* {
    const Due now = due();
    for (const ReceiverFlow& receiver : flow_.receivers()) {
      if (receiver.lost && !now.answered(receiver)) return &receiver;
    }
    return nullptr;
  };
  const std::function<bool()> over = [&] { return (in_session ? !outcome().ok() : lost() != nullptr) || done(); };
  deadline_.touch();
  while (true) {
    if (in_session) HEADRACE_RETURN_IF_ERROR(outcome());
    if (done()) return ok_status();
    if (const ReceiverFlow* receiver = in_session ? nullptr : lost()) {
      return Status(Code::kUnavailable, fmt::format("{} is gone: {}", receiver->name(), receiver->lost->message()));
    }
    if (deadline_.expired()) {
      wire::Failure failure;
      Status status = deadline_status(due(), failure);
      if (!in_session) return status;
      fail(std::move(failure));
      return failure_.value_or(status);
    }
    sleep(lock, over, std::min(deadline_.left_ms() + 1, kWaitStepMs));
  }
}

Status SenderImpl::wait(Lock& lock, bool in_session, std::string_view due, const std::function<bool()>& done, const PerReceiver& answered) {
  return wait_for(lock, in_session, [&] { return Due{due, answered}; }, done);
}

Status SenderImpl::wait_all(Lock& lock, std::string_view due, const PerReceiver& answered) {
  return wait(lock, true, due, [&] { return all_receivers(answered); }, answered);
}

Status SenderImpl::deadline_status(const Due& due, wire::Failure& failure) const {
  const auto late = [&](const ReceiverFlow& receiver) { return !due.answered(receiver); };
  const Status status(Code::kDeadlineExceeded,
                      fmt::format("no progress within {} ms, waiting for {} of {}", deadline_ms_, due.what, all_names(late)));
  for (const ReceiverFlow& receiver : flow_.receivers()) {
    if (!late(receiver)) continue;
    failure = receiver_failure(receiver, status, "");
    failure.bucket = receiver.waiting_bucket();
    return status;
  }
  failure = wire::make_failure(status, "");
  return status;
}

std::string SenderImpl::all_names(const PerReceiver& which) const {
  std::string names;
  for (const ReceiverFlow& receiver : flow_.receivers()) {
    if (which(receiver)) names += (names.empty() ? "" : ", ") + receiver.name();
  }
  return names;
}

void SenderImpl::drop_released(Lock& lock) {
  std::vector<std::shared_ptr<ReleaseOnce>> dropped;
  dropped.swap(dropped_);
  lock.unlock();
  dropped.clear();
  lock.lock();
}

std::string_view SenderImpl::phase_name(Phase phase) noexcept {
  switch (phase) {
    case Phase::kOpen: return "open";
    case Phase::kManifest: return "manifest";
    case Phase::kTransfer:
    case Phase::kEnd: return "transfer";
    case Phase::kPrepare: return "prepare";
    case Phase::kCommit: return "commit";
  }
  return "unknown";
}

}  // namespace headrace
