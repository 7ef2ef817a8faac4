#include "tests/faults/faulty_control.h"

#include <fmt/format.h>

#include <utility>

namespace headrace {
namespace {

Status died(const FaultInjector& faults, const std::string& endpoint) {
  return Status(Code::kUnavailable, fmt::format("'{}' died ({})", endpoint, faults.plan().describe()));
}

}  // namespace

Status FaultyOutbox::send(std::span<const std::byte> message, std::span<const std::byte> attachment, Send send) {
  Held held{{message.begin(), message.end()}, {attachment.begin(), attachment.end()}, std::move(send)};
  int copies = 1;
  switch (faults_.next()) {
    case Fault::kNone: break;
    case Fault::kDrop: return ok_status();
    case Fault::kDuplicate: copies = 2; break;
    case Fault::kCorrupt:
      // The attachment when there is one: it is the payload of the inline path.
      if (!held.attachment.empty()) {
        faults_.corrupt(held.attachment);
      } else if (!held.message.empty()) {
        faults_.corrupt(held.message);
      }
      break;
    case Fault::kDelay: polls_left_ = kDelayPolls; break;
    case Fault::kFail: return Status(Code::kResourceExhausted, fmt::format("the queue is full ({})", faults_.plan().describe()));
    case Fault::kDie: return Status(Code::kUnavailable, "dead");
  }
  for (int i = 0; i < copies; ++i) {
    if (polls_left_ > 0) {
      held_.push_back(held);
    } else {
      HEADRACE_RETURN_IF_ERROR(held.send(held.message, held.attachment));
    }
  }
  return ok_status();
}

Status FaultyOutbox::polled() {
  if (polls_left_ > 0) --polls_left_;
  if (polls_left_ > 0) return ok_status();
  while (!held_.empty()) {
    const Held held = std::move(held_.front());
    held_.pop_front();
    HEADRACE_RETURN_IF_ERROR(held.send(held.message, held.attachment));
  }
  return ok_status();
}

FaultyConnection::FaultyConnection(std::unique_ptr<ControlConnection> inner, const FaultPlan& plan)
    : endpoint_(inner->endpoint()), id_(inner->id()), inner_(std::move(inner)), outbox_(plan) {}

Status FaultyConnection::die() {
  inner_.reset();
  return died(outbox_.faults(), endpoint_);
}

Status FaultyConnection::send(std::span<const std::byte> message, std::span<const std::byte> attachment) {
  if (dead()) return die();
  const Status status = outbox_.send(message, attachment, [this](auto m, auto a) { return inner_->send(m, a); });
  return outbox_.faults().dead() ? die() : status;
}

Status FaultyConnection::connect_descriptors(const std::string& path, std::int64_t timeout_ms) {
  return dead() ? die() : inner_->connect_descriptors(path, timeout_ms);
}

Status FaultyConnection::send_descriptor(MemoryId memory, std::uint64_t bytes, int descriptor) {
  if (dead()) return die();
  switch (outbox_.faults().next()) {
    case Fault::kDrop: return ok_status();
    case Fault::kDuplicate: HEADRACE_RETURN_IF_ERROR(inner_->send_descriptor(memory, bytes, descriptor)); break;
    case Fault::kCorrupt: ++bytes; break;
    case Fault::kFail: return Status(Code::kResourceExhausted, fmt::format("no descriptor ({})", outbox_.faults().plan().describe()));
    case Fault::kDie: return die();
    case Fault::kNone:
    case Fault::kDelay: break;
  }
  return inner_->send_descriptor(memory, bytes, descriptor);
}

Status FaultyConnection::release_descriptor(MemoryId memory) {
  return dead() ? die() : inner_->release_descriptor(memory);
}

Result<std::optional<ControlEvent>> FaultyConnection::poll(std::int64_t timeout_ms) {
  if (dead()) return die();
  if (const Status status = outbox_.polled(); !status.ok() && status.code() != Code::kUnavailable) return status;
  return inner_->poll(timeout_ms);
}

void FaultyConnection::wake() noexcept {
  if (!dead()) inner_->wake();
}

int FaultyConnection::ready_fd() const noexcept {
  return dead() ? -1 : inner_->ready_fd();
}

FaultyListener::FaultyListener(std::unique_ptr<ControlListener> inner, const FaultPlan& plan)
    : endpoint_(inner->endpoint()), descriptor_path_(inner->descriptor_path()), inner_(std::move(inner)), outbox_(plan) {}

Status FaultyListener::die() {
  inner_.reset();
  return died(outbox_.faults(), endpoint_);
}

Status FaultyListener::send(const PeerId& peer, std::span<const std::byte> message, std::span<const std::byte> attachment) {
  if (dead()) return die();
  const Status status = outbox_.send(message, attachment, [this, peer](auto m, auto a) { return inner_->send(peer, m, a); });
  return outbox_.faults().dead() ? die() : status;
}

Status FaultyListener::acknowledge(const PeerId& peer, MemoryId memory, const Status& outcome) {
  if (dead()) return die();
  switch (outbox_.faults().next()) {
    case Fault::kDrop: return ok_status();
    case Fault::kDie: return die();
    case Fault::kDuplicate: HEADRACE_RETURN_IF_ERROR(inner_->acknowledge(peer, memory, outcome)); break;
    case Fault::kFail: return Status(Code::kResourceExhausted, fmt::format("no answer ({})", outbox_.faults().plan().describe()));
    case Fault::kNone:
    case Fault::kCorrupt:
    case Fault::kDelay: break;
  }
  return inner_->acknowledge(peer, memory, outcome);
}

void FaultyListener::drop(const PeerId& peer) {
  if (!dead()) inner_->drop(peer);
}

Result<std::optional<ControlEvent>> FaultyListener::poll(std::int64_t timeout_ms) {
  if (dead()) return die();
  if (const Status status = outbox_.polled(); !status.ok() && status.code() != Code::kUnavailable) return status;
  return inner_->poll(timeout_ms);
}

void FaultyListener::wake() noexcept {
  if (!dead()) inner_->wake();
}

}  // namespace headrace
