#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/fingerprint_sum.h"
#include "core/base/ids.h"
#include "core/wire/messages.h"
#include "sender_sdk/bucket_plan.h"
#include "sender_sdk/session_flow.h"

namespace headrace {

/// The bucket that is being filled: what each receiver will be told of it, and the sums of everything that went before. One thread at a
/// time.
class BucketFiller {
 public:
  using WantedLists = std::vector<std::vector<wire::Wanted>>;  // per receiver, one for each entry

  /// Starts an update. `plan` and `wanted` must stay as they are until the next one. `bucket_bytes` is the most that a bucket takes; one of
  /// a small update is full before it, so that receivers write while the next one is filled.
  void begin_update(const BucketPlan& plan, const WantedLists& wanted, std::int64_t bucket_bytes);

  bool open() const noexcept { return slot_.has_value(); }
  std::uint32_t slot() const noexcept { return *slot_; }
  void begin_bucket(std::uint32_t slot);
  /// Whether a cell of this many bytes still goes into the open bucket.
  bool fits(std::int64_t bytes) const noexcept;
  /// Where a cell of this many bytes is packed to: an offset into the staging buffer. Precondition: it fits.
  std::int64_t reserve(std::int64_t bytes);

  /// Tells the cell's receivers of bytes packed at `offset`, a reserve() of this bucket.
  void add_packed(std::uint32_t entry, const Cell& cell, std::int64_t bytes, MemoryId memory, std::int64_t offset,
                  const FingerprintSum& sum);
  /// Tells them of bytes in registered memory; `strides` is empty when they are packed row-major.
  void add_in_place(std::uint32_t entry, const Cell& cell, std::int64_t bytes, MemoryId memory, std::int64_t offset,
                    std::vector<std::int64_t> strides, const FingerprintSum& sum);

  /// The open bucket as messages, one for each receiver that gets something of it; closes it. `attachment` gives the bytes that have to
  /// travel with a bucket whose extents lie in the first `used` bytes of the staging buffer: none, or all of them. A receiver that does not
  /// want all of these gets its own copy of what it wants. `flow` numbers the buckets and takes the messages. Returns the receivers' count.
  std::uint32_t close_bucket(SessionFlow& flow, std::span<const std::byte> attachment);
  /// The open bucket's extents, per receiver, for who plans an update without sending it; closes the bucket.
  std::vector<std::vector<wire::Extent>> close_unsent();
  /// Bytes used of the open bucket's staging buffer.
  std::size_t used() const noexcept { return static_cast<std::size_t>(used_); }

  /// For END: the sums of all entries that this receiver wants something of.
  std::vector<wire::EntryFingerprint> fingerprints(std::size_t receiver) const;
  std::uint64_t wire_bytes() const noexcept { return wire_bytes_; }
  std::uint64_t in_place_bytes() const noexcept { return in_place_total_; }
  std::uint64_t buckets() const noexcept { return buckets_; }

 private:
  struct Placed {
    wire::Extent extent;
    std::int64_t packed_bytes = 0;  // 0: read in place
  };
  void place(std::uint32_t entry, const Cell& cell, Placed placed, std::int64_t bytes, const FingerprintSum& sum);
  Outgoing message_for(SessionFlow& flow, std::size_t receiver, std::span<const std::byte> attachment);

  const BucketPlan* plan_ = nullptr;
  const WantedLists* wanted_ = nullptr;
  std::int64_t bucket_bytes_ = 0;
  std::int64_t share_bytes_ = 0;  // with so much in it a bucket is full
  std::optional<std::uint32_t> slot_;
  std::int64_t used_ = 0;                          // of the staging buffer
  std::int64_t in_place_ = 0;                      // of the open bucket
  std::size_t extents_ = 0;                        // the most that one receiver has in it
  std::vector<std::vector<Placed>> placed_;        // per receiver
  std::vector<std::vector<FingerprintSum>> sums_;  // per receiver and entry
  std::uint64_t wire_bytes_ = 0;
  std::uint64_t in_place_total_ = 0;
  std::uint64_t buckets_ = 0;
};

}  // namespace headrace
