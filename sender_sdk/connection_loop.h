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

/// The thread that owns a sender's control connections. post(), wake() and run_round() on any thread, connection() where the
/// handler may, and within posted functions.
class ConnectionLoop {
 public:
  /// On the loop's thread, but send_ready() also on that of run_round(). Connections are used within on_event() and send_ready() alone, of
  /// which there is one at a time.
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_event(std::size_t connection, ControlEvent event) = 0;
    /// Time to send what has become sendable.
    virtual void send_ready() = 0;
    /// After every round, with connections in nobody's hands.
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
  /// Lets the handler send on this thread, which saves the wait for the loop's; if that is in a round it will make another.
  void send_ready();
  ControlConnection& connection(std::size_t index) { return *connections_[index]; }

 private:
  void run();
  void run_commands();
  /// Whether there may be more.
  bool drain(std::size_t index);

  std::vector<std::unique_ptr<ControlConnection>> connections_;
  std::vector<bool> failed_;  // its peer is gone: reported once, then left alone
  WakeEvent wake_;
  Handler& handler_;
  const std::int64_t round_ms_;
  std::atomic<bool> stop_{false};
  std::mutex turn_;  // held by whoever uses connections; taken before the handler's locks
  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace headrace
