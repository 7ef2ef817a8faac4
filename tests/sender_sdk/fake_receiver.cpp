#include "tests/sender_sdk/fake_receiver.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/wire/codec.h"
#include "core/wire/limits.h"

namespace headrace::test {
namespace {

/// Calls visit(coordinates) for every element of a box, last dimension fastest.
void for_each_element(const Box& box, const std::function<void(const std::vector<std::int64_t>&)>& visit) {
  if (box.empty()) return;
  std::vector<std::int64_t> at = box.lo;
  while (true) {
    visit(at);
    std::size_t d = box.rank();
    while (d > 0) {
      if (++at[d - 1] < box.hi[d - 1]) break;
      at[d - 1] = box.lo[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

}  // namespace

FakeReceiver::FakeReceiver(std::unique_ptr<ControlListener> listener, FakeScript script, Intercept intercept)
    : listener_(std::move(listener)),
      script_(std::move(script)),
      intercept_(std::move(intercept)),
      device_(make_host_device()),
      incarnation_{random_u64()},
      thread_([this] { run(); }) {}

FakeReceiver::~FakeReceiver() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  listener_->wake();
  thread_.join();
}

void FakeReceiver::run() {
  while (true) {
    std::vector<std::function<void(FakeReceiver&)>> work;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      work.swap(work_);
    }
    for (const auto& each : work) each(*this);
    auto event = listener_->poll(100);
    if (event.ok() && event.value()) on_event(std::move(*event.value()));
  }
}

void FakeReceiver::on_event(ControlEvent event) {
  if (event.kind == ControlEventKind::kDescriptor) {
    Status status;
    {
      const std::lock_guard lock(mutex_);
      Peer& peer = peers_[event.peer];
      if (!peer.sink) peer.sink = make_data_sink(DataPathKind::kShm, *device_);
      status = peer.sink->attach(event.memory, event.memory_bytes, std::move(event.descriptor));
      attached_bytes_ += event.memory_bytes;
    }
    (void)listener_->acknowledge(event.peer, event.memory, status);
  } else if (event.kind == ControlEventKind::kReleased) {
    const std::lock_guard lock(mutex_);
    if (Peer& peer = peers_[event.peer]; peer.sink) peer.sink->detach(event.memory);
  } else if (event.kind == ControlEventKind::kMessage) {
    auto message = wire::decode(event.message);
    if (!message.ok()) return;
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back(message.value());
    }
    if (!intercept_ || !intercept_(*this, event.peer, message.value())) on_message(event.peer, message.value(), event.attachment);
    changed_.notify_all();
  }
}

void FakeReceiver::on_message(const PeerId& id, const wire::Message& message, std::span<const std::byte> attachment) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[id];
  if (const auto* hello = std::get_if<wire::Hello>(&message.body)) {
    peer.sender = hello->sender;
    wire::Welcome welcome;
    welcome.protocol = 1;
    welcome.job = script_.job;
    welcome.engine = script_.engine;
    welcome.rank = script_.rank;
    welcome.ranks = script_.ranks;
    welcome.boot_id = device_->identity().boot_id;
    welcome.devices = {device_->identity().device_uuid};
    welcome.data_paths = script_.data_paths;
    welcome.descriptor_path = listener_->descriptor_path();
    welcome.scopes = {"target"};
    welcome.state = static_cast<std::uint32_t>(script_.state);
    welcome.state_session = script_.state_session;
    welcome.bucket_bytes_max = script_.bucket_bytes_max;
    welcome.values = script_.values;
    return send_in({}, id, welcome);
  }
  if (const auto* open = std::get_if<wire::Open>(&message.body)) {
    session_ = message.session;
    open_ = *open;
    for (auto& [each, state] : peers_) {
      state.has_manifest = state.confirmed = state.ended = false;
      state.expected_sequence = 0;
      state.unanswered = 0;
    }
    return to_all(wire::Opened{open->version, open->senders, script_.expert_map});
  }
  if (std::holds_alternative<wire::Commit>(message.body)) {
    for (auto& [each, state] : peers_) state.committed_digest = state.digest;
    wire::Receipt receipt;
    receipt.engine = script_.engine;
    receipt.rank = script_.rank;
    receipt.session = message.session.value;
    receipt.proven = true;
    receipt.applied_bytes = 10;
    session_ = message.session;
    return open_.senders.empty() ? send_in(message.session, id, wire::Committed{receipt}) : to_all(wire::Committed{receipt});
  }
  if (message.session != session_) return;
  if (const auto* manifest = std::get_if<wire::Manifest>(&message.body)) return on_manifest(id, *manifest);
  if (std::holds_alternative<wire::Confirm>(message.body)) {
    peer.confirmed = true;
    if (all_senders([](const Peer& each) { return each.confirmed; })) to_all(wire::Begin{script_.credits});
  } else if (const auto* bucket = std::get_if<wire::Bucket>(&message.body)) {
    on_bucket(id, *bucket, attachment);
  } else if (std::holds_alternative<wire::End>(message.body)) {
    peer.ended = true;
    if (all_senders([](const Peer& each) { return each.ended && each.unanswered == 0; })) to_all(wire::Prepared{});
  } else if (std::holds_alternative<wire::Ping>(message.body)) {
    send(id, wire::Pong{0, static_cast<std::uint32_t>(wire::SessionState::kOpen)});
  } else if (const auto* abort = std::get_if<wire::Abort>(&message.body)) {
    to_all(wire::ErrorReport{abort->failure, static_cast<std::uint32_t>(wire::SessionState::kIdle)});
    session_ = {};
  }
}

void FakeReceiver::on_manifest(const PeerId& id, const wire::Manifest& manifest) {
  Peer& peer = peers_[id];
  if (!manifest.known) peer.entries = wire::decode_entries(manifest.entries).value();
  peer.digest = manifest.digest;
  peer.has_manifest = true;
  if (all_senders([](const Peer& each) { return each.has_manifest; })) answer_manifests();
}

void FakeReceiver::answer_manifests() {
  for (auto& [id, peer] : peers_) {
    if (!peer.has_manifest) continue;
    wire::Accept accept;
    accept.digest = peer.digest;
    accept.plan_key = peer.digest;
    accept.known = peer.committed_digest == peer.digest;
    peer.wanted.clear();
    for (const wire::ManifestEntry& entry : peer.entries) {
      wire::Wanted wanted{false, std::vector<std::int64_t>(entry.shape.size(), 1), {entry.box}};
      peer.wanted.push_back(script_.wants ? script_.wants(entry) : wanted);
      arrived_[entry.name].entry = entry;
      const auto bytes = static_cast<std::size_t>(*byte_count(entry.dtype, entry.shape));
      arrived_[entry.name].bytes.assign(bytes, std::byte{0});
      arrived_[entry.name].writes.assign(bytes, 0);
    }
    if (!accept.known) accept.wanted = peer.wanted;
    send(id, accept);
  }
}

void FakeReceiver::on_bucket(const PeerId& id, const wire::Bucket& bucket, std::span<const std::byte> attachment) {
  Peer& peer = peers_[id];
  if (bucket.sequence != peer.expected_sequence++) ++unreadable_extents_;
  unanswered_max_ = std::max(unanswered_max_, ++peer.unanswered);
  attachment_bytes_ += attachment.size();
  if (hold_consumed_) {
    // The bytes are looked at when the bucket is consumed, as a slow device would.
    held_.emplace_back(id, bucket.sequence);
    return;
  }
  for (const wire::Extent& extent : bucket.extents) unpack(peer, extent, attachment);
  --peer.unanswered;
  send(id, wire::Consumed{bucket.sequence});
}

void FakeReceiver::consume(const PeerId& id, std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[id];
  for (const wire::Message& message : messages_) {
    const auto* bucket = std::get_if<wire::Bucket>(&message.body);
    if (bucket == nullptr || bucket->sequence != sequence || message.session != session_) continue;
    for (const wire::Extent& extent : bucket->extents) unpack(peer, extent, {});
  }
  --peer.unanswered;
  send(id, wire::Consumed{sequence});
  if (all_senders([](const Peer& each) { return each.ended && each.unanswered == 0; })) to_all(wire::Prepared{});
}

void FakeReceiver::consume_held() {
  std::vector<std::pair<PeerId, std::uint64_t>> held;
  {
    const std::lock_guard lock(mutex_);
    held.swap(held_);
  }
  for (const auto& [peer, sequence] : held) consume(peer, sequence);
}

void FakeReceiver::unpack(Peer& peer, const wire::Extent& extent, std::span<const std::byte> attachment) {
  const wire::ManifestEntry& entry = peer.entries[extent.entry];
  const auto& boxes = peer.wanted[extent.entry].boxes;
  const Box box = extent.box ? *extent.box : boxes.front();
  std::span<const std::byte> memory = attachment;
  if (attachment.empty() && peer.sink) {
    if (auto resolved = peer.sink->resolve(extent.memory, attachment); resolved.ok()) memory = resolved.value();
  }
  const auto elem = static_cast<std::int64_t>(dtype_bytes(entry.dtype));
  Arrived& arrived = arrived_[entry.name];
  for_each_element(box, [&](const std::vector<std::int64_t>& at) {
    std::int64_t from = extent.offset;
    std::int64_t packed = 0;
    std::int64_t to = 0;
    for (std::size_t d = 0; d < at.size(); ++d) {
      if (!extent.strides.empty()) from += (at[d] - box.lo[d]) * extent.strides[d];
      packed = packed * (box.hi[d] - box.lo[d]) + at[d] - box.lo[d];
      to = to * entry.shape[d] + at[d];
    }
    if (extent.strides.empty()) from += packed * elem;
    for (std::int64_t b = 0; b < elem; ++b) {
      if (from + b < 0 || static_cast<std::size_t>(from + b) >= memory.size()) {
        ++unreadable_extents_;
        return;
      }
      const auto place = static_cast<std::size_t>(to * elem + b);
      arrived.bytes[place] = memory[static_cast<std::size_t>(from + b)];
      ++arrived.writes[place];
    }
  });
}

bool FakeReceiver::all_senders(const std::function<bool(const Peer&)>& holds) const {
  std::size_t count = 0;
  for (const auto& [id, peer] : peers_) {
    const bool named = std::find(open_.senders.begin(), open_.senders.end(), peer.sender) != open_.senders.end();
    if (named && holds(peer)) ++count;
  }
  return count == open_.senders.size();
}

void FakeReceiver::to_all(const wire::Body& body) {
  for (const auto& [id, peer] : peers_) {
    if (std::find(open_.senders.begin(), open_.senders.end(), peer.sender) != open_.senders.end()) send(id, body);
  }
}

void FakeReceiver::send(const PeerId& peer, wire::Body body) {
  send_in(session_, peer, std::move(body));
}

void FakeReceiver::send_in(SessionId session, const PeerId& peer, wire::Body body) {
  (void)listener_->send(peer, wire::encode({session, incarnation_, std::move(body)}));
}

wire::Failure FakeReceiver::failure(Code code, std::string message) const {
  wire::Failure failure = wire::make_failure(Status(code, std::move(message)), "");
  failure.engine = script_.engine;
  failure.rank = script_.rank;
  return failure;
}

std::vector<PeerId> FakeReceiver::peers() const {
  const std::lock_guard lock(mutex_);
  std::vector<PeerId> ids;
  for (const auto& [id, peer] : peers_) ids.push_back(id);
  return ids;
}

void FakeReceiver::post(std::function<void(FakeReceiver&)> work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  listener_->wake();
}

bool FakeReceiver::await(const std::function<bool(const FakeReceiver&)>& seen) {
  const auto due = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!seen(*this)) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(5));
    if (std::chrono::steady_clock::now() > due) return false;
  }
  return true;
}

