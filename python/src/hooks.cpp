#include "python/src/hooks.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "python/src/errors.h"
#include "python/src/table.h"
#include "python/src/tensors.h"

namespace nb = nanobind;

namespace headrace::python {
namespace {

class SharedMemory final : public DeviceMemory {
 public:
  explicit SharedMemory(std::shared_ptr<const DeviceMemory> memory) : memory_(std::move(memory)) {}
  std::byte* data() const noexcept override { return memory_->data(); }
  std::size_t size() const noexcept override { return memory_->size(); }
  const DeviceMemory& inner() const noexcept { return *memory_; }

 private:
  std::shared_ptr<const DeviceMemory> memory_;  // shared with views that Python keeps
};

/// Memory lent to a staged hook. It gives buffers until the hook returns, and none afterwards; those that were taken keep the memory.
struct Lease {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool writable = false;
  bool ended = false;
  std::shared_ptr<const DeviceMemory> scratch;
  nb::object table;
};

int lease_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Lease* lease = nb::inst_ptr<Lease>(self);
  if (lease->ended) {
    PyErr_SetString(PyExc_ValueError, "the hook has returned: what it was given must be copied before");
    return -1;
  }
  return PyBuffer_FillInfo(view, self, lease->data, static_cast<Py_ssize_t>(lease->bytes), lease->writable ? 0 : 1, flags);
}

PyType_Slot kLeaseSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(lease_buffer)}, {0, nullptr}};

/// Those of one call, which end with it.
class Leases {
 public:
  ~Leases() {
    for (const nb::object& lease : given_) nb::inst_ptr<Lease>(lease)->ended = true;
  }
  nb::object add(Lease lease) { return given_.emplace_back(nb::cast(std::move(lease))); }

 private:
  std::vector<nb::object> given_;
};

/// Any mapping as a dict.
nb::dict dict_of(const nb::object& mapping) {
  if (PyMapping_Check(mapping.ptr()) == 0 || !nb::hasattr(mapping, "keys")) throw nb::cast_error();
  return nb::cast<nb::dict>(nb::handle(reinterpret_cast<PyObject*>(&PyDict_Type))(mapping));
}

}  // namespace

Result<std::unique_ptr<DeviceMemory>> LeasingDevice::allocate(const AllocateOptions& options) {
  Result<std::unique_ptr<DeviceMemory>> memory = inner_->allocate(options);
  if (!memory.ok()) return memory.status();
  const std::shared_ptr<const DeviceMemory> shared = std::move(memory).value();
  const std::lock_guard lock(mutex_);
  std::erase_if(memories_, [](const auto& known) { return known.expired(); });
  memories_.push_back(shared);
  return std::unique_ptr<DeviceMemory>(std::make_unique<SharedMemory>(shared));
}

Result<UniqueFd> LeasingDevice::export_memory(const DeviceMemory& memory) {
  const auto* shared = dynamic_cast<const SharedMemory*>(&memory);
  return inner_->export_memory(shared != nullptr ? shared->inner() : memory);
}

Result<std::unique_ptr<DeviceMemory>> LeasingDevice::import_memory(UniqueFd descriptor, std::size_t bytes) {
  return inner_->import_memory(std::move(descriptor), bytes);
}

std::shared_ptr<const DeviceMemory> LeasingDevice::owner_of(const std::byte* address) const {
  const std::lock_guard lock(mutex_);
  for (const auto& known : memories_) {
    std::shared_ptr<const DeviceMemory> memory = known.lock();
    if (memory != nullptr && address >= memory->data() && address < memory->data() + memory->size()) return memory;
  }
  return nullptr;
}

