#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace headrace::python {

/// Runs what may take time while the caller waits without the GIL: the one way in which calls of this package wait. Signals come to
/// Python's main thread only: what that one calls runs on a thread of its own meanwhile, and all others run theirs themselves.
class Waits {
 public:
  Waits();
  ~Waits();
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

  /// Returns when `work` has. After Control-C `interrupt` is called once, on this thread and without the GIL, to make `work` end soon; when
  /// it has, KeyboardInterrupt is raised. Without `interrupt` it is raised at once, and `work` ends when it may: then it must own all that
  /// it uses. Needs the GIL; what `work` throws is thrown here.
  void run(std::function<void()> work, const std::function<void()>& interrupt = {});

 private:
  struct Shared;
  static void serve(const std::shared_ptr<Shared>& shared);

  std::shared_ptr<Shared> shared_;  // with the thread, which may be left to itself
  std::thread thread_;
};

}  // namespace headrace::python
