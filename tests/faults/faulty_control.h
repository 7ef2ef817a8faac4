#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/transport/control.h"
#include "tests/faults/fault_plan.h"

namespace headrace {

/// Holds messages back and changes them on their way out. A delayed message holds those behind it back too, for `kDelayPolls` polls of the
/// same end, since a connection never reorders. One thread.
class FaultyOutbox {
 public:
  static constexpr int kDelayPolls = 3;
  using Send = std::function<Status(std::span<const std::byte>, std::span<const std::byte>)>;

  explicit FaultyOutbox(const FaultPlan& plan) : faults_(plan) {}
  /// Passes the message on through `send` as the plan says. kUnavailable when it is the step to die.
  Status send(std::span<const std::byte> message, std::span<const std::byte> attachment, Send send);
  /// Lets delayed messages go whose time has come.
  Status polled();
  FaultInjector& faults() noexcept { return faults_; }

 private:
  struct Held {
    std::vector<std::byte> message;
    std::vector<std::byte> attachment;
    Send send;
  };

  FaultInjector faults_;
  std::deque<Held> held_;
  int polls_left_ = 0;
};

/// A sender's end with faults in what it sends: each message and each descriptor is a step. At its death the inner connection is closed, so
/// the receiver sees what it sees of a killed process.
class FaultyConnection final : public ControlConnection {
 public:
  FaultyConnection(std::unique_ptr<ControlConnection> inner, const FaultPlan& plan);

  const std::string& endpoint() const noexcept override { return endpoint_; }
  const PeerId& id() const noexcept override { return id_; }
  Status send(std::span<const std::byte> message, std::span<const std::byte> attachment) override;
  Status connect_descriptors(const std::string& path, std::int64_t timeout_ms) override;
  Status send_descriptor(MemoryId memory, std::uint64_t bytes, int descriptor) override;
  Status release_descriptor(MemoryId memory) override;
  Result<std::optional<ControlEvent>> poll(std::int64_t timeout_ms) override;
  void wake() noexcept override;
  int ready_fd() const noexcept override;
  bool dead() const noexcept { return inner_ == nullptr; }

 private:
  Status die();

  const std::string endpoint_;
  const PeerId id_;
  std::unique_ptr<ControlConnection> inner_;  // null once dead
  FaultyOutbox outbox_;
};

/// A receiver's end with faults in what it sends; a step is a message or an acknowledgement.
class FaultyListener final : public ControlListener {
 public:
  FaultyListener(std::unique_ptr<ControlListener> inner, const FaultPlan& plan);

  const std::string& endpoint() const noexcept override { return endpoint_; }
  const std::string& descriptor_path() const noexcept override { return descriptor_path_; }
  Status send(const PeerId& peer, std::span<const std::byte> message, std::span<const std::byte> attachment) override;
  Status acknowledge(const PeerId& peer, MemoryId memory, const Status& outcome) override;
  void drop(const PeerId& peer) override;
  Result<std::optional<ControlEvent>> poll(std::int64_t timeout_ms) override;
  void wake() noexcept override;
  bool dead() const noexcept { return inner_ == nullptr; }

 private:
  Status die();

  const std::string endpoint_;
  const std::string descriptor_path_;
  std::unique_ptr<ControlListener> inner_;  // null once dead
  FaultyOutbox outbox_;
};

}  // namespace headrace
