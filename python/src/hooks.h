#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/device/device.h"
#include "receiver/receiver.h"

namespace headrace::python {

class PyTable;

/// A device whose memory can outlive those that took it, for views of it that Python keeps.
class LeasingDevice final : public Device {
 public:
  LeasingDevice() : inner_(make_host_device()) {}
  const DeviceIdentity& identity() const noexcept override { return inner_->identity(); }
  Result<std::unique_ptr<DeviceMemory>> allocate(const AllocateOptions& options) override;
  Result<UniqueFd> export_memory(const DeviceMemory& memory) override;
  Result<std::unique_ptr<DeviceMemory>> import_memory(UniqueFd descriptor, std::size_t bytes) override;
  Result<std::unique_ptr<Stream>> create_stream(std::string label) override { return inner_->create_stream(std::move(label)); }
  /// Shared ownership of the memory that `address` lies in; null for memory of others.
  std::shared_ptr<const DeviceMemory> owner_of(const std::byte* address) const;

 private:
  std::unique_ptr<Device> inner_;
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<const DeviceMemory>> memories_;  // guarded by mutex_; those of allocate()
};

/// The engine's hooks as Python callables. They are called on the apply thread, with the GIL; what they raise becomes a Status, and the
/// last exception of this session is kept until take_cause(). Everything here but the calls themselves needs the GIL.
class PyHooks {
 public:
  /// `hooks` is a dict by the names of EngineHooks, without what is None; `staged` one by hook.
  PyHooks(const nanobind::dict& hooks, const nanobind::dict& staged, nanobind::object table, const LeasingDevice& device);
  /// The calls hold a pointer to this.
  EngineHooks engine_hooks();
  nanobind::object take_cause();
  /// The same, which stays, where this failure says what it said: one of another session may be told of later.
  nanobind::handle cause_of(const Status& failure) const;
  /// kFailedPrecondition where live storage is not where it was sealed: engines give memory back while they sleep.
  Status check_places();
  /// Whether this thread is in one of them.
  bool running_here() const noexcept { return running_.load() == std::this_thread::get_id(); }

 private:
  class Running;
  Status call(const char* name);
  Status call_staged(const std::string& hook, const StagedCall& call);
  std::vector<StorageLocation> locate();
  std::vector<StorageLocation> locate_here();
  std::vector<std::vector<std::int32_t>> expert_map();
  std::map<std::string, double> launch_constants();
  Status keep(nanobind::python_error& error, const std::string& what);

  nanobind::dict hooks_;
  nanobind::dict staged_;
  nanobind::object table_object_;
  const PyTable* table_;
  const LeasingDevice* device_;
  nanobind::object cause_;
  std::string cause_text_;
  std::atomic<std::thread::id> running_;
};

void init_hooks(nanobind::module_& module);

}  // namespace headrace::python
