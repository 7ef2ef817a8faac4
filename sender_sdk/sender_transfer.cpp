#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "core/wire/codec.h"
#include "sender_sdk/sender_impl.h"

namespace headrace {
namespace {

constexpr std::size_t kAsyncQueueMax = 1'024;  // tensors waiting for the packing thread; more make add_async() wait
constexpr std::size_t kMissingNamesTold = 10;

const std::byte* at(const std::byte* data, const Box& from, const Box& box, std::span<const std::int64_t> strides) {
  for (std::size_t d = 0; d < box.rank(); ++d) data += (box.lo[d] - from.lo[d]) * strides[d];
  return data;
}

/// Bytes from the first to behind the last element of a view.
std::optional<std::int64_t> reach_of(const Box& box, std::span<const std::int64_t> strides, std::int64_t elem_bytes) {
  std::int64_t reach = elem_bytes;
  for (std::size_t d = 0; d < box.rank(); ++d) {
    std::int64_t step = 0;
    if (__builtin_mul_overflow(box.hi[d] - box.lo[d] - 1, strides[d], &step) || __builtin_add_overflow(reach, step, &reach))
      return std::nullopt;
  }
  return reach;
}

}  // namespace

Result<SenderImpl::Job> SenderImpl::admit(std::string_view name, const TensorView& view) {
  {
    const std::lock_guard lock(mutex_);
    HEADRACE_RETURN_IF_ERROR(outcome());
    if (phase_ != Phase::kTransfer) return Status(Code::kFailedPrecondition, "add: the update does not take tensors now");
  }
  const auto entry = entries_.find(name, next_entry_);
  if (!entry) return Status(Code::kInvalidArgument, fmt::format("add: tensor {} is not an entry of this update", name));
  if (added_[*entry]) return Status(Code::kInvalidArgument, fmt::format("add: tensor {} has been added already", name));
  const wire::ManifestEntry& known = entries_.entries()[*entry];
  if (!view.strides.empty() && view.strides.size() != known.shape.size()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("add: tensor {}: {} strides for shape {}", known.name, view.strides.size(), to_string(known.shape)));
  }
  Job job{*entry, static_cast<const std::byte*>(view.data), {{}, known.shape.size()}, nullptr};
  std::copy(view.strides.begin(), view.strides.end(), job.strides.bytes.begin());
  std::int64_t packed = dtype_bytes(known.dtype);
  for (std::size_t d = view.strides.empty() ? known.shape.size() : 0; d-- > 0;) {
    job.strides.bytes[d] = packed;
    packed *= known.box.hi[d] - known.box.lo[d];
  }
  HEADRACE_RETURN_IF_ERROR(check_view(known, job));
  if (const Status status = groups_.check(*entry); !status.ok())
    return Status(status.code(), fmt::format("add: tensor {}: {}", name, status.message()));
  if (!transfer_started_) phase_ns_ = environment_.clock->now_ns();
  transfer_started_ = true;
  next_entry_ = std::size_t{*entry} + 1;
  return job;
}

Status SenderImpl::check_view(const wire::ManifestEntry& known, const Job& job) {
  const auto refused = [&](std::string_view why) {
    return Status(Code::kInvalidArgument, fmt::format("add: tensor {}: {}", known.name, why));
  };
  if (known.box.empty()) return ok_status();
  if (job.data == nullptr) return refused("no data");
  const auto strides = job.strides.span();
  if (std::any_of(strides.begin(), strides.end(), [](std::int64_t stride) { return stride < 0; })) {
    return refused(fmt::format("strides {}: negative ones are not supported", to_string(strides)));
  }
  if (!reach_of(known.box, strides, dtype_bytes(known.dtype))) {
    return refused(fmt::format("strides {} reach beyond any memory", to_string(strides)));
  }
  return ok_status();
}

Status SenderImpl::add(std::string_view name, const TensorView& view) {
  auto job = admit(name, view);
  if (!job.ok()) return job.status();
  // What waits in the queue comes first where the order of entries matters.
  if (!groups_.empty()) HEADRACE_RETURN_IF_ERROR(drain_packing());
  const std::lock_guard packing(pack_mutex_);
  if (Status status = pack(job.value()); !status.ok()) return fail_here(status);
  added_[job.value().entry] = true;
  groups_.take(job.value().entry);
  return ok_status();
}

Status SenderImpl::add_async(std::string_view name, TensorView view, std::function<void(const Status&)> released) {
  auto release = std::make_shared<ReleaseOnce>(std::move(released));
  auto admitted = admit(name, view);
  Status status = admitted.status();
  if (status.ok()) {
    Job job = std::move(admitted).value();
    job.release = release;
    added_[job.entry] = true;
    groups_.take(job.entry);
    Lock lock(mutex_);
    status = start_packing_thread();
    // Progress of the packing thread is watched where it waits itself.
    if (status.ok()) sleep(lock, [&] { return queue_.size() < kAsyncQueueMax || failure_; });
    if (status.ok()) status = outcome();
    if (status.ok()) queue_.push_back(std::move(job));
    wake_sleepers();
  }
  if (!status.ok()) release->fail(status);
  return status;
}