std::size_t FakeReceiver::count(wire::MessageType type) const {
  return all(type).size();
}

std::optional<wire::Message> FakeReceiver::last(wire::MessageType type) const {
  auto found = all(type);
  if (found.empty()) return std::nullopt;
  return std::move(found.back());
}

std::vector<wire::Message> FakeReceiver::all(wire::MessageType type) const {
  const std::lock_guard lock(mutex_);
  std::vector<wire::Message> found;
  for (const wire::Message& message : messages_) {
    if (wire::type_of(message.body) == type) found.push_back(message);
  }
  return found;
}

Arrived FakeReceiver::arrived(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = arrived_.find(name);
  return found == arrived_.end() ? Arrived{} : found->second;
}

std::uint64_t FakeReceiver::attached_bytes() const {
  const std::lock_guard lock(mutex_);
  return attached_bytes_;
}

std::uint64_t FakeReceiver::attachment_bytes() const {
  const std::lock_guard lock(mutex_);
  return attachment_bytes_;
}

std::size_t FakeReceiver::unanswered_max() const {
  const std::lock_guard lock(mutex_);
  return unanswered_max_;
}

std::size_t FakeReceiver::unreadable_extents() const {
  const std::lock_guard lock(mutex_);
  return unreadable_extents_;
}

void FakeReceiver::hold_consumed(bool hold) {
  const std::lock_guard lock(mutex_);
  hold_consumed_ = hold;
}

}  // namespace headrace::test
