#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/transport/control.h"

namespace headrace {

/// The thread that owns a receiver's session: it waits for messages and for functions that others post. Construct, start(), stop().
class ProgressLoop {
 public:
  using Work = std::function<void()>;
  using OnEvent = std::function<void(ControlEvent)>;

  ProgressLoop(ControlListener& listener, std::int64_t tick_ms) : listener_(&listener), tick_ms_(tick_ms) {}
  ~ProgressLoop() { stop(); }
  ProgressLoop(const ProgressLoop&) = delete;
  ProgressLoop& operator=(const ProgressLoop&) = delete;

  /// `tick` runs at least every tick_ms. kResourceExhausted: no thread.
  Status start(OnEvent on_event, Work tick);
  /// Runs `work` on the loop's thread, in order. After stop() it is dropped. Any thread.
  void post(Work work);
  /// Ends the thread after the work that was posted. Not on the loop's own thread.
  void stop();

 private:
  void run();
  void run_posted();

  ControlListener* listener_;
  const std::int64_t tick_ms_;
  OnEvent on_event_;
  Work tick_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::vector<Work> posted_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace headrace
