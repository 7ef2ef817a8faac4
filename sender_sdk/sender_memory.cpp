#include <fmt/format.h>

#include <algorithm>
#include <future>

#include "core/wire/limits.h"
#include "sender_sdk/sender_impl.h"

namespace headrace {

// All of this needs pack_mutex_, which guards the data source.

Status SenderImpl::ensure_staging() {
  if (staging_bytes_ >= bucket_bytes_) return ok_status();
  // Reached before the first packed byte of an update, so no receiver reads what is replaced.
  for (StagingPool::Slot& slot : pool_.slots()) {
    const auto memory = source_->allocate(static_cast<std::size_t>(bucket_bytes_));
    if (!memory.ok()) {
      const Status& status = memory.status();
      return Status(status.code(), fmt::format("staging buffer of {} bytes: {}", bucket_bytes_, status.message()), status.source(),
                    status.native());
    }
    if (Status status = announce(memory.value()); !status.ok()) {
      forget(memory.value());
      return status;
    }
    if (!slot.bytes.empty()) forget(slot.memory);
    const std::lock_guard lock(mutex_);
    slot.memory = memory.value();
    slot.bytes = source_->bytes(memory.value());
  }
  staging_bytes_ = bucket_bytes_;
  return ok_status();
}

Status SenderImpl::announce(MemoryId memory) {
  const int descriptor = source_->descriptor(memory);
  if (descriptor < 0) return ok_status();
  const std::uint64_t bytes = source_->bytes(memory).size();
  loop_->post([this, memory, bytes, descriptor] {
    for (std::size_t r = 0; r < receivers_.size(); ++r) {
      const Status status = loop_->connection(r).send_descriptor(memory, bytes, descriptor);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex_);
      acknowledged_.insert_or_assign({r, memory}, status);
      wake_sleepers();
    }
  });
  Lock lock(mutex_);
  const auto answered = [&](const ReceiverFlow& receiver) {
    return acknowledged_.contains({static_cast<std::size_t>(&receiver - flow_.receivers().data()), memory});
  };
  HEADRACE_RETURN_IF_ERROR(wait(
      lock, flow_.active(), "the acknowledgement of shared memory",
      [&] { return std::all_of(flow_.receivers().begin(), flow_.receivers().end(), answered); }, answered));
  Status outcome;
  for (std::size_t r = 0; r < receivers_.size(); ++r) {
    const auto found = acknowledged_.find({r, memory});
    if (!found->second.ok() && outcome.ok()) {
      outcome = Status(found->second.code(), fmt::format("{} cannot use {} bytes of shared memory: {}", flow_.receivers()[r].name(), bytes,
                                                         found->second.message()));
    }
    acknowledged_.erase(found);
  }
  return outcome;
}

void SenderImpl::forget(MemoryId memory) {
  if (source_->descriptor(memory) >= 0) {
    // The loop owns the connections; a receiver keeps its own mapping until no bucket reads it.
    std::promise<void> told;
    loop_->post([&] {
      for (std::size_t r = 0; r < receivers_.size(); ++r) (void)loop_->connection(r).release_descriptor(memory);
      told.set_value();
    });
    told.get_future().wait();
  }
  source_->release(memory);
}

Result<std::span<std::byte>> SenderImpl::keep_registered(const Result<MemoryId>& memory) {
  if (!memory.ok()) return memory.status();
  if (Status status = announce(memory.value()); !status.ok()) {
    forget(memory.value());
    return status;
  }
  registered_.push_back({memory.value(), source_->bytes(memory.value())});
  return registered_.back().bytes;
}

Result<std::span<std::byte>> SenderImpl::allocate(std::size_t bytes) {
  if (bytes == 0) return Status(Code::kInvalidArgument, "allocate: no bytes");
  if (path_ == DataPathKind::kInline) return Status(Code::kUnsupported, "allocate: the inline data path cannot share memory");
  const std::lock_guard packing(pack_mutex_);
  return keep_registered(source_->allocate(bytes));
}

Result<std::span<std::byte>> SenderImpl::adopt(UniqueFd descriptor, std::size_t bytes) {
  if (bytes == 0) return Status(Code::kInvalidArgument, "adopt: no bytes");
  if (path_ == DataPathKind::kInline) return Status(Code::kUnsupported, "adopt: the inline data path cannot share memory");
  const std::lock_guard packing(pack_mutex_);
  return keep_registered(source_->adopt(std::move(descriptor), bytes));
}

Status SenderImpl::release(std::span<std::byte> memory) {
  {
    const std::lock_guard lock(mutex_);
    if (flow_.active()) return Status(Code::kFailedPrecondition, "release: an update is open");
  }
  const std::lock_guard packing(pack_mutex_);
  const auto found = std::find_if(registered_.begin(), registered_.end(), [&](const Registered& each) {
    return each.bytes.data() == memory.data() && each.bytes.size() == memory.size();
  });
  if (found == registered_.end()) return Status(Code::kInvalidArgument, "release: allocate() or adopt() returned no such memory");
  forget(found->memory);
  registered_.erase(found);
  return ok_status();
}

}  // namespace headrace
