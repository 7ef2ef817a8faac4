#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "core/device/device.h"
#include "core/device/host_stream.h"
#include "tests/faults/fault_plan.h"

namespace headrace {

/// A device with faults. allocate(), export, import and each enqueue are steps: kFail and kDrop make memory calls fail and enqueues be
/// refused, kDelay makes a stream stand still from that enqueue on until release_delayed(), after its death everything is kDeviceLost.
/// Its streams must not outlive it. Any thread.
class FaultyDevice final : public Device {
 public:
  FaultyDevice(std::unique_ptr<Device> inner, const FaultPlan& plan);
  /// Lets delayed streams go.
  ~FaultyDevice() override;

  const DeviceIdentity& identity() const noexcept override { return inner_->identity(); }
  Result<std::unique_ptr<DeviceMemory>> allocate(const AllocateOptions& options) override;
  Result<UniqueFd> export_memory(const DeviceMemory& memory) override;
  Result<std::unique_ptr<DeviceMemory>> import_memory(UniqueFd descriptor, std::size_t bytes) override;
  Result<std::unique_ptr<Stream>> create_stream(std::string label) override;

  /// Delayed streams go on; the next delay holds anew.
  void release_delayed();

 private:
  class FaultyStream;

  /// Not ok when this step is to fail; otherwise its fault.
  Result<Fault> step(const std::string& what);
  std::shared_ptr<HostEvent> gate();

  std::unique_ptr<Device> inner_;
  std::mutex mutex_;
  FaultInjector faults_;             // guarded by mutex_
  std::shared_ptr<HostEvent> gate_;  // guarded by mutex_; shared with the streams that wait for it
};

}  // namespace headrace
