#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/clock.h"
#include "core/transport/control.h"
#include "core/wire/messages.h"
#include "receiver/applier.h"
#include "receiver/canaries.h"
#include "receiver/global_values.h"
#include "receiver/guard_page.h"
#include "receiver/memory_meter.h"
#include "receiver/peer_book.h"
#include "receiver/plain_calls.h"
#include "receiver/receiver.h"
#include "receiver/session_table.h"
#include "receiver/update_session.h"
#include "receiver/update_waits.h"
#include "receiver/written_storages.h"

namespace headrace {

/// The receiver's state and the update it is in, if any: every message, loss, deadline and engine event goes through the state table here.
/// Progress thread only; what is enqueued on the apply thread comes back through `post`.
class SessionControl {
 public:
  /// Everything outlives the control.
  struct Environment {
    const ReceiverOptions* options;
    const WeightIndex* index;
    const PlanGeometry* geometry;
    const StorageTable* table;
    const EngineHooks* hooks;
    Applier* applier;
    GuardPage* guard;
    PeerBook* peers;
    const Clock* clock;
    std::function<void(const PeerId&, SessionId, wire::Body)> send;
    Canaries* canaries;
    std::function<void()> restore;                                         // constants and canaries; on the apply thread
    std::function<void(std::shared_ptr<const ExpertMaps>)> experts_moved;  // on the apply thread
    PeerBook::Post post;
    GroupScratch* scratch;
    const GlobalValues* values;
  };

  explicit SessionControl(Environment environment);

  SessionState state() const noexcept { return state_; }
  const std::optional<WeightVersion>& version() const noexcept { return version_; }
  /// What WELCOME and STATUS say.
  void describe(wire::Welcome& welcome) const;
  void describe(wire::StatusReply& reply) const;

  /// A sender of the open session may have been missing when OPENED was sent.
  void on_hello(const PeerId& peer, const std::string& sender);
  void on_message(const PeerId& peer, PeerBook::Peer& from, wire::Message message, std::vector<std::byte> attachment);
  void on_peer_lost(const PeerId& peer, const Status& how);
  void on_engine_event(EngineEvent event);
  /// Looks at the deadlines; call it at least every few hundred milliseconds.
  void on_tick();

  std::uint64_t sessions_ended() const noexcept { return waits_.ended(); }
  std::size_t waiting() const noexcept { return waits_.size(); }
  /// As Receiver::wait_for. `wait.since_ns` and a deadline of 0 are filled in; without a mark it counts from now.
  void wait_for(UpdateWaits::Wait wait, std::optional<std::uint64_t> mark);
  void cancel_wait(std::uint64_t id) { waits_.cancel(id); }
  /// Ends all waits, also those that come later.
  void end_waits(const std::string& reason);

  using Done = std::function<void(const Status&)>;
  using ReceiptDone = std::function<void(Result<wire::Receipt>)>;
  void begin_plain(const WeightVersion& version, Done done);
  /// `tensors` stay valid until `done` is called.
  void load_plain(std::span<const NamedView> tensors, Done done);
  void finish_plain(ReceiptDone done);
  Status abort_plain(const std::string& reason);

