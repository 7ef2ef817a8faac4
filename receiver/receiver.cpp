#include "receiver/receiver.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/wire/codec.h"
#include "core/wire/limits.h"
#include "receiver/receiver_impl.h"

namespace headrace {
namespace {

constexpr std::int64_t kTickMs = 100;

Status check_id(std::string_view what, const std::string& id) {
  if (valid_run_id(id)) return ok_status();
  return Status(Code::kInvalidArgument, fmt::format("{} \"{}\": 1 to 64 characters of [A-Za-z0-9._-]", what, id));
}

Status check_options(ReceiverOptions& options) {
  HEADRACE_RETURN_IF_ERROR(check_id("job", options.job));
  HEADRACE_RETURN_IF_ERROR(check_id("engine", options.engine));
  if (options.rank >= options.ranks) return Status(Code::kInvalidArgument, fmt::format("rank {} of {} ranks", options.rank, options.ranks));
  if (options.credits == 0) return Status(Code::kInvalidArgument, "credits must be at least 1");
  if (options.data_paths.empty()) return Status(Code::kInvalidArgument, "no data path");
  for (const std::string& path : options.data_paths)
    if (!parse_data_path(path)) return Status(Code::kInvalidArgument, fmt::format("unknown data path {}", path));
  if (options.bucket_bytes_max == 0) options.bucket_bytes_max = limits::kBucketBytesMax;
  if (options.bucket_bytes_max < limits::kBucketBytesMin || options.bucket_bytes_max > limits::kBucketBytesMax) {
    return Status(Code::kInvalidArgument, fmt::format("buckets of at most {} bytes, the limits are {} and {}", options.bucket_bytes_max,
                                                      limits::kBucketBytesMin, limits::kBucketBytesMax));
  }
  if (options.deadline_ms == 0) options.deadline_ms = limits::kDeadlineMsDefault;
  if (options.deadline_ms < 0) return Status(Code::kInvalidArgument, fmt::format("a deadline of {} ms", options.deadline_ms));
  return ok_status();
}

}  // namespace

// ---- Impl -----------------------------------------------------------------------------------------------------------------------

Receiver::Impl::Impl(ReceiverOptions options, ModelLayout layout, const StorageTable& table, Device& device, EngineHooks hooks,
                     ReceiverParts parts)
    : options_(std::move(options)),
      table_(&table),
      device_(&device),
      hooks_(std::move(hooks)),
      parts_(std::move(parts)),
      index_(std::move(layout)),
      incarnation_{random_u64()},
      canaries_(table.canaries()) {
  if (parts_.clock == nullptr) parts_.clock = &steady_clock_;
}

Result<std::unique_ptr<Receiver::Impl>> Receiver::Impl::create(ReceiverOptions options, ModelLayout layout, const StorageTable& table,
                                                               Device& device, EngineHooks hooks, ReceiverParts parts) {
  if (!table.sealed()) return Status(Code::kFailedPrecondition, "the storage table is not sealed");
  HEADRACE_RETURN_IF_ERROR(place_groups(layout));
  std::int64_t scratch = 0;
  for (const StagedGroup& group : layout.groups) {
    scratch = std::max(scratch, scratch_bytes(layout, group));
    const auto hook = hooks.staged.find(group.hook);
    if (hook == hooks.staged.end() || hook->second == nullptr) {
      return Status(Code::kInvalidArgument, fmt::format("staged group {}: the engine gave no hook {}", group.name, group.hook));
    }
  }
  Result<GroupScratch> groups = GroupScratch::create(device, scratch);
  if (!groups.ok()) return groups.status();
  std::unique_ptr<Impl> impl(new Impl(std::move(options), std::move(layout), table, device, std::move(hooks), std::move(parts)));
  Result<PlanGeometry> geometry = PlanGeometry::build(impl->index_, table);
  if (!geometry.ok()) return geometry.status();
  impl->geometry_ = std::move(geometry).value();
  Result<GlobalValues> values = GlobalValues::build(impl->index_);
  if (!values.ok()) return values.status();
  impl->values_ = std::move(values).value();
  HEADRACE_RETURN_IF_ERROR(impl->restore());
  Result<GuardPage> guard = GuardPage::create(impl->parts_.guard_path, impl->options_.engine, impl->options_.ranks, impl->options_.rank);
  if (!guard.ok()) return guard.status();
  impl->guard_ = std::make_unique<GuardPage>(std::move(guard).value());
  impl->loop_ = std::make_unique<ProgressLoop>(*impl->parts_.listener, kTickMs);
  Result<std::unique_ptr<Applier>> applier = Applier::create(device, thread_count(impl->options_.threads), impl->hooks_.staged);
  if (!applier.ok()) return applier.status();
  impl->applier_ = std::move(applier).value();
  impl->scratch_ = std::move(groups).value();
  Impl* self = impl.get();
  const PeerBook::Post post = [self](std::function<void()> work) { self->loop_->post(std::move(work)); };
  impl->peers_ = std::make_unique<PeerBook>(device, *impl->applier_, post);
  impl->inspection_ = std::make_unique<Inspection>(impl->index_, impl->geometry_, table);
  impl->control_ = std::make_unique<SessionControl>(SessionControl::Environment{
      &impl->options_, &impl->index_, &impl->geometry_, &table, &impl->hooks_, impl->applier_.get(), impl->guard_.get(), impl->peers_.get(),
      impl->parts_.clock, [self](const PeerId& peer, SessionId session, wire::Body body) { self->send(peer, session, std::move(body)); },
      &impl->canaries_, [self] { (void)self->restore(); },
      [self](std::shared_ptr<const ExpertMaps> experts) { self->inspection_->set_experts(std::move(experts)); }, post, &impl->scratch_,
      &impl->values_});
  HEADRACE_RETURN_IF_ERROR(
      impl->loop_->start([self](ControlEvent event) { self->on_event(std::move(event)); }, [self] { self->control_->on_tick(); }));
  return impl;
}

Receiver::Impl::~Impl() {
  // The loop first: nothing is enqueued after it. Then the apply thread ends what it has; what it still posts is dropped.
  if (loop_ != nullptr) loop_->stop();
  if (control_ != nullptr) control_->end_waits("the receiver is gone");
  applier_.reset();
  if (guard_ != nullptr) guard_->publish(SlotState::kNone, 0, WeightVersion{});
}

Status Receiver::Impl::write_constants() {
  std::vector<CopyJob> jobs;
  for (const ConstantRule& rule : index_.layout().constants) {
    const StorageSpec& spec = index_.layout().storages.at(rule.storage);
    if (Status status = validate(rule.copy, rule.copy.run_bytes, spec.bytes); !status.ok()) {
      return Status(status.code(), fmt::format("constant of storage {}: {}", spec.name, status.message()));
    }
    jobs.push_back({rule.copy, nullptr, geometry_.storage(rule.storage), rule.constant});
  }
  WorkerPool pool(thread_count(options_.threads));
  HostExecutor(pool).run(jobs);
  return ok_status();
}

Status Receiver::Impl::restore() {
  HEADRACE_RETURN_IF_ERROR(write_constants());
  canaries_.write();
  return ok_status();
}

void Receiver::Impl::send(const PeerId& peer, SessionId session, wire::Body body) {
  const Status status = parts_.listener->send(peer, wire::encode({session, incarnation_, std::move(body)}));
  // That a peer is gone the listener says itself, behind what the peer had still said: an ABORT tells more than a lost connection.
  if (status.ok() || status.code() == Code::kUnavailable) return;
  // A peer whose queue is full does not read: for a session that is as good as lost.
  loop_->post([this, peer, status] {
    if (peers_->find(peer) == nullptr) return;
    peers_->remove(peer);
    parts_.listener->drop(peer);
    control_->on_peer_lost(peer, status);
  });
}

void Receiver::Impl::refuse(const PeerId& peer, SessionId session, const Status& status, std::string phase) {
  wire::Failure failure = wire::make_failure(status, std::move(phase));
  failure.engine = options_.engine;
  failure.rank = options_.rank;
  send(peer, session, wire::ErrorReport{std::move(failure), static_cast<std::uint32_t>(control_->state())});
}

void Receiver::Impl::on_event(ControlEvent event) {
  switch (event.kind) {
    case ControlEventKind::kMessage: return on_message(event.peer, std::move(event.message), std::move(event.attachment));
    case ControlEventKind::kDescriptor: {
      const Status attached = peers_->attach(event.peer, event.memory, event.memory_bytes, std::move(event.descriptor));
      (void)parts_.listener->acknowledge(event.peer, event.memory, attached);
      return;
    }
    case ControlEventKind::kReleased: return peers_->detach_async(event.peer, event.memory);
    case ControlEventKind::kPeerLost: peers_->remove(event.peer); return control_->on_peer_lost(event.peer, event.status);
    case ControlEventKind::kAcknowledged: return;
  }
}

void Receiver::Impl::on_message(const PeerId& peer, std::vector<std::byte> bytes, std::vector<std::byte> attachment) {
  Result<wire::Message> decoded = wire::decode(bytes);
  if (!decoded.ok()) {
    refuse(peer, SessionId{}, decoded.status(), "message");
    if (peers_->find(peer) != nullptr)
      control_->on_peer_lost(peer, Status(decoded.status().code(), "it sent " + decoded.status().message()));
    return;
  }
  bytes = {};  // a manifest is a second copy of them
  wire::Message message = std::move(decoded).value();
  if (const auto* hello = std::get_if<wire::Hello>(&message.body)) return on_hello(peer, *hello);
  PeerBook::Peer* from = peers_->find(peer);
  const auto name = wire::message_name(wire::type_of(message.body));
  if (from == nullptr)
    return refuse(peer, message.session, Status(Code::kFailedPrecondition, fmt::format("{} before HELLO", name)), "hello");
  if (message.incarnation != incarnation_) {
    return refuse(peer, message.session,
                  Status(Code::kFailedPrecondition, fmt::format("{} for incarnation {:016x}, this receiver is {:016x}: it was started anew",
                                                                name, message.incarnation.value, incarnation_.value)),
                  "message");
  }
  if (on_tool(peer, message)) return;
  if (from->sender.empty()) {
    return refuse(peer, message.session, Status(Code::kFailedPrecondition, fmt::format("{} from a peer without a sender name", name)),
                  "message");
  }
  control_->on_message(peer, *from, std::move(message), std::move(attachment));
}

void Receiver::Impl::on_hello(const PeerId& peer, const wire::Hello& hello) {
  const auto fail = [&](Code code, const std::string& why) { refuse(peer, SessionId{}, Status(code, why), "hello"); };
  if (hello.protocol_min > limits::kProtocolVersion || hello.protocol_max < limits::kProtocolVersion) {
    return fail(Code::kUnsupported, fmt::format("protocols {} to {}, this receiver speaks {}", hello.protocol_min, hello.protocol_max,
                                                limits::kProtocolVersion));
  }
  if (hello.job != options_.job)
    return fail(Code::kFailedPrecondition, fmt::format("job {}, this receiver serves {}", hello.job, options_.job));
  if (!hello.sender.empty() && !valid_run_id(hello.sender))
    return fail(Code::kInvalidArgument, fmt::format("sender name \"{}\"", hello.sender));
  const auto offered = [&](const std::string& path) {
    return std::find(hello.data_paths.begin(), hello.data_paths.end(), path) != hello.data_paths.end();
  };
  if (!hello.sender.empty() && std::none_of(options_.data_paths.begin(), options_.data_paths.end(), offered)) {
    return fail(Code::kUnsupported,
                fmt::format("data paths {}, this receiver has {}", fmt::join(hello.data_paths, ","), fmt::join(options_.data_paths, ",")));
  }
  if (Status status = peers_->add(peer, hello.sender); !status.ok()) return fail(status.code(), status.message());
  wire::Welcome welcome;
  welcome.protocol = limits::kProtocolVersion;
  welcome.job = options_.job;
  welcome.engine = options_.engine;
  welcome.rank = options_.rank;
  welcome.ranks = options_.ranks;
  welcome.boot_id = device_->identity().boot_id;
  welcome.devices = {device_->identity().device_uuid};
  welcome.data_paths = options_.data_paths;
  welcome.descriptor_path = parts_.listener->descriptor_path();
  welcome.table = table_->digest();
  welcome.scopes = index_.scopes();
  welcome.bucket_bytes_max = options_.bucket_bytes_max;
  welcome.deadline_ms = options_.deadline_ms;
  welcome.values = values_.rules();
  control_->describe(welcome);
  send(peer, SessionId{}, std::move(welcome));
  control_->on_hello(peer, hello.sender);
}

bool Receiver::Impl::on_tool(const PeerId& peer, const wire::Message& message) {
  // What reads live storage is ordered with what writes it.
  const auto on_apply_thread = [&](std::function<Result<wire::Body>()> work) {
    const Status enqueued = applier_->run_async([this, peer, work = std::move(work)] {
      loop_->post([this, peer, answer = work()] {
        if (!answer.ok()) return refuse(peer, SessionId{}, answer.status(), "inspect");
        wire::Body body = answer.value();
        if (auto* reply = std::get_if<wire::FingerprintReply>(&body))
          reply->version = control_->version() ? control_->version()->to_string() : "";
        send(peer, SessionId{}, std::move(body));
      });
    });
    if (!enqueued.ok()) refuse(peer, SessionId{}, enqueued, "inspect");
  };
  if (std::holds_alternative<wire::StatusRequest>(message.body)) {
    send(peer, SessionId{}, status_on_loop());
  } else if (const auto* request = std::get_if<wire::FingerprintRequest>(&message.body)) {
    on_apply_thread([this, from = request->from, count = request->count]() -> Result<wire::Body> {
      return wire::Body(inspection_->fingerprints(from, std::min<std::uint64_t>(count, limits::kManifestEntriesMax)));
    });
  } else if (const auto* read = std::get_if<wire::ReadRequest>(&message.body)) {
    on_apply_thread([this, request = *read]() -> Result<wire::Body> {
      Result<wire::ReadReply> reply = inspection_->read(request);
      if (!reply.ok()) return reply.status();
      return wire::Body(std::move(reply).value());
    });
  } else if (std::holds_alternative<wire::StorageRequest>(message.body)) {
    send(peer, SessionId{}, inspection_->storages());
  } else {
    return false;
  }
  return true;
}

void Receiver::Impl::fingerprints_async(std::function<void(Result<std::vector<wire::TensorFingerprint>>)> done) {
  const Status enqueued = applier_->run_async(
      [this, done] { loop_->post([done, reply = inspection_->fingerprints(0, limits::kManifestEntriesMax)] { done(reply.tensors); }); });
  if (!enqueued.ok()) done(enqueued);
}

Result<wire::Receipt> Receiver::Impl::wait_for(const WeightVersion& version, const WaitOptions& options, const std::stop_token& stop) {
  using Outcome = Result<wire::Receipt>;
  const std::uint64_t id = next_wait_.fetch_add(1);
  const auto promise = std::make_shared<std::promise<Outcome>>();
  std::future<Outcome> answer = promise->get_future();
  std::optional<std::uint64_t> mark;
  if (options.since) mark = options.since->ended;
  loop_->post([this, promise, mark, wait = UpdateWaits::Wait{id, version, options.deadline_ms, 0, [promise](Outcome outcome) {
                                                               promise->set_value(std::move(outcome));
                                                             }}] { control_->wait_for(wait, mark); });
  // Behind the question in the loop's order, so that it cannot come too early.
  const std::stop_callback cancel(stop, [this, id] { loop_->post([this, id] { control_->cancel_wait(id); }); });
  try {
    return answer.get();
  } catch (const std::future_error&) {
    // What is posted behind the loop's end is dropped.
    return Status(Code::kCancelled, "the receiver is gone");
  }
}

wire::StatusReply Receiver::Impl::status_on_loop() const {
  wire::StatusReply reply;
  reply.job = options_.job;
  reply.engine = options_.engine;
  reply.rank = options_.rank;
  reply.ranks = options_.ranks;
  reply.pid = static_cast<std::uint64_t>(::getpid());
  reply.storages = table_->size();
  reply.storage_bytes = static_cast<std::uint64_t>(table_->total_bytes());
  reply.table = table_->digest();
  reply.family = index_.layout().family;
  reply.layout = index_.layout().parallel.to_string();
  reply.variant = index_.layout().variant;
  control_->describe(reply);
  return reply;
}

// ---- the public face ------------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<Receiver>> Receiver::start(ReceiverOptions options, ModelLayout layout, const StorageTable& table, Device& device,
                                                  EngineHooks hooks) {
  HEADRACE_RETURN_IF_ERROR(check_options(options));
  Result<RunDirectory> directory = RunDirectory::create(options.job);
  if (!directory.ok()) return directory.status();
  Result<EndpointClaim> claim = directory.value().claim(options.engine, options.rank);
  if (!claim.ok()) return claim.status();
  ReceiverParts parts;
  parts.guard_path = directory.value().guard_path(options.engine);
  const std::string endpoint = options.endpoint.empty() ? claim.value().endpoint() : options.endpoint;
  const bool shm = std::find(options.data_paths.begin(), options.data_paths.end(), "shm") != options.data_paths.end();
  Result<std::unique_ptr<ControlListener>> listener = listen_zmq(endpoint, shm ? claim.value().descriptor_path() : "");
  if (!listener.ok()) return listener.status();
  parts.listener = std::move(listener).value();
  parts.claim.emplace(std::move(claim).value());
  Result<std::unique_ptr<Impl>> impl =
      Impl::create(std::move(options), std::move(layout), table, device, std::move(hooks), std::move(parts));
  if (!impl.ok()) return impl.status();
  return std::unique_ptr<Receiver>(new Receiver(std::move(impl).value()));
}

