#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <fstream>
#include <system_error>

#include "core/base/ids.h"
#include "core/device/device.h"
#include "core/device/host_memory.h"
#include "core/device/host_stream.h"

namespace headrace {
namespace {

/// A random id where the kernel's cannot be read: it equals nobody's, so nothing is shared by mistake.
std::string read_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  if (std::getline(file, id) && !id.empty()) return id;
  return fmt::format("unknown-{:016x}", random_u64());
}

class HostDevice final : public Device {
 public:
  HostDevice() : identity_{DeviceKind::kHost, read_boot_id(), "host"} {}

  const DeviceIdentity& identity() const noexcept override { return identity_; }

  Result<std::unique_ptr<DeviceMemory>> allocate(const AllocateOptions& options) override {
    auto mapping = options.exportable ? map_exportable(options) : map_private(options);
    if (!mapping.ok()) return mapping.status();
    if (!options.exportable) return wrap(std::make_shared<const HostMapping>(std::move(mapping).value()));
    return wrap(mappings_.add(std::move(mapping).value()));
  }

  Result<UniqueFd> export_memory(const DeviceMemory& memory) override {
    const auto* host = dynamic_cast<const HostMemory*>(&memory);
    if (host == nullptr || !host->mapping().descriptor.valid()) {
      return Status(Code::kInvalidArgument,
                    fmt::format("export {} bytes: they were not allocated as exportable host memory", memory.size()));
    }
    UniqueFd copy(::fcntl(host->mapping().descriptor.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return errno_status(errno, fmt::format("export {} bytes: duplicate their descriptor", memory.size()));
    return copy;
  }

  Result<std::unique_ptr<DeviceMemory>> import_memory(UniqueFd descriptor, std::size_t bytes) override {
    return wrap(mappings_.import(std::move(descriptor), bytes));
  }

  Result<std::unique_ptr<Stream>> create_stream(std::string label) override {
    try {
      return std::unique_ptr<Stream>(std::make_unique<HostStream>(label));
    } catch (const std::system_error& error) {
      return Status(Code::kResourceExhausted, fmt::format("create host stream '{}': {}", label, error.what()), ErrorSource::kErrno,
                    error.code().value());
    }
  }

 private:
  static Result<std::unique_ptr<DeviceMemory>> wrap(Result<std::shared_ptr<const HostMapping>> mapping) {
    if (!mapping.ok()) return mapping.status();
    return std::unique_ptr<DeviceMemory>(std::make_unique<HostMemory>(std::move(mapping).value()));
  }

  const DeviceIdentity identity_;
  HostMappings mappings_;
};

}  // namespace

std::unique_ptr<Device> make_host_device() {
  return std::make_unique<HostDevice>();
}

}  // namespace headrace
