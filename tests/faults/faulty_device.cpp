#include "tests/faults/faulty_device.h"

#include <fmt/format.h>

#include <utility>

namespace headrace {

class FaultyDevice::FaultyStream final : public Stream {
 public:
  FaultyStream(FaultyDevice& device, std::unique_ptr<Stream> inner) : device_(device), inner_(std::move(inner)) {}

  Status enqueue(std::function<void()> work) override {
    auto fault = device_.step("enqueue work");
    if (!fault.ok()) return fault.status();
    if (fault.value() == Fault::kDelay) HEADRACE_RETURN_IF_ERROR(inner_->wait(device_.gate()));
    return inner_->enqueue(std::move(work));
  }
  Result<std::shared_ptr<Event>> record() override { return inner_->record(); }
  Status wait(std::shared_ptr<Event> event) override { return inner_->wait(std::move(event)); }
  Status synchronize(std::int64_t timeout_ms) override { return inner_->synchronize(timeout_ms); }

 private:
  FaultyDevice& device_;
  std::unique_ptr<Stream> inner_;
};

FaultyDevice::FaultyDevice(std::unique_ptr<Device> inner, const FaultPlan& plan)
    : inner_(std::move(inner)), faults_(plan), gate_(std::make_shared<HostEvent>()) {}

FaultyDevice::~FaultyDevice() {
  release_delayed();
}

Result<Fault> FaultyDevice::step(const std::string& what) {
  const std::lock_guard lock(mutex_);
  const Fault fault = faults_.next();
  if (fault == Fault::kFail || fault == Fault::kDrop) {
    return Status(Code::kResourceExhausted, fmt::format("{}: nothing left ({})", what, faults_.plan().describe()));
  }
  if (fault == Fault::kDie) return Status(Code::kDeviceLost, fmt::format("{}: dead ({})", what, faults_.plan().describe()));
  return fault;
}

std::shared_ptr<HostEvent> FaultyDevice::gate() {
  const std::lock_guard lock(mutex_);
  return gate_;
}

void FaultyDevice::release_delayed() {
  const std::lock_guard lock(mutex_);
  gate_->finish(ok_status());
  gate_ = std::make_shared<HostEvent>();
}

Result<std::unique_ptr<DeviceMemory>> FaultyDevice::allocate(const AllocateOptions& options) {
  auto fault = step(fmt::format("allocate {} bytes", options.bytes));
  if (!fault.ok()) return fault.status();
  return inner_->allocate(options);
}

Result<UniqueFd> FaultyDevice::export_memory(const DeviceMemory& memory) {
  auto fault = step(fmt::format("export {} bytes", memory.size()));
  if (!fault.ok()) return fault.status();
  return inner_->export_memory(memory);
}

Result<std::unique_ptr<DeviceMemory>> FaultyDevice::import_memory(UniqueFd descriptor, std::size_t bytes) {
  auto fault = step(fmt::format("import {} bytes", bytes));
  if (!fault.ok()) return fault.status();
  return inner_->import_memory(std::move(descriptor), bytes);
}

Result<std::unique_ptr<Stream>> FaultyDevice::create_stream(std::string label) {
  auto stream = inner_->create_stream(std::move(label));
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<Stream>(std::make_unique<FaultyStream>(*this, std::move(stream).value()));
}

}  // namespace headrace
