#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/base/status.h"
#include "core/transport/control.h"
#include "core/transport/wake_event.h"

namespace headrace {

/// The thread that owns a sender's control connections. post() and wake() on any thread, connection() on the loop's own.
class ConnectionLoop {
 public:
  /// Called on the loop's thread.
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_event(std::size_t connection, ControlEvent event) = 0;
    /// After every round: time to send what has become sendable.
    virtual void on_round() = 0;
  };

  ConnectionLoop(std::vector<std::unique_ptr<ControlConnection>> connections, WakeEvent wake, Handler& handler, std::int64_t round_ms);
  ~ConnectionLoop() { stop(); }
  ConnectionLoop(const ConnectionLoop&) = delete;
  ConnectionLoop& operator=(const ConnectionLoop&) = delete;

  /// Starts the thread. Once, before anything else. kResourceExhausted: no thread.
  Status start();
  /// Runs what was posted, gives the handler a last round, ends the thread.
  void stop();
  void post(std::function<void()> command);
  void wake() noexcept { wake_.set(); }
  ControlConnection& connection(std::size_t index) { return *connections_[index]; }

 private:
  void run();
  bool run_commands();
  bool drain(std::size_t index);

  std::vector<std::unique_ptr<ControlConnection>> connections_;
  std::vector<bool> failed_;  // its peer is gone: reported once, then left alone
  WakeEvent wake_;
  Handler& handler_;
  const std::int64_t round_ms_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace headrace
