#include "core/transport/in_memory_control.h"

#include <gtest/gtest.h>

#include "tests/core/transport/control_conformance.h"

namespace headrace {
namespace {

struct InMemoryBackend {
  Result<std::unique_ptr<ControlListener>> listen(const ControlOptions& options) {
    if (!hub_) hub_.emplace(options);
    return hub_->listen("receiver");
  }
  Result<std::unique_ptr<ControlConnection>> connect(const ControlOptions& options) {
    // A hub has one set of options; where the test asks for others nobody listens in the new one.
    if (!hub_ || options.connect_timeout_ms != ControlOptions().connect_timeout_ms) hub_.emplace(options);
    return hub_->connect("receiver");
  }

  std::optional<InMemoryHub> hub_;
};
INSTANTIATE_TYPED_TEST_SUITE_P(InMemory, ControlConformance, InMemoryBackend);

}  // namespace
}  // namespace headrace
