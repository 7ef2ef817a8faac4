#include "benchmarks/planned_update.h"

#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include "benchmarks/v41_model.h"
#include "core/base/check.h"
#include "core/wire/codec.h"
#include "receiver/applier.h"

namespace headrace::bench {
namespace {

constexpr std::int64_t kCellAlignment = 64;
constexpr std::int64_t kStorageAlignment = 4096;

std::int64_t aligned(std::int64_t offset, std::int64_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

std::size_t block_bytes(const ModelLayout& layout) {
  std::int64_t total = 0;
  for (const StorageSpec& spec : layout.storages) total = aligned(total, kStorageAlignment) + spec.bytes;
  return static_cast<std::size_t>(total);
}

std::shared_ptr<const SyncPlan> compile(const WeightIndex& index, const PlanGeometry& geometry, const StorageTable& table,
                                        std::vector<wire::ManifestEntry> entries) {
  const Digest digest = digest_of(wire::encode_entries(entries));
  PlanOptions options;
  options.scopes = index.scopes();
  options.check_coverage = true;
  std::vector<SenderPart> parts;
  parts.push_back({"bench", digest, std::move(entries)});
  SyncPlan::Outcome outcome = SyncPlan::compile(index, geometry, table.digest(), std::move(parts), options);
  if (outcome.plan == nullptr) throw Error(wire::to_status(outcome.defects.front()));
  return std::move(outcome.plan);
}

}  // namespace

StorageBlock::StorageBlock(const ModelLayout& layout, std::span<std::byte> bytes)
    : bytes_(bytes), table_(std::make_unique<StorageTable>()) {
  std::int64_t offset = 0;
  for (const StorageSpec& spec : layout.storages) {
    offset = aligned(offset, kStorageAlignment);
    Storage storage;
    storage.name = spec.name;
    storage.dtype = spec.dtype;
    storage.shape = spec.shape;
    storage.strides = spec.strides;
    storage.address = bytes.data() + offset;
    storage.bytes = spec.bytes;
    storage.owners = spec.owners;
    table_->add(std::move(storage)).value_or_throw();
    offset += spec.bytes;
  }
  throw_if_error(table_->seal());
}

StorageBlock StorageBlock::allocate(const ModelLayout& layout, Device& device) {
  std::unique_ptr<DeviceMemory> memory =
      device.allocate({.bytes = block_bytes(layout), .exportable = false, .touch = true, .label = "bench-live"}).value_or_throw();
  StorageBlock block(layout, memory->bytes());
  block.memory_ = std::move(memory);
  return block;
}

StorageBlock StorageBlock::reserve(const ModelLayout& layout) {
  const std::size_t bytes = block_bytes(layout);
  void* address = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw Error(errno_status(errno, "reserve addresses for " + std::to_string(bytes) + " bytes of storage"));
  MappedRegion region(address, bytes);
  StorageBlock block(layout, region.bytes());
  block.region_ = std::move(region);
  return block;
}

std::vector<StorageLocation> StorageBlock::locations() const {
  std::vector<StorageLocation> present;
  for (std::uint32_t i = 0; i < table_->size(); ++i) {
    const Storage& storage = table_->at(StorageId{i});
    present.push_back({StorageId{i}, storage.address, storage.bytes});
  }
  return present;
}

std::vector<StagedBucket> fill_buckets(const BucketPlan& plan, std::span<const wire::ManifestEntry> entries, std::int64_t bucket_bytes) {
  std::vector<StagedBucket> buckets;
  for (std::uint32_t e = 0; e < entries.size(); ++e) {
    const BucketPlan::Entry& entry = plan.entries[e];
    for (std::uint32_t c = entry.first_cell; c < entry.first_cell + entry.cell_count; ++c) {
      const std::int64_t bytes = plan.cells[c].box.elements() * dtype_bytes(entries[e].dtype);
      if (buckets.empty() || aligned(buckets.back().bytes, kCellAlignment) + bytes > bucket_bytes) buckets.emplace_back();
      StagedBucket& bucket = buckets.back();
      const std::int64_t offset = aligned(bucket.bytes, kCellAlignment);
      bucket.cells.push_back({e, c, offset, bytes});
      bucket.bytes = offset + bytes;
    }
  }
  return buckets;
}

std::vector<wire::Wanted> wanted_by(const ModelLayout& layout, const StorageBlock& storage, std::span<const wire::ManifestEntry> entries) {
  const WeightIndex index(layout);
  const PlanGeometry geometry = PlanGeometry::build(index, storage.table()).value_or_throw();
  return compile(index, geometry, storage.table(), {entries.begin(), entries.end()})->accept_for(0).wanted;
}

PlannedUpdate::PlannedUpdate(ModelLayout layout, const StorageBlock& storage, std::vector<wire::ManifestEntry> entries,
                             std::int64_t bucket_bytes)
    : index_(std::make_unique<WeightIndex>(std::move(layout))),
      geometry_(std::make_unique<PlanGeometry>(PlanGeometry::build(*index_, storage.table()).value_or_throw())),
      plan_(compile(*index_, *geometry_, storage.table(), std::move(entries))) {
  const std::vector<wire::Wanted> wanted = plan_->accept_for(0).wanted;
  const std::array<std::span<const wire::Wanted>, 1> answers{wanted};
  const std::array<std::string, 1> receivers{"rank"};
  bucket_plan_ = make_bucket_plan({.entries = this->entries(),
                                   .wanted = answers,
                                   .receivers = receivers,
                                   .bucket_bytes_max = bucket_bytes,
                                   .unwanted = Unwanted::kAllow})
                     .value_or_throw();
  buckets_ = fill_buckets(bucket_plan_, this->entries(), bucket_bytes);
  for (const StagedBucket& bucket : buckets_)
    for (const StagedCell& cell : bucket.cells) wanted_bytes_ += cell.bytes;
}

void PlannedUpdate::append_jobs(const StagedBucket& bucket, const std::byte* staging, std::vector<SyncPlan::KeyedJob>& jobs) const {
  const std::span<const PlanEntry> planned = plan_->entries(0);
  const std::span<const PlanTensor> tensors = plan_->tensors();
  for (const StagedCell& cell : bucket.cells) {
    const PlanTensor& tensor = tensors[static_cast<std::size_t>(planned[cell.entry].tensor)];
    throw_if_error(plan_->append_jobs(tensor, bucket_plan_.cells[cell.cell].box, staging + cell.offset, {}, jobs));
  }
}

CopyStats BucketApplier::apply(std::span<const SyncPlan::KeyedJob> jobs) {
  batch_.clear();
  make_batch(jobs, runs_, batch_);
  return executor_.run(batch_);
}

}  // namespace headrace::bench
