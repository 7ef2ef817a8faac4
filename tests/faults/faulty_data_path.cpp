#include "tests/faults/faulty_data_path.h"

#include <fmt/format.h>

#include <utility>

namespace headrace {

Status FaultySource::failure(std::size_t bytes) {
  switch (faults_.next()) {
    case Fault::kFail:
    case Fault::kDrop:
      return Status(Code::kResourceExhausted, fmt::format("allocate {} bytes: none left ({})", bytes, faults_.plan().describe()));
    case Fault::kDie: return Status(Code::kDeviceLost, fmt::format("allocate {} bytes: dead ({})", bytes, faults_.plan().describe()));
    case Fault::kNone:
    case Fault::kDuplicate:
    case Fault::kCorrupt:
    case Fault::kDelay: return ok_status();
  }
  return ok_status();
}

Result<MemoryId> FaultySource::allocate(std::size_t bytes) {
  HEADRACE_RETURN_IF_ERROR(failure(bytes));
  return inner_->allocate(bytes);
}

Result<MemoryId> FaultySource::adopt(UniqueFd descriptor, std::size_t bytes) {
  HEADRACE_RETURN_IF_ERROR(failure(bytes));
  return inner_->adopt(std::move(descriptor), bytes);
}

std::span<const std::byte> FaultySource::attachment(MemoryId memory, std::size_t used) const {
  const auto bytes = inner_->attachment(memory, used);
  if (bytes.empty()) return bytes;
  const Fault fault = faults_.next();
  if (fault == Fault::kDrop) return bytes.first(bytes.size() - 1);
  if (fault != Fault::kCorrupt) return bytes;
  changed_.assign(bytes.begin(), bytes.end());
  faults_.corrupt(changed_);
  return changed_;
}

Status FaultySink::attach(MemoryId memory, std::uint64_t bytes, UniqueFd descriptor) {
  const Fault fault = faults_.next();
  if (fault == Fault::kFail || fault == Fault::kDrop) {
    return Status(Code::kResourceExhausted, fmt::format("attach memory {:#x}: no room ({})", memory.value, faults_.plan().describe()));
  }
  if (fault == Fault::kDie) {
    return Status(Code::kDeviceLost, fmt::format("attach memory {:#x}: dead ({})", memory.value, faults_.plan().describe()));
  }
  return inner_->attach(memory, bytes, std::move(descriptor));
}

Result<std::span<const std::byte>> FaultySink::resolve(MemoryId memory, std::span<const std::byte> attachment) const {
  auto bytes = inner_->resolve(memory, attachment);
  if (!bytes.ok() || bytes.value().empty()) return bytes;
  switch (faults_.next()) {
    case Fault::kDrop: return bytes.value().first(bytes.value().size() - 1);
    case Fault::kCorrupt: {
      changed_.push_back(std::make_unique<std::vector<std::byte>>(bytes.value().begin(), bytes.value().end()));
      faults_.corrupt(*changed_.back());
      return std::span<const std::byte>(*changed_.back());
    }
    case Fault::kFail:
    case Fault::kDie:
      return Status(Code::kDeviceLost, fmt::format("read memory {:#x}: dead ({})", memory.value, faults_.plan().describe()));
    case Fault::kNone:
    case Fault::kDuplicate:
    case Fault::kDelay: break;
  }
  return bytes;
}

}  // namespace headrace
