#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/planned_update.h"
#include "benchmarks/receiver_process.h"
#include "core/base/fingerprint_sum.h"
#include "core/device/device.h"
#include "sender_sdk/packer.h"

// The reference of the rows from process to process: the bytes go the same way (the same packing copy, two staging buffers of the same
// size, the same nests into the same live storage, one thread on each side), but nobody asks, checks, plans or answers. The processes hand
// buckets over by single packets. Where the row has fingerprints, so has the reference: summed while packing, and read back.

namespace headrace::bench {

/// Where the tensors of an update lie in one block of a trainer's memory: back to back, at cache lines.
struct SourceMap {
  explicit SourceMap(std::span<const wire::ManifestEntry> entries);
  std::vector<std::int64_t> offsets;  // one per entry
  std::int64_t bytes = 0;
};

/// The receiving side, in the receiver's process and on its storage. One thread.
class BareReceiver {
 public:
  BareReceiver(ModelLayout layout, const StorageBlock& storage, Device& device)
      : layout_(std::move(layout)), storage_(&storage), device_(&device) {}
  /// "prepare BUCKET_BYTES", "attach PID FD BYTES" (memory in the order of the calls: two staging buffers, then a registered source),
  /// "packed BUCKETS READBACK", "in_place BUCKETS READBACK". Answers when the work is done; throws Error.
  std::string answer(const std::string& question, const PacketChannel& channel);

 private:
  void apply(const StagedBucket& bucket, std::size_t number, bool in_place);
  FingerprintSum read_back() const;

  ModelLayout layout_;
  const StorageBlock* storage_;
  Device* device_;
  std::unique_ptr<PlannedUpdate> update_;
  std::optional<SourceMap> map_;
  std::vector<std::unique_ptr<DeviceMemory>> memories_;
  BucketApplier applier_{1};
  std::vector<SyncPlan::KeyedJob> jobs_;
};

/// The sending side.
class BareSender {
 public:
  /// The receiver's process has the same model. Nothing is measured yet; before the receiver's first update, so that what the pipeline
  /// needs is not counted as the receiver's.
  BareSender(const std::string& model, const ReceiverProcess& receiver, Device& device);
  const PlannedUpdate& update() const noexcept { return *update_; }
  const SourceMap& map() const noexcept { return map_; }

  /// Lets the receiver's process read this memory, which `descriptor` of this process is, in place.
  void attach_source(int descriptor, std::size_t bytes);
  /// Seconds of one update from `source`, laid out by map(). Throws when fingerprints differ.
  double run(std::span<const std::byte> source, bool in_place, bool fingerprints);

 private:
  FingerprintSum take(Packer& packer, const StagedBucket& bucket, std::span<const std::byte> source, std::byte* staging) const;

  const PacketChannel* channel_;
  StorageBlock storage_;  // addresses alone
  std::unique_ptr<PlannedUpdate> update_;
  SourceMap map_;
  std::vector<std::unique_ptr<DeviceMemory>> staging_;
  std::vector<UniqueFd> descriptors_;  // of staging_, for the other process to open
};

}  // namespace headrace::bench
