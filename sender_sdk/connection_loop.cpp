#include "sender_sdk/connection_loop.h"

#include <poll.h>

#include <string>
#include <system_error>
#include <utility>

namespace headrace {
namespace {
constexpr int kEventsPerTurn = 64;  // of one connection, before the others have theirs
}

ConnectionLoop::ConnectionLoop(std::vector<std::unique_ptr<ControlConnection>> connections, WakeEvent wake, Handler& handler,
                               std::int64_t round_ms)
    : connections_(std::move(connections)),
      failed_(connections_.size(), false),
      wake_(std::move(wake)),
      handler_(handler),
      round_ms_(round_ms) {}

Status ConnectionLoop::start() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kResourceExhausted, std::string("start a thread: ") + error.what());
  }
  return ok_status();
}

void ConnectionLoop::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_release);
  wake_.set();
  thread_.join();
}

void ConnectionLoop::post(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  wake_.set();
}

void ConnectionLoop::run() {
  std::vector<pollfd> descriptors;
  for (const auto& connection : connections_) descriptors.push_back({connection->ready_fd(), POLLIN, 0});
  descriptors.push_back({wake_.fd(), POLLIN, 0});
  while (!stop_.load(std::memory_order_acquire)) {
    // Before the turn: who asks for a round while this one goes on finds the event set again after it.
    wake_.take();
    bool more = false;
    {
      const std::lock_guard turn(turn_);
      run_commands();
      for (std::size_t i = 0; i < connections_.size(); ++i) more = drain(i) || more;
      handler_.send_ready();
    }
    handler_.on_round();
    if (more) continue;
    for (std::size_t i = 0; i < connections_.size(); ++i) {
      if (failed_[i]) descriptors[i].fd = -1;
    }
    ::poll(descriptors.data(), descriptors.size(), static_cast<int>(round_ms_));
  }
  {
    const std::lock_guard turn(turn_);
    run_commands();
    handler_.send_ready();
  }
  handler_.on_round();
}

void ConnectionLoop::send_ready() {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn.owns_lock()) return wake_.set();
  handler_.send_ready();
}

void ConnectionLoop::run_commands() {
  std::vector<std::function<void()>> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) command();
}

bool ConnectionLoop::drain(std::size_t index) {
  if (failed_[index]) return false;
  for (int i = 0; i < kEventsPerTurn; ++i) {
    auto event = connections_[index]->poll(0);
    if (!event.ok()) {
      failed_[index] = true;
      ControlEvent lost;
      lost.kind = ControlEventKind::kPeerLost;
      lost.peer = connections_[index]->id();
      lost.status = event.status();
      handler_.on_event(index, std::move(lost));
      return false;
    }
    if (!event.value()) return false;
    failed_[index] = event.value()->kind == ControlEventKind::kPeerLost;
    handler_.on_event(index, std::move(*event.value()));
    if (failed_[index]) return false;
  }
  return true;
}

}  // namespace headrace