Status SenderImpl::start_packing_thread() {
  if (packing_thread_.joinable()) return ok_status();
  try {
    packing_thread_ = std::thread([this] { run_packing_thread(); });
  } catch (const std::system_error& error) {
    return Status(Code::kResourceExhausted, fmt::format("add_async: start the packing thread: {}", error.what()));
  }
  return ok_status();
}

void SenderImpl::run_packing_thread() {
  Lock lock(mutex_);
  while (true) {
    sleep(lock, [&] { return !queue_.empty() || stop_packing_; });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    packing_ = true;
    lock.unlock();
    Status status;
    {
      const std::lock_guard packing(pack_mutex_);
      status = pack(job);
    }
    if (!status.ok()) {
      status = fail_here(status);
      job.release->fail(status);
    }
    job.release.reset();
    lock.lock();
    packing_ = false;
    wake_sleepers();
  }
}

const SenderImpl::Registered* SenderImpl::registered_at(const Job& job) const {
  const wire::ManifestEntry& entry = entries_.entries()[job.entry];
  const std::int64_t reach = *reach_of(entry.box, job.strides.span(), dtype_bytes(entry.dtype));
  for (const Registered& each : registered_) {
    const std::byte* end = each.bytes.data() + each.bytes.size();
    if (job.data < each.bytes.data() || job.data >= end) continue;
    return reach <= end - job.data ? &each : nullptr;
  }
  return nullptr;
}

Status SenderImpl::pack(const Job& job) {
  const wire::ManifestEntry& entry = entries_.entries()[job.entry];
  for (const Cell& cell : plan_->cells_of(job.entry)) {
    CellSource source;
    source.key = entries_.key(job.entry);
    source.elem_bytes = dtype_bytes(entry.dtype);
    source.shape = entry.shape;
    source.box = &cell.box;
    source.data = at(job.data, entry.box, cell.box, job.strides.span());
    source.strides = job.strides.span();
    HEADRACE_RETURN_IF_ERROR(pack_cell(job, source, cell));
    progress_.fetch_add(1, std::memory_order_relaxed);
  }
  progress_.fetch_add(1, std::memory_order_relaxed);
  return ok_status();
}

Status SenderImpl::pack_cell(const Job& job, const CellSource& source, const Cell& cell) {
  const std::int64_t bytes = cell.box.elements() * source.elem_bytes;
  HEADRACE_RETURN_IF_ERROR(make_room(bytes));
  const Registered* registered = readable_in_place(source) ? registered_at(job) : nullptr;
  if (registered != nullptr) {
    // A dimension of one element has no step; the packed one is as good as any and lets packed cells be recognised.
    const std::vector<std::int64_t> packed = packed_strides(cell.box.shape(), source.elem_bytes);
    std::vector<std::int64_t> strides(source.strides.begin(), source.strides.end());
    for (std::size_t d = 0; d < strides.size(); ++d) {
      if (cell.box.hi[d] - cell.box.lo[d] == 1) strides[d] = packed[d];
    }
    if (strides == packed) strides.clear();
    const FingerprintSum sum = packer_.sum(source);
    filler_.add_in_place(job.entry, cell, bytes, registered->memory, source.data - registered->bytes.data(), std::move(strides), sum);
    const std::lock_guard lock(mutex_);
    HEADRACE_RETURN_IF_ERROR(outcome());
    if (job.release) pool_.slots()[filler_.slot()].releases.push_back(job.release);
    return ok_status();
  }
  HEADRACE_RETURN_IF_ERROR(ensure_staging());
  StagingPool::Slot& slot = pool_.slots()[filler_.slot()];
  const std::int64_t offset = filler_.reserve(bytes);
  const FingerprintSum sum = packer_.pack(source, slot.bytes.data() + offset);
  filler_.add_packed(job.entry, cell, bytes, slot.memory, offset, sum);
  return ok_status();
}

Status SenderImpl::make_room(std::int64_t bytes) {
  if (filler_.open() && filler_.fits(bytes)) {
    const std::lock_guard lock(mutex_);
    return outcome();
  }
  const bool full = filler_.open();
  if (full) HEADRACE_RETURN_IF_ERROR(send_bucket());
  Lock lock(mutex_);
  if (full) send_queued(lock);
  HEADRACE_RETURN_IF_ERROR(wait(
      lock, true, "CONSUMED", [&] { return pool_.has_free(); },
      [](const ReceiverFlow& receiver) { return receiver.waiting_bucket() < 0; }));
  filler_.begin_bucket(*pool_.take());
  return ok_status();
}