 private:
  void on_open(const PeerId& peer, const std::string& sender, SessionId id, const wire::Open& open);
  Status check_open(const std::string& sender, const wire::Open& open, WeightVersion& version) const;
  Status check_version(const WeightVersion& version) const;
  Status check_repair(const WeightVersion& version, std::span<const std::uint32_t> ranks) const;
  void start_session(std::unique_ptr<UpdateSession> session, std::function<void(const Status&)> opened);
  void on_manifest(UpdateSession& session, SessionSender& sender, wire::Manifest manifest);
  const SenderPart* last_part(const std::string& sender, const Digest& digest) const;
  /// Once the engine has attested and every manifest is here.
  void answer_when_complete(UpdateSession& session);
  void answer_manifests(UpdateSession& session);
  /// Takes the values that the manifests of `parts` brought; what is missing or odd of them.
  wire::Reject read_values(UpdateSession& session, std::span<const SenderPart> parts) const;
  /// Adds `odd` and what the values say to the other defects.
  void check_values(const UpdateSession& session, wire::Reject odd, wire::Reject& refusal) const;
  Status give_scratch(UpdateSession& session);
  void on_confirm(UpdateSession& session, SessionSender& sender);
  void on_bucket(UpdateSession& session, SessionSender& sender, const PeerBook::Peer& from, const wire::Bucket& bucket,
                 std::vector<std::byte> attachment);
  void on_end(UpdateSession& session, SessionSender& sender, const wire::End& end);
  /// After END, and after the work of a bucket.
  void go_on(UpdateSession& session);
  void on_commit(const PeerId& peer, SessionId id);
  void prove(UpdateSession& session);
  void on_proven(const ProofOutcome& outcome, const Status& after, std::span<const std::string> lost);
  void commit(UpdateSession& session);
  void first_enqueue();
  /// Enqueues that constants and canaries are written again, if the content was lost since they were.
  void restore_after_discard();
  Result<std::shared_ptr<const SyncPlan>> plan_plain(std::span<const NamedView> tensors) const;
  Status jobs_plain(const SyncPlan& plan, std::span<const NamedView> tensors, ApplyWork& work) const;
  /// Takes the values that a call of load() brings; after a failure none of them.
  Status values_plain(std::span<const NamedView> tensors);
  /// A failure found on this rank.
  void name_rank(wire::Failure& failure) const;
  wire::Failure own_failure(const Status& status, std::string phase) const;
  /// Ends the session as the table says for `event`, tells every sender; the first failure sticks.
  void fail(SessionEvent event, wire::Failure failure);
  void fail(SessionEvent event, const Status& status, std::string phase);
  bool apply(SessionEvent event);
  void publish();
  void to_senders(const UpdateSession& session, const wire::Body& body);
  void check_session_deadline();
  /// What a wait for an update that failed is told: the state, and all that the failure says.
  Status failed_update(const WeightVersion& version, const Status& failure) const;
  /// The failure of a wait that saw no sign of progress for too long; ok for others.
  Status overdue(const UpdateWaits::Wait& wait) const;
  /// Its failure or its exception, with its name. On the apply thread, as all hooks.
  static Status call_hook(std::string_view name, const std::function<Status()>& hook);
  static Status discard_status(std::span<const std::string> pools);
  /// What the engine says before an update.
  struct Attested {
    Status status;
    std::shared_ptr<const ExpertMaps> experts;  // with an ok status
    std::vector<std::string> lost{};            // pools whose content is gone although nobody said so; with an ok status
    std::optional<std::vector<std::optional<double>>> constants{};  // where there is a hook; with an ok status
  };
  Attested attest() const;
  Result<std::shared_ptr<const ExpertMaps>> read_experts() const;
  Status read_constants(Attested& attested) const;
  /// That nothing moved while an update of `plan` was written.
  Status attest_again(const SyncPlan& plan) const;
  /// Takes note that all content of live storage is lost.
  void forget_content();
  void on_discard_found(std::span<const std::string> pools);
  Status check_scopes(std::span<const std::string> scopes) const;
  void reject(UpdateSession& session, wire::Reject refusal);
  void read_experts_async();
  wire::Opened opened_message() const;
  std::string phase() const;
  bool current(SessionId id) const { return session_ != nullptr && session_->id == id; }

  Environment env_;
  SessionState state_ = SessionState::kIdle;
  SessionState resting_ = SessionState::kIdle;  // the state before OPEN
  std::optional<WeightVersion> version_;        // what live storage holds as a whole
  std::optional<WeightVersion> committed_;      // the last that was committed in this life, whatever happened since
  std::shared_ptr<const ExpertMaps> experts_;   // as the engine said last; plans share them
  std::unique_ptr<UpdateSession> session_;      // in kOpen, kApplying, kPrepared, kInDoubt
  std::unique_ptr<UpdateSession> doubtful_;     // in doubt while a new update is open
  SessionId last_session_;                      // committed last
  std::optional<wire::Receipt> last_receipt_;
  SessionId failed_session_;
  wire::Failure failure_;                      // of failed_session_
  std::string last_failure_;                   // for STATUS
  std::string attempted_;                      // version of the failed session
  std::shared_ptr<const SyncPlan> last_plan_;  // of the last commit; its parts are the manifests that a sender may name by digest
  std::shared_ptr<const std::vector<AskedValue>> last_asked_;  // of last_plan_
  CapturedConstants captured_;
  std::uint64_t updates_ = 0;
  std::uint64_t engram_calls_ = 0;
  WrittenStorages written_;
  std::uint64_t discards_ = 0;
  bool discarded_ = false;  // constants and canaries are gone too: they are written before the next first byte
  std::uint64_t apply_progress_ = 0;
  SlotState published_ = SlotState::kNone;
  MemoryMeter meter_;
  UpdateWaits waits_;
  std::string waits_ended_;  // why; empty while they are taken
  bool committing_ = false;  // COMMIT was taken, and the engine's hook has not answered
  // The plain call.
  PlainCalls plain_calls_;
  std::vector<CastSums> plain_sums_;
  std::vector<FingerprintSum> plain_inputs_;  // of entries of staged groups
  Done plain_begun_;
  ReceiptDone plain_done_;
};

}  // namespace headrace
