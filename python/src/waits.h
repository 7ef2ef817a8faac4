#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace headrace::python {

/// Runs what may take time on a thread of its own, while the caller waits without the GIL and looks for signals: the one way in which calls
/// of this package wait. A call that comes while another one waits runs on its own thread.
class Waits {
 public:
  Waits() = default;
  ~Waits();
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

  /// Returns when `work` has. After Control-C `interrupt` is called once, on this thread and without the GIL, to make `work` end soon; then
  /// KeyboardInterrupt is raised. Needs the GIL; what `work` throws is thrown here.
  void run(const std::function<void()>& work, const std::function<void()>& interrupt = {});

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;  // guarded by mutex_, as are the others
  std::exception_ptr thrown_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace headrace::python