Status SenderImpl::send_bucket() {
  const std::uint32_t slot = filler_.slot();
  const std::size_t used = filler_.used();
  const auto attachment = used != 0 ? source_->attachment(pool_.slots()[slot].memory, used) : std::span<const std::byte>();
  const std::lock_guard lock(mutex_);
  HEADRACE_RETURN_IF_ERROR(outcome());
  pool_.sent(slot, filler_.close_bucket(flow_, attachment));
  return ok_status();
}

Status SenderImpl::drain_packing() {
  Lock lock(mutex_);
  // The packing thread keeps the deadline: it fails the update when it gets no buffer.
  sleep(lock, [&] { return (queue_.empty() && !packing_) || failure_; });
  return outcome();
}

Result<UpdateReport> SenderImpl::finish() {
  {
    const std::lock_guard lock(mutex_);
    HEADRACE_RETURN_IF_ERROR(outcome());
  }
  std::string missing;
  std::size_t count = 0;
  for (std::size_t e = 0; e < added_.size(); ++e) {
    if (added_[e] || ++count > kMissingNamesTold) continue;
    missing += fmt::format("{}{}", missing.empty() ? "" : ", ", entries_.entries()[e].name);
  }
  if (count != 0) {
    return Status(Code::kInvalidArgument, fmt::format("finish: {} of {} entries were not added: {}{}", count, added_.size(), missing,
                                                      count > kMissingNamesTold ? ", ..." : ""));
  }
  HEADRACE_RETURN_IF_ERROR(drain_packing());
  HEADRACE_RETURN_IF_ERROR(end_transfer());
  return commit();
}

Status SenderImpl::end_transfer() {
  const std::lock_guard packing(pack_mutex_);
  if (filler_.open()) HEADRACE_RETURN_IF_ERROR(send_bucket());
  Lock lock(mutex_);
  HEADRACE_RETURN_IF_ERROR(outcome());
  for (std::size_t r = 0; r < receivers_.size(); ++r) {
    auto sums = options_.fingerprints ? filler_.fingerprints(r) : std::vector<wire::EntryFingerprint>();
    flow_.push(r, wire::End{flow_.receivers()[r].next_sequence, std::move(sums)});
  }
  phase_ = Phase::kEnd;
  send_queued(lock);
  return ok_status();
}

SenderImpl::Due SenderImpl::due_after_end() const {
  if (phase_ == Phase::kEnd) return {"CONSUMED", [](const ReceiverFlow& receiver) { return receiver.outbox.empty(); }};
  if (phase_ == Phase::kPrepare) {
    return {"PREPARED", [](const ReceiverFlow& receiver) { return receiver.prepared || receiver.committed; }};
  }
  return {"COMMITTED", [](const ReceiverFlow& receiver) { return receiver.committed.has_value(); }};
}

Result<UpdateReport> SenderImpl::commit() {
  Lock lock(mutex_);
  HEADRACE_RETURN_IF_ERROR(wait_for(
      lock, true, [&] { return due_after_end(); },
      [&] { return all_receivers([](const ReceiverFlow& receiver) { return receiver.committed.has_value(); }); }));
  phases_.commit = ms_since(phase_ns_);
  for (Answer& answer : answers_) answer.committed = true;
  UpdateReport report = make_report();
  flow_.end();
  pool_.reset(dropped_);
  drop_released(lock);
  return report;
}

UpdateReport SenderImpl::make_report() const {
  UpdateReport report;
  report.version = version_;
  report.session = flow_.session().value;
  report.data_path = data_path_name(path_);
  report.wire_bytes = filler_.wire_bytes();
  report.registered_bytes = filler_.in_place_bytes();
  report.buckets = filler_.buckets();
  report.phases_ms = phases_;
  report.total_ms = ms_since(opened_ns_);
  report.proven = options_.fingerprints;
  for (std::size_t e = 0; e < entries_.entries().size(); ++e) {
    if (!std::all_of(wanted_.begin(), wanted_.end(), [e](const auto& wanted) { return wanted[e].ignored; })) continue;
    if (report.ignored++ < kIgnoredNamesMax) report.ignored_names.push_back(entries_.entries()[e].name);
  }
  for (const ReceiverFlow& receiver : flow_.receivers()) {
    report.receipts.push_back(*receiver.committed);
    report.applied_bytes += receiver.committed->applied_bytes;
    report.proven = report.proven && receiver.committed->proven;
  }
  return report;
}

void SenderImpl::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  wire::Failure failure = wire::make_failure(Status(Code::kCancelled, reason.empty() ? "the sender gave the update up" : reason), "");
  failure.sender = options_.sender;
  fail(std::move(failure));
}

}  // namespace headrace
