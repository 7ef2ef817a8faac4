#include "core/device/device.h"

namespace headrace {

std::string_view device_kind_name(DeviceKind kind) noexcept {
  switch (kind) {
    case DeviceKind::kHost: return "host";
    case DeviceKind::kCuda: return "cuda";
  }
  return "unknown";
}

}  // namespace headrace
