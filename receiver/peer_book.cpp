#include "receiver/peer_book.h"

#include <fmt/format.h>

#include "core/wire/limits.h"

namespace headrace {

Status PeerBook::add(const PeerId& id, const std::string& sender) {
  if (peers_.contains(id)) return Status(Code::kFailedPrecondition, "this connection has said HELLO before");
  if (peers_.size() >= limits::kPeersMax) {
    return Status(Code::kResourceExhausted, fmt::format("{} connections, the limit is {}", peers_.size(), limits::kPeersMax));
  }
  if (!sender.empty() && find_sender(sender) != nullptr) {
    // It may be the same trainer that has just gone, and its going not noticed yet.
    return Status(Code::kUnavailable, fmt::format("sender {} is connected already: one connection per name", sender));
  }
  peers_.emplace(id, Peer{sender, nullptr, make_data_sink(DataPathKind::kInline, *device_), {}});
  return ok_status();
}

PeerBook::Peer* PeerBook::find(const PeerId& id) {
  const auto found = peers_.find(id);
  return found != peers_.end() ? &found->second : nullptr;
}

const PeerId* PeerBook::find_sender(std::string_view sender) const {
  for (const auto& [id, peer] : peers_)
    if (peer.sender == sender) return &id;
  return nullptr;
}

Status PeerBook::attach(const PeerId& id, MemoryId memory, std::uint64_t bytes, UniqueFd descriptor) {
  Peer* peer = find(id);
  if (peer == nullptr) return Status(Code::kFailedPrecondition, "a descriptor before HELLO");
  if (peer->shm == nullptr) peer->shm = make_data_sink(DataPathKind::kShm, *device_);
  return peer->shm->attach(memory, bytes, std::move(descriptor));
}

void PeerBook::detach_async(const PeerId& id, MemoryId memory) {
  Peer* peer = find(id);
  if (peer == nullptr || peer->shm == nullptr || !peer->leaving.insert(memory).second) return;
  (void)applier_->run_async([this, id, memory] {
    post_([this, id, memory] {
      if (Peer* still = find(id); still != nullptr && still->shm != nullptr) {
        still->shm->detach(memory);
        still->leaving.erase(memory);
      }
    });
  });
}

Result<std::span<const std::byte>> PeerBook::resolve(const Peer& peer, MemoryId memory, std::span<const std::byte> attachment) {
  if (!attachment.empty()) return peer.inlined->resolve(memory, attachment);
  if (peer.shm == nullptr || peer.leaving.contains(memory)) {
    return Status(Code::kInvalidArgument, fmt::format("memory {:016x} is not attached", memory.value));
  }
  return peer.shm->resolve(memory, attachment);
}

void PeerBook::remove(const PeerId& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  // Enqueued copies may still read the peer's memory: its mappings go when they are done.
  (void)applier_->run_async([sink = std::shared_ptr<DataSink>(std::move(found->second.shm))]() mutable { sink.reset(); });
  peers_.erase(found);
}

}  // namespace headrace