Receiver::Receiver(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Receiver::~Receiver() = default;

const std::string& Receiver::endpoint() const noexcept {
  return impl_->endpoint();
}

wire::StatusReply Receiver::status() const {
  return impl_->ask<wire::StatusReply>([this](auto answer) { answer(impl_->status_on_loop()); });
}

Result<std::vector<wire::TensorFingerprint>> Receiver::fingerprints() const {
  using Values = Result<std::vector<wire::TensorFingerprint>>;
  return impl_->ask<Values>([this](auto answer) { impl_->fingerprints_async(std::move(answer)); });
}

Status Receiver::begin(const WeightVersion& version) {
  return impl_->ask<Status>([this, version](auto answer) { impl_->control().begin_plain(version, answer); });
}

Status Receiver::load(std::span<const NamedView> tensors) {
  return impl_->ask<Status>([this, tensors](auto answer) { impl_->control().load_plain(tensors, answer); });
}

Result<wire::Receipt> Receiver::finish() {
  return impl_->ask<Result<wire::Receipt>>([this](auto answer) { impl_->control().finish_plain(answer); });
}

Status Receiver::abort(const std::string& reason) {
  return impl_->ask<Status>([this, reason](auto answer) { answer(impl_->control().abort_plain(reason)); });
}

UpdateMark Receiver::mark() const {
  return impl_->ask<UpdateMark>([this](auto answer) { answer(UpdateMark{impl_->control().sessions_ended()}); });
}

Result<wire::Receipt> Receiver::wait_for(const WeightVersion& version, const WaitOptions& options, const std::stop_token& stop) const {
  return impl_->wait_for(version, options, stop);
}

void Receiver::end_waits(const std::string& reason) {
  impl_->ask<bool>([this, reason](auto answer) {
    impl_->control().end_waits(reason);
    answer(true);
  });
}

Status Receiver::notify(EngineEvent event) {
  return impl_->ask<Status>([this, event](auto answer) {
    impl_->control().on_engine_event(event);
    answer(ok_status());
  });
}

}  // namespace headrace
