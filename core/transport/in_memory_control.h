#pragma once

#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/transport/control.h"

namespace headrace {

/// Control channels inside one process: the same contract as over sockets, without sockets. Listeners and connections may outlive the hub.
/// Any thread.
class InMemoryHub {
 public:
  explicit InMemoryHub(const ControlOptions& options = {});

  /// "memory://NAME". kFailedPrecondition when the name is served. Without `descriptors` descriptor_path() is empty.
  Result<std::unique_ptr<ControlListener>> listen(const std::string& name, bool descriptors = true);
  /// kDeadlineExceeded names the endpoint when nobody listens within connect_timeout_ms.
  Result<std::unique_ptr<ControlConnection>> connect(const std::string& name);

  struct State;

 private:
  std::shared_ptr<State> state_;  // shared: with every end that still lives
};

}  // namespace headrace
