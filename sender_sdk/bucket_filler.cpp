#include "sender_sdk/bucket_filler.h"

#include <algorithm>
#include <utility>

#include "core/wire/codec.h"

namespace headrace {
namespace {

constexpr std::int64_t kCellAlignment = 64;  // a cache line; streaming stores like it too
// A receiver has nothing to do before the first bucket, a sender nothing behind the last: the less of an update a bucket has, the more they
// do at the same time. Below the smallest share a bucket's own cost shows.
constexpr std::int64_t kBucketsPerUpdate = 16;
constexpr std::int64_t kShareBytesMin = 4 << 20;
constexpr std::size_t kExtentsPerBucket = 65'536;  // far below the wire's limit, so that tiny tensors do not wait for a full buffer

std::int64_t aligned(std::int64_t offset) {
  return (offset + kCellAlignment - 1) / kCellAlignment * kCellAlignment;
}

}  // namespace

void BucketFiller::begin_update(const BucketPlan& plan, const WantedLists& wanted, std::int64_t bucket_bytes) {
  plan_ = &plan;
  wanted_ = &wanted;
  bucket_bytes_ = bucket_bytes;
  share_bytes_ = std::max(plan.bytes / kBucketsPerUpdate, kShareBytesMin);
  slot_.reset();
  placed_.assign(wanted.size(), {});
  sums_.assign(wanted.size(), std::vector<FingerprintSum>(plan.entries.size()));
  wire_bytes_ = 0;
  in_place_total_ = 0;
  buckets_ = 0;
}

void BucketFiller::begin_bucket(std::uint32_t slot) {
  slot_ = slot;
  used_ = 0;
  in_place_ = 0;
  extents_ = 0;
}

bool BucketFiller::fits(std::int64_t bytes) const noexcept {
  // Bytes read in place count too, or the receivers would have nothing to do until the last bucket.
  const std::int64_t filled = aligned(used_) + in_place_;
  return extents_ < kExtentsPerBucket && filled < share_bytes_ && filled + bytes <= bucket_bytes_;
}

std::int64_t BucketFiller::reserve(std::int64_t bytes) {
  const std::int64_t offset = aligned(used_);
  used_ = offset + bytes;
  return offset;
}

void BucketFiller::add_packed(std::uint32_t entry, const Cell& cell, std::int64_t bytes, MemoryId memory, std::int64_t offset,
                              const FingerprintSum& sum) {
  place(entry, cell, Placed{{entry, memory, offset, std::nullopt, {}}, bytes}, bytes, sum);
}

void BucketFiller::add_in_place(std::uint32_t entry, const Cell& cell, std::int64_t bytes, MemoryId memory, std::int64_t offset,
                                std::vector<std::int64_t> strides, const FingerprintSum& sum) {
  in_place_ += bytes;
  in_place_total_ += static_cast<std::uint64_t>(bytes);
  place(entry, cell, Placed{{entry, memory, offset, std::nullopt, std::move(strides)}, 0}, bytes, sum);
}

void BucketFiller::place(std::uint32_t entry, const Cell& cell, Placed placed, std::int64_t bytes, const FingerprintSum& sum) {
  wire_bytes_ += static_cast<std::uint64_t>(bytes);
  for (const std::uint32_t r : plan_->groups[cell.group]) {
    const auto& boxes = (*wanted_)[r][entry].boxes;
    Placed& mine = placed_[r].emplace_back(placed);
    // On the wire strides stand behind a box.
    if (boxes.size() != 1 || boxes.front() != cell.box || !placed.extent.strides.empty()) mine.extent.box = cell.box;
    sums_[r][entry] += sum;
    extents_ = std::max(extents_, placed_[r].size());
  }
}

std::uint32_t BucketFiller::close_bucket(SessionFlow& flow, std::span<const std::byte> attachment) {
  std::uint32_t holders = 0;
  for (std::size_t r = 0; r < placed_.size(); ++r) {
    if (placed_[r].empty()) continue;
    ++holders;
    flow.receivers()[r].outbox.push_back(message_for(flow, r, attachment));
    placed_[r].clear();
  }
  slot_.reset();
  ++buckets_;
  return holders;
}

std::vector<std::vector<wire::Extent>> BucketFiller::close_unsent() {
  std::vector<std::vector<wire::Extent>> extents(placed_.size());
  for (std::size_t r = 0; r < placed_.size(); ++r) {
    for (Placed& each : placed_[r]) extents[r].push_back(std::move(each.extent));
    placed_[r].clear();
  }
  slot_.reset();
  ++buckets_;
  return extents;
}

Outgoing BucketFiller::message_for(SessionFlow& flow, std::size_t r, std::span<const std::byte> attachment) {
  ReceiverFlow& receiver = flow.receivers()[r];
  std::vector<Placed>& placed = placed_[r];
  Outgoing outgoing;
  std::int64_t wanted = 0;
  for (const Placed& each : placed) wanted = aligned(wanted) + each.packed_bytes;
  const bool all = wanted == used_;  // cells are packed one behind the other, so equal ends mean equal sets
  if (!attachment.empty() && !all) {
    outgoing.own_attachment.resize(static_cast<std::size_t>(wanted));
    std::int64_t offset = 0;
    for (Placed& each : placed) {
      offset = aligned(offset);
      const auto bytes = attachment.subspan(static_cast<std::size_t>(each.extent.offset), static_cast<std::size_t>(each.packed_bytes));
      std::copy(bytes.begin(), bytes.end(), outgoing.own_attachment.begin() + offset);
      each.extent.offset = offset;
      offset += each.packed_bytes;
    }
  } else {
    outgoing.attachment = attachment;
  }
  wire::Bucket bucket;
  bucket.sequence = receiver.next_sequence++;
  bucket.extents.reserve(placed.size());
  for (Placed& each : placed) bucket.extents.push_back(std::move(each.extent));
  outgoing.sequence = bucket.sequence;
  outgoing.slot = *slot_;
  outgoing.message = wire::encode({flow.session(), receiver.incarnation, std::move(bucket)});
  return outgoing;
}

std::vector<wire::EntryFingerprint> BucketFiller::fingerprints(std::size_t r) const {
  std::vector<wire::EntryFingerprint> sums;
  for (std::size_t e = 0; e < sums_[r].size(); ++e) {
    if (!(*wanted_)[r][e].boxes.empty()) sums.push_back({static_cast<std::uint32_t>(e), sums_[r][e]});
  }
  return sums;
}

}  // namespace headrace
