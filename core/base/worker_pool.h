#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

/// What an option `threads` asks for. 0: as many as there are cores that the caller may run on, 4 at most: the others are the engine's.
std::uint32_t thread_count(std::uint32_t threads) noexcept;

/// Runs one indexed loop at a time over a fixed set of threads; the caller takes part. One caller at a time.
class WorkerPool {
 public:
  /// `threads` counts the caller, so 1 starts no thread. Where the system gives fewer, there are fewer.
  explicit WorkerPool(std::size_t threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  std::size_t threads() const noexcept { return workers_.size() + 1; }
  /// Calls body(i) once for each i in [0, count), in any order and on any thread; returns when all are done. `body` must not throw.
  void run(std::size_t count, const std::function<void(std::size_t)>& body);

 private:
  void work();
  void drain(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(std::size_t)>* body_ = nullptr;  // guarded by mutex_
  std::size_t next_ = 0;                                    // guarded by mutex_
  std::size_t count_ = 0;                                   // guarded by mutex_
  std::size_t running_ = 0;                                 // guarded by mutex_
  bool stop_ = false;                                       // guarded by mutex_
  std::vector<std::thread> workers_;
};

}  // namespace headrace
