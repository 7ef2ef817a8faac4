#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/base/bounded_queue.h"
#include "core/device/device.h"

namespace headrace {

/// The host's event: finished once, with an outcome. Any thread.
class HostEvent final : public Event {
 public:
  void finish(Status outcome);
  bool done() const override;
  /// The outcome of the stream up to this point, or kDeadlineExceeded.
  Status wait(std::int64_t timeout_ms) const override;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable finished_;
  bool done_ = false;  // guarded by mutex_
  Status outcome_;     // guarded by mutex_
};

/// A thread that works off a bounded queue in order. Its destructor finishes what is queued.
class HostStream final : public Stream {
 public:
  /// Work that may wait; an enqueue beyond it blocks, or is refused on the stream's own thread, which would wait for itself.
  static constexpr std::size_t kQueueItemsMax = 4'096;

  /// Throws std::system_error when no thread can be started.
  explicit HostStream(std::string label);
  ~HostStream() override;

  Status enqueue(std::function<void()> work) override;
  Result<std::shared_ptr<Event>> record() override;
  Status wait(std::shared_ptr<Event> event) override;
  Status synchronize(std::int64_t timeout_ms) override;

 private:
  /// Exactly one of the three is set.
  struct Item {
    std::function<void()> work;
    std::shared_ptr<HostEvent> mark;
    std::shared_ptr<Event> gate;
  };

  Status push(Item item);
  void run();

  const std::string label_;
  BoundedQueue<Item> queue_;
  std::thread thread_;
};

}  // namespace headrace
