#include "benchmarks/bare_pipeline.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>
#include <utility>

#include "benchmarks/measure.h"
#include "benchmarks/v41_model.h"
#include "core/wire/limits.h"
#include "receiver/applier.h"

namespace headrace::bench {
namespace {

constexpr std::size_t kStagingBuffers = limits::kStagingBuffersDefault;
constexpr std::int64_t kAlignment = 64;

/// Bytes from the first element of a tensor to that of a box of it.
std::int64_t offset_of(const wire::ManifestEntry& entry, const Box& box) {
  const std::vector<std::int64_t> strides = packed_strides(entry.shape, dtype_bytes(entry.dtype));
  std::int64_t offset = 0;
  for (std::size_t d = 0; d < strides.size(); ++d) offset += box.lo[d] * strides[d];
  return offset;
}

std::string sum_text(const FingerprintSum& sum) {
  return fmt::format("{:016x}{:016x}", sum.lanes[0], sum.lanes[1]);
}

}  // namespace

SourceMap::SourceMap(std::span<const wire::ManifestEntry> entries) {
  for (const wire::ManifestEntry& entry : entries) {
    offsets.push_back(bytes);
    bytes = (bytes + entry_bytes(entry) + kAlignment - 1) / kAlignment * kAlignment;
  }
}

std::string BareReceiver::answer(const std::string& question, const PacketChannel& channel) {
  std::istringstream words(question);
  std::string verb;
  words >> verb;
  if (verb == "prepare") {
    std::int64_t bucket_bytes = 0;
    words >> bucket_bytes;
    update_ = std::make_unique<PlannedUpdate>(layout_, *storage_, sender_order(layout_, 1, false), bucket_bytes);
    map_.emplace(update_->entries());
    return "ok";
  }
  if (verb == "attach") {
    int pid = 0;
    int descriptor = -1;
    std::size_t bytes = 0;
    words >> pid >> descriptor >> bytes;
    const std::string path = fmt::format("/proc/{}/fd/{}", pid, descriptor);
    UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!file.valid()) throw Error(errno_status(errno, "open " + path));
    memories_.push_back(device_->import_memory(std::move(file), bytes).value_or_throw());
    return "ok";
  }
  if (verb != "packed" && verb != "in_place") throw Error(Status(Code::kInvalidArgument, "unknown question " + question));
  bool with_sums = false;
  words >> with_sums;
  for (std::size_t b = 0; b < update_->buckets().size(); ++b) {
    if (channel.receive().empty()) throw Error(Status(Code::kUnavailable, "the sender has gone"));
    apply(update_->buckets()[b], b, verb == "in_place");
    channel.send("consumed");
  }
  return with_sums ? sum_text(read_back()) : "done";
}

void BareReceiver::apply(const StagedBucket& bucket, std::size_t number, bool in_place) {
  jobs_.clear();
  if (!in_place) {
    update_->append_jobs(bucket, memories_[number % kStagingBuffers]->data(), jobs_);
  } else {
    const std::byte* source = memories_.back()->data();
    const std::span<const PlanEntry> planned = update_->plan().entries(0);
    for (const StagedCell& cell : bucket.cells) {
      const wire::ManifestEntry& entry = update_->entries()[cell.entry];
      const Box& box = update_->bucket_plan().cells[cell.cell].box;
      const std::vector<std::int64_t> strides =
          box == entry.box ? std::vector<std::int64_t>{} : packed_strides(entry.shape, dtype_bytes(entry.dtype));
      throw_if_error(update_->plan().append_jobs(update_->plan().tensors()[static_cast<std::size_t>(planned[cell.entry].tensor)], box,
                                                 source + map_->offsets[cell.entry] + offset_of(entry, box), strides, jobs_));
    }
  }
  applier_.apply(jobs_);
}

FingerprintSum BareReceiver::read_back() const {
  FingerprintSum total;
  const SyncPlan& plan = update_->plan();
  for (const PlanTensor& tensor : plan.tensors()) {
    for (const Box& box : plan.geometry().of(tensor.rule).boxes) {
      total += live_fingerprint(plan.index().rule(tensor.rule), plan.geometry(), tensor.slots, tensor.key, box).sum;
    }
  }
  return total;
}

BareSender::BareSender(const std::string& model, const ReceiverProcess& receiver, Device& device)
    : channel_(&receiver.channel()),
      storage_(StorageBlock::reserve(e2e_layout(model, 1, 0))),
      update_([&] {
        ModelLayout layout = e2e_layout(model, 1, 0);
        std::vector<wire::ManifestEntry> entries = sender_order(layout, 1, false);
        return std::make_unique<PlannedUpdate>(std::move(layout), storage_, std::move(entries), limits::kBucketBytesDefault);
      }()),
      map_(update_->entries()) {
  channel_->ask(fmt::format("prepare {}", limits::kBucketBytesDefault));
  for (std::size_t i = 0; i < kStagingBuffers; ++i) {
    const auto bytes = static_cast<std::size_t>(limits::kBucketBytesDefault);
    staging_.push_back(device.allocate({.bytes = bytes, .exportable = true, .touch = true, .label = "bench-staging"}).value_or_throw());
    descriptors_.push_back(device.export_memory(*staging_.back()).value_or_throw());
    attach_source(descriptors_.back().get(), bytes);
  }
}

void BareSender::attach_source(int descriptor, std::size_t bytes) {
  channel_->ask(fmt::format("attach {} {} {}", ::getpid(), descriptor, bytes));
}

double BareSender::run(std::span<const std::byte> source, bool in_place, bool fingerprints) {
  Packer packer(1, fingerprints);
  FingerprintSum sent;
  std::string end;
  const double seconds = seconds_of([&] {
    channel_->send(fmt::format("{} {:d}", in_place ? "in_place" : "packed", fingerprints));
    std::size_t consumed = 0;
    const std::vector<StagedBucket>& buckets = update_->buckets();
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      for (; b >= consumed + kStagingBuffers; ++consumed) channel_->receive();
      sent += take(packer, buckets[b], source, in_place ? nullptr : staging_[b % kStagingBuffers]->data());
      channel_->send("bucket");
    }
    for (; consumed < buckets.size(); ++consumed) channel_->receive();
    end = channel_->receive();
  });
  if (end != (fingerprints ? sum_text(sent) : "done")) {
    throw Error(Status(Code::kCorruption, fmt::format("the bare pipeline: {} was sent, the receiver has {}", sum_text(sent), end)));
  }
  return seconds;
}

FingerprintSum BareSender::take(Packer& packer, const StagedBucket& bucket, std::span<const std::byte> source, std::byte* staging) const {
  FingerprintSum sum;
  for (const StagedCell& cell : bucket.cells) {
    const wire::ManifestEntry& entry = update_->entries()[cell.entry];
    const Box& box = update_->bucket_plan().cells[cell.cell].box;
    const std::vector<std::int64_t> strides = packed_strides(entry.shape, dtype_bytes(entry.dtype));
    const CellSource cell_source{tensor_key(entry.name, entry.dtype, entry.shape),
                                 dtype_bytes(entry.dtype),
                                 entry.shape,
                                 &box,
                                 source.data() + map_.offsets[cell.entry] + offset_of(entry, box),
                                 strides};
    sum += staging != nullptr ? packer.pack(cell_source, staging + cell.offset) : packer.sum(cell_source);
  }
  return sum;
}

}  // namespace headrace::bench
