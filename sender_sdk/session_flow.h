#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/ids.h"
#include "core/base/weight_version.h"
#include "core/wire/messages.h"

namespace headrace {

/// A message on its way to one receiver. Buckets wait for a credit, and everything behind them with them.
struct Outgoing {
  std::vector<std::byte> message;
  std::span<const std::byte> attachment;  // in a staging buffer, or in `own_attachment`
  std::vector<std::byte> own_attachment;  // what this receiver alone gets of a buffer
  std::optional<std::uint64_t> sequence;  // of a bucket
  std::uint32_t slot = 0;                 // its staging slot
};

/// One receiver as an update sees it.
struct ReceiverFlow {
  std::string engine;
  std::uint32_t rank = 0;
  Incarnation incarnation;
  std::optional<Status> lost;

  // The newest OPENED, kept over sessions: a sender that does not lead may hear it before its own open().
  std::optional<wire::Opened> opened;
  SessionId opened_session;

  std::optional<wire::Welcome> welcome;  // an answer to a repeated HELLO
  std::optional<wire::Accept> accept;
  std::optional<wire::Reject> reject;
  std::optional<wire::Receipt> prepared;
  std::optional<wire::Receipt> committed;
  bool ended = false;         // said ERROR: expects nothing more of this session
  std::uint32_t credits = 0;  // 0 before BEGIN; a sender that is alone has the first with its CONFIRM
  std::uint64_t next_sequence = 0;
  std::uint64_t pong_progress = 0;
  struct Unanswered {
    std::uint64_t sequence = 0;
    std::uint32_t slot = 0;
  };
  std::deque<Unanswered> unanswered;  // sent, at most `credits`
  std::deque<Outgoing> outbox;

  std::string name() const { return engine + " rank " + std::to_string(rank); }
  /// The first bucket that is not consumed, -1 for none.
  std::int64_t waiting_bucket() const;
};

/// The sender's half of docs/protocol.md for one update after another: what each message does to what is known of each receiver. No
/// threads, clocks or sockets; the owner serialises the calls.
class SessionFlow {
 public:
  /// What a message led to.
  struct Outcome {
    bool progress = false;
    std::optional<wire::Failure> failure;     // of the present session
    std::optional<std::uint32_t> freed_slot;  // one receiver has consumed a bucket of this slot
  };

  explicit SessionFlow(std::vector<ReceiverFlow> receivers) : receivers_(std::move(receivers)) {}

  std::vector<ReceiverFlow>& receivers() noexcept { return receivers_; }
  const std::vector<ReceiverFlow>& receivers() const noexcept { return receivers_; }
  SessionId session() const noexcept { return session_; }
  bool active() const noexcept { return active_; }

  /// Starts an update. As lead `session` is its own new id; without one the session is found by OPENED messages with this version.
  void begin(const WeightVersion& version, std::optional<SessionId> session);
  /// The session that all receivers have opened with the version of begin(), once they agree; nullopt until then.
  std::optional<SessionId> agreed_session() const;
  void adopt(SessionId session) { session_ = session; }
  /// Ends the update, for good or ill: what still comes of it is ignored.
  void end();

  /// Queues a message of this session to one receiver.
  void push(std::size_t receiver, wire::Body body);
  /// Queues CONFIRM to every receiver. The CONFIRM of a sender that is `alone` is the last, so its first bucket need not wait for BEGIN.
  void confirm(bool alone);
  /// Drops what is queued and queues ABORT for a receiver that is still part of the session.
  void push_abort(std::size_t receiver, const wire::Failure& failure);
  /// The next message that may be sent now; a bucket takes its credit.
  std::optional<Outgoing> take_sendable(std::size_t receiver);

  Outcome on_message(std::size_t receiver, wire::Message message);

 private:
  Outcome on_opened(ReceiverFlow& receiver, SessionId session, wire::Opened opened);
  Outcome on_error(ReceiverFlow& receiver, SessionId session, wire::Failure failure);
  Outcome on_consumed(ReceiverFlow& receiver, std::uint64_t sequence);
  Outcome on_session_message(ReceiverFlow& receiver, wire::Body body);
  Outcome unexpected(const ReceiverFlow& receiver, std::string_view what) const;
  void remember_dead(SessionId session);

  std::vector<ReceiverFlow> receivers_;
  SessionId session_;    // 0 while it is not known yet
  std::string version_;  // RUN/STEP of the update
  bool active_ = false;
  std::deque<SessionId> dead_;  // sessions that are over, the newest last; a late message of theirs means nothing
};

/// A failure of this side that concerns one receiver.
wire::Failure receiver_failure(const ReceiverFlow& receiver, const Status& status, std::string phase);

}  // namespace headrace