/// While a hook runs: the GIL, and which thread it is.
class PyHooks::Running {
 public:
  explicit Running(PyHooks& hooks) : hooks_(hooks) { hooks_.running_ = std::this_thread::get_id(); }
  ~Running() { hooks_.running_ = std::thread::id(); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  PyHooks& hooks_;
  nb::gil_scoped_acquire with_gil_;
};

PyHooks::PyHooks(const nb::dict& hooks, const nb::dict& staged, nb::object table, const LeasingDevice& device)
    : hooks_(hooks), staged_(staged), table_object_(std::move(table)), table_(nb::inst_ptr<PyTable>(table_object_)), device_(&device) {}

EngineHooks PyHooks::engine_hooks() {
  EngineHooks hooks;
  if (hooks_.contains("quiescent")) hooks.quiescent = [this] { return call("quiescent"); };
  if (hooks_.contains("derive")) hooks.derive = [this] { return call("derive"); };
  if (hooks_.contains("finish_tables")) hooks.finish_tables = [this] { return call("finish_tables"); };
  if (hooks_.contains("committed")) hooks.committed = [this] { return call("committed"); };
  if (hooks_.contains("expert_map")) hooks.expert_map = [this] { return expert_map(); };
  if (hooks_.contains("launch_constants")) hooks.launch_constants = [this] { return launch_constants(); };
  hooks.locate = [this] { return locate(); };
  for (const auto [key, value] : staged_) {
    const std::string name = name_text(key);
    hooks.staged[name] = [this, name](const StagedCall& call) { return call_staged(name, call); };
  }
  return hooks;
}

nb::object PyHooks::take_cause() {
  return std::exchange(cause_, nb::object());
}

nb::handle PyHooks::cause_of(const Status& failure) const {
  const bool said = failure.message().find(cause_text_) != std::string_view::npos;
  return said ? nb::handle(cause_) : nb::handle();
}

Status PyHooks::keep(nb::python_error& error, const std::string& what) {
  Status status = status_of(error, what);
  cause_ = nb::borrow(error.value());
  cause_text_ = status.message();
  return status;
}

Status PyHooks::call(const char* name) {
  const Running running(*this);
  try {
    const nb::object answer = hooks_[name]();
    if (PyBool_Check(answer.ptr()) && !nb::cast<bool>(answer)) return Status(Code::kFailedPrecondition, "it said no");
    return ok_status();
  } catch (nb::python_error& error) {
    return keep(error, "it raised");
  }
}

std::vector<StorageLocation> PyHooks::locate() {
  const Running running(*this);
  cause_.reset();  // every session asks here before anything else can go wrong
  return locate_here();
}

std::vector<StorageLocation> PyHooks::locate_here() {
  try {
    if (!hooks_.contains("locate")) return table_->locate();
    std::vector<StorageLocation> locations;
    TensorReader reader(TensorReader::Hold::kLook);
    const nb::dict present = dict_of(hooks_["locate"]());
    for (std::uint32_t i = 0; i < table_->table().size(); ++i) {
      const Storage& storage = table_->table().at(StorageId{i});
      const nb::str name(storage.name.c_str(), storage.name.size());
      if (!present.contains(name)) continue;
      locations.push_back(table_->location(StorageId{i}, reader.read(present[name], storage.name)));
    }
    return locations;
  } catch (nb::python_error& error) {
    throw Error(keep(error, "it raised"));
  } catch (const nb::cast_error&) {
    throw Error(Status(Code::kInvalidArgument, "expected a mapping of storage names to tensors"));
  }
}

Status PyHooks::check_places() {
  std::vector<StorageLocation> now;
  try {
    now = locate_here();
  } catch (const Error& error) {
    return error.status();
  }
  std::vector<bool> there(table_->table().size());
  for (const StorageLocation& place : now) {
    const Storage& storage = table_->table().at(place.storage);
    there[place.storage.value] = place.address == storage.address && place.bytes == storage.bytes;
  }
  for (std::uint32_t i = 0; i < there.size(); ++i)
    if (!there[i])
      return Status(Code::kFailedPrecondition, fmt::format("{} lies elsewhere than it was sealed", table_->table().at(StorageId{i}).name));
  return ok_status();
}

std::vector<std::vector<std::int32_t>> PyHooks::expert_map() {
  const Running running(*this);
  try {
    nb::object map = hooks_["expert_map"]();
    if (nb::hasattr(map, "tolist")) map = map.attr("tolist")();
    return nb::cast<std::vector<std::vector<std::int32_t>>>(map);
  } catch (nb::python_error& error) {
    throw Error(keep(error, "it raised"));
  } catch (const nb::cast_error&) {
    throw Error(Status(Code::kInvalidArgument, "expected the logical expert of each physical slot of each layer, as rows of integers"));
  }
}

std::map<std::string, double> PyHooks::launch_constants() {
  const Running running(*this);
  try {
    std::map<std::string, double> constants;
    for (const auto [name, value] : dict_of(hooks_["launch_constants"]())) {
      constants[name_text(name)] = nb::cast<double>(nb::float_(nb::borrow(value)));
    }
    return constants;
  } catch (nb::python_error& error) {
    throw Error(keep(error, "it raised"));
  } catch (const nb::cast_error&) {
    throw Error(Status(Code::kInvalidArgument, "expected a dict of numbers by the names of launch constants"));
  }
}

Status PyHooks::call_staged(const std::string& hook, const StagedCall& call) {
  const Running running(*this);
  try {
    Leases leases;
    const auto lend = [&](std::span<const std::byte> bytes, bool writable) {
      auto* address = const_cast<std::byte*>(bytes.data());  // read-only where `writable` is false
      return leases.add({address, bytes.size(), writable, false, device_->owner_of(address), table_object_});
    };
    nb::list inputs;
    nb::list outputs;
    for (const auto input : call.inputs) inputs.append(lend(input, false));
    for (const auto output : call.outputs) outputs.append(lend(output, true));
    const nb::object work = lend(call.work, true);
    staged_[hook.c_str()](std::string(call.group), inputs, work, outputs);
    return ok_status();
  } catch (nb::python_error& error) {
    return keep(error, fmt::format("hook {} of group {} raised", hook, call.group));
  }
}

void init_hooks(nb::module_& module) {
  nb::class_<Lease>(module, "_Lease", nb::type_slots(kLeaseSlots), "Memory lent to a staged hook until it returns.");
}

}  // namespace headrace::python
