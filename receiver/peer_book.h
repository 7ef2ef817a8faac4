#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/transport/control.h"
#include "core/transport/data_path.h"
#include "receiver/applier.h"

namespace headrace {

/// Who is connected, and the memory that each peer has shared with us. Progress thread only.
class PeerBook {
 public:
  /// A peer that has said HELLO. Tools have no sender name.
  struct Peer {
    std::string sender;
    std::unique_ptr<DataSink> shm;
    std::unique_ptr<DataSink> inlined;
    std::set<MemoryId> leaving;  // released by the sender, still mapped for enqueued work
  };
  /// Runs a function on the progress thread. Any thread.
  using Post = std::function<void(std::function<void()>)>;

  PeerBook(Device& device, Applier& applier, Post post) : device_(&device), applier_(&applier), post_(std::move(post)) {}

  /// kResourceExhausted beyond limits::kPeersMax; kFailedPrecondition when another peer uses the sender name.
  Status add(const PeerId& id, const std::string& sender);
  Peer* find(const PeerId& id);
  const PeerId* find_sender(std::string_view sender) const;
  /// Maps memory that a peer offers.
  Status attach(const PeerId& id, MemoryId memory, std::uint64_t bytes, UniqueFd descriptor);
  /// Unmaps it once the work that is enqueued has read it; from now on no bucket may name it.
  void detach_async(const PeerId& id, MemoryId memory);
  /// The readable bytes of a memory that a bucket of this peer names.
  static Result<std::span<const std::byte>> resolve(const Peer& peer, MemoryId memory, std::span<const std::byte> attachment);
  void remove(const PeerId& id);
  std::size_t size() const noexcept { return peers_.size(); }

 private:
  Device* device_;
  Applier* applier_;
  Post post_;
  std::map<PeerId, Peer> peers_;
};

}  // namespace headrace
