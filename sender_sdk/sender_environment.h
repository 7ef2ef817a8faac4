#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/device/device.h"
#include "core/transport/control.h"

namespace headrace {

/// What a sender takes from the world around it; tests bring their own.
struct SenderEnvironment {
  using Connector = std::function<Result<std::unique_ptr<ControlConnection>>(const std::string& endpoint, const ControlOptions& options)>;
  Connector connect;
  std::shared_ptr<const Clock> clock;  // shared: a test moves the one that the sender reads
  std::unique_ptr<Device> device;

  /// ZeroMQ, the steady clock, the host device.
  static SenderEnvironment real();
};

}  // namespace headrace
