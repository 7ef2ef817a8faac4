#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "core/base/clock.h"
#include "core/transport/control.h"
#include "core/transport/run_directory.h"
#include "receiver/canaries.h"
#include "receiver/inspection.h"
#include "receiver/progress_loop.h"
#include "receiver/receiver.h"
#include "receiver/session_control.h"

namespace headrace {

/// What a receiver stands on, so that tests can put another channel or clock below it.
struct ReceiverParts {
  std::unique_ptr<ControlListener> listener;
  std::optional<EndpointClaim> claim;
  std::filesystem::path guard_path;
  const Clock* clock = nullptr;  // outlives the receiver; none: the steady one
};

class Receiver::Impl {
 public:
  static Result<std::unique_ptr<Impl>> create(ReceiverOptions options, ModelLayout layout, const StorageTable& table, Device& device,
                                              EngineHooks hooks, ReceiverParts parts);
  ~Impl();

  const std::string& endpoint() const noexcept { return parts_.listener->endpoint(); }
  /// Runs `ask` on the progress thread and waits for its answer.
  template <class Answer>
  Answer ask(std::function<void(std::function<void(Answer)>)> question) const {
    // The answer comes when the apply thread is done: its work is finite, and stop() runs what was posted before.
    auto promise = std::make_shared<std::promise<Answer>>();
    std::future<Answer> future = promise->get_future();
    loop_->post(
        [question = std::move(question), promise] { question([promise](Answer answer) { promise->set_value(std::move(answer)); }); });
    return future.get();
  }
  wire::StatusReply status_on_loop() const;
  void fingerprints_async(std::function<void(Result<std::vector<wire::TensorFingerprint>>)> done);
  SessionControl& control() { return *control_; }
  Result<wire::Receipt> wait_for(const WeightVersion& version, const WaitOptions& options, const std::stop_token& stop);

 private:
  Impl(ReceiverOptions options, ModelLayout layout, const StorageTable& table, Device& device, EngineHooks hooks, ReceiverParts parts);
  Status write_constants();
  /// What a discard takes beyond the weights: constants and canaries. On the apply thread, once it runs.
  Status restore();
  void on_event(ControlEvent event);
  void on_message(const PeerId& peer, std::vector<std::byte> bytes, std::vector<std::byte> attachment);
  void on_hello(const PeerId& peer, const wire::Hello& hello);
  bool on_tool(const PeerId& peer, const wire::Message& message);
  void send(const PeerId& peer, SessionId session, wire::Body body);
  void refuse(const PeerId& peer, SessionId session, const Status& status, std::string phase);

  const SteadyClock steady_clock_;
  ReceiverOptions options_;
  const StorageTable* table_;
  Device* device_;
  EngineHooks hooks_;
  ReceiverParts parts_;
  WeightIndex index_;
  PlanGeometry geometry_;
  GlobalValues values_;
  Incarnation incarnation_;
  Canaries canaries_;
  std::unique_ptr<GuardPage> guard_;
  std::unique_ptr<ProgressLoop> loop_;
  GroupScratch scratch_;  // before the applier, which waits for its work to end
  std::unique_ptr<Applier> applier_;
  std::unique_ptr<PeerBook> peers_;
  std::unique_ptr<Inspection> inspection_;
  std::unique_ptr<SessionControl> control_;
  std::atomic<std::uint64_t> next_wait_{1};
};

}  // namespace headrace
