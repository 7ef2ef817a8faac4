#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/transport/data_path.h"
#include "tests/faults/fault_plan.h"

namespace headrace {

/// A sender's memory with faults: allocate() and adopt() are steps and fail (kFail, kDrop) or die; attachment() is a step whose bytes are
/// corrupted (kCorrupt) or missing at the end (kDrop). One thread.
class FaultySource final : public DataSource {
 public:
  FaultySource(std::unique_ptr<DataSource> inner, const FaultPlan& plan) : inner_(std::move(inner)), faults_(plan) {}

  DataPathKind kind() const noexcept override { return inner_->kind(); }
  Result<MemoryId> allocate(std::size_t bytes) override;
  Result<MemoryId> adopt(UniqueFd descriptor, std::size_t bytes) override;
  std::span<std::byte> bytes(MemoryId memory) const override { return inner_->bytes(memory); }
  int descriptor(MemoryId memory) const override { return inner_->descriptor(memory); }
  std::span<const std::byte> attachment(MemoryId memory, std::size_t used) const override;
  void release(MemoryId memory) override { inner_->release(memory); }

 private:
  Status failure(std::size_t bytes);

  std::unique_ptr<DataSource> inner_;
  mutable FaultInjector faults_;
  mutable std::vector<std::byte> changed_;
};

/// A receiver's view of memory with faults: attach() is a step and fails or dies; resolve() is a step that fails, or whose bytes are
/// corrupted (kCorrupt) or missing at the end (kDrop). What it gave out stays readable as long as the sink lives. One thread.
class FaultySink final : public DataSink {
 public:
  FaultySink(std::unique_ptr<DataSink> inner, const FaultPlan& plan) : inner_(std::move(inner)), faults_(plan) {}

  DataPathKind kind() const noexcept override { return inner_->kind(); }
  Status attach(MemoryId memory, std::uint64_t bytes, UniqueFd descriptor) override;
  void detach(MemoryId memory) override { inner_->detach(memory); }
  Result<std::span<const std::byte>> resolve(MemoryId memory, std::span<const std::byte> attachment) const override;

 private:
  std::unique_ptr<DataSink> inner_;
  mutable FaultInjector faults_;
  mutable std::vector<std::unique_ptr<std::vector<std::byte>>> changed_;
};

}  // namespace headrace
