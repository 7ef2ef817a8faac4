#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/transport/data_path.h"
#include "core/wire/limits.h"
#include "core/wire/value_names.h"
#include "sender_sdk/bucket_filler.h"
#include "sender_sdk/bucket_plan.h"
#include "sender_sdk/connection_loop.h"
#include "sender_sdk/entry_table.h"
#include "sender_sdk/group_order.h"
#include "sender_sdk/packer.h"
#include "sender_sdk/receiver_links.h"
#include "sender_sdk/release_once.h"
#include "sender_sdk/sender.h"
#include "sender_sdk/sender_environment.h"
#include "sender_sdk/session_flow.h"
#include "sender_sdk/staging_pool.h"

namespace headrace {

/// What is behind Sender (sender.h states the contract of the public calls). Three threads meet here:
///  - the caller's, which makes the public calls and packs what add() is given;
///  - the connection loop's, which alone hears receivers and so sees failures while the caller is elsewhere; what is queued leaves on
///    whichever of the threads is at hand;
///  - the packing thread, started by the first add_async().
/// Locks are taken in the order pack_mutex_, the loop's turn, mutex_.
class SenderImpl final : public ConnectionLoop::Handler {
 public:
  static Result<std::unique_ptr<SenderImpl>> connect(const SenderOptions& options, SenderEnvironment environment);
  ~SenderImpl() override;
  SenderImpl(const SenderImpl&) = delete;
  SenderImpl& operator=(const SenderImpl&) = delete;

  const std::vector<ReceiverInfo>& receivers() const noexcept { return receivers_; }
  bool wants_value(std::string_view name) const { return value_names_.find(name).has_value(); }
  Status open(const UpdateOptions& options);
  std::vector<std::uint32_t> order() const { return groups_.order(); }
  Status add(std::string_view name, const TensorView& view);
  Status add_async(std::string_view name, TensorView view, std::function<void(const Status&)> released);
  Result<UpdateReport> finish();
  void abort(const std::string& reason);
  Result<UpdateReport> resolve_in_doubt();
  Result<std::span<std::byte>> allocate(std::size_t bytes);
  Result<std::span<std::byte>> adopt(UniqueFd descriptor, std::size_t bytes);
  Status release(std::span<std::byte> memory);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using PerReceiver = std::function<bool(const ReceiverFlow&)>;
  enum class Phase : std::uint8_t { kOpen, kManifest, kTransfer, kEnd, kPrepare, kCommit };

  /// Bytes per dimension, in place: there is one for each of perhaps a hundred thousand small tensors.
  struct Strides {
    std::array<std::int64_t, limits::kDimsMax> bytes{};
    std::size_t rank = 0;
    std::span<const std::int64_t> span() const noexcept { return {bytes.data(), rank}; }
  };
  /// A tensor that was checked and waits to be packed.
  struct Job {
    std::uint32_t entry = 0;
    const std::byte* data = nullptr;
    Strides strides;
    std::shared_ptr<ReleaseOnce> release;
  };
  struct Registered {
    MemoryId memory;
    std::span<std::byte> bytes;
  };
  /// What a receiver answered to this sender's manifest.
  struct Answer {
    Digest manifest;
    Digest plan_key;
    bool committed = false;  // an update with it was committed, so the receiver knows it by its digest
  };

  SenderImpl(SenderOptions options, SenderEnvironment environment, std::vector<ReceiverLink> links, DataPathKind path, WakeEvent wake);

  // sender_impl.cpp: life, the loop's side, failures and waits
  void on_event(std::size_t connection, ControlEvent event) override;
  void send_ready() override;
  void on_round() override;
  void on_message(std::size_t r, std::span<const std::byte> bytes);
  void pump(std::size_t r);
  void send_pings();
  /// Takes the steps of finish() that follow from answers alone, on whichever thread sees them first. Needs mutex_.
  void go_on();
  bool all_receivers(const PerReceiver& hold) const;
  /// Sends what is queued, here if the loop's thread is not at it. Lets go of `lock` meanwhile.
  void send_queued(Lock& lock);
  /// Waits until `done` holds, or `ms_max` is over. `done` reads what mutex_ guards; whoever changes that calls wake_sleepers().
  void sleep(Lock& lock, const std::function<bool()>& done, std::optional<std::int64_t> ms_max = std::nullopt);
  /// Wakes who has something to wake for: an update is a chain of short waits, and a thread that wakes in vain takes a core from the one
  /// that is waited for. Needs mutex_.
  void wake_sleepers();
  /// Makes `failure` the update's outcome and tells every receiver; a second failure changes nothing. Needs mutex_.
  void fail(wire::Failure failure);
  Status fail_here(const Status& status);
  Status outcome() const;
  /// What is waited for, and whether it has come from a receiver.
  struct Due {
    std::string_view what;
    PerReceiver answered;
  };
  /// Waits until `done`, for as long as there is progress. `due` is asked again when the deadline has passed.
  Status wait_for(Lock& lock, bool in_session, const std::function<Due()>& due, const std::function<bool()>& done);
  Status wait(Lock& lock, bool in_session, std::string_view due, const std::function<bool()>& done, const PerReceiver& answered);
  Status wait_all(Lock& lock, std::string_view due, const PerReceiver& answered);
  Status deadline_status(const Due& due, wire::Failure& failure) const;
  void drop_released(Lock& lock);
  double ms_since(std::int64_t ns) const { return static_cast<double>(environment_.clock->now_ns() - ns) / 1e6; }
  static std::string_view phase_name(Phase phase) noexcept;
  std::string all_names(const PerReceiver& which) const;

  // sender_open.cpp: from OPEN to BEGIN
  Status check_update(const UpdateOptions& options) const;
  Status settle_last_update();
  void begin_update(const UpdateOptions& options);
  Status open_session(const UpdateOptions& options);
  /// The connected ranks of a receiver's engine, when there are others.
  std::vector<std::uint32_t> repaired_ranks(std::size_t r) const;
  Status check_expert_maps();
  Status join_session(const UpdateOptions& options);
  /// Needs mutex_.
  void push_manifests();
  Status await_answers();
  Status rejected_status() const;
  Status take_answers();
  Status take_answer(std::size_t r, wire::Accept accept);
  Status start_transfer();

  // sender_values.cpp: what receivers must know beforehand
  static wire::ValueNames asked_of(std::span<const ReceiverInfo> receivers);
  /// `alone`: no other sender of this update.
  Status read_values(std::span<const SenderEntry> given, bool alone);
  Result<wire::EntryValue> read_value(std::uint32_t entry, const TensorView& view) const;

  // sender_transfer.cpp: tensors, buckets, END and COMMIT
  Result<Job> admit(std::string_view name, const TensorView& view);
  static Status check_view(const wire::ManifestEntry& entry, const Job& job);
  Status pack(const Job& job);
  Status pack_cell(const Job& job, const CellSource& source, const Cell& cell);
  Status make_room(std::int64_t bytes);
  Status send_bucket();
  const Registered* registered_at(const Job& job) const;
  Status start_packing_thread();
  void run_packing_thread();
  Status drain_packing();
  Status end_transfer();
  Due due_after_end() const;
  Result<UpdateReport> commit();
  UpdateReport make_report() const;

  // sender_memory.cpp: staging buffers and registered memory
  Status ensure_staging();
  Status announce(MemoryId memory);
  void forget(MemoryId memory);
  Result<std::span<std::byte>> keep_registered(const Result<MemoryId>& memory);

  // sender_in_doubt.cpp
  Result<SessionId> doubtful_session();

  // Set once.
  const SenderOptions options_;
  const SenderEnvironment environment_;
  const DataPathKind path_;
  const std::int64_t deadline_ms_;
  std::vector<ReceiverInfo> receivers_;
  wire::ValueNames value_names_;

  // The caller's thread alone; read by the packing thread while an update is open.
  EntryTable entries_;
  std::vector<std::uint32_t> asked_;      // entries whose values are asked for
  std::optional<Digest> asked_manifest_;  // that `asked_` was made for
  std::vector<wire::EntryValue> values_;  // of `asked_`, in this update
  std::vector<bool> added_;
  std::size_t next_entry_ = 0;  // behind the one that was added last
  GroupOrder groups_;
  std::vector<Answer> answers_;            // per receiver
  BucketFiller::WantedLists wanted_;       // per receiver, of `answers_`
  std::optional<BucketPlan> plan_;         // of `wanted_`
  std::int64_t planned_bucket_bytes_ = 0;  // that `plan_` was made for, as is the next
  Unwanted planned_unwanted_ = Unwanted::kRefuse;
  std::int64_t bucket_bytes_ = 0;
  std::vector<std::string> senders_;  // as open() was given them
  bool lead_ = false;
  bool alone_ = false;  // no other sender brings anything
  Unwanted unwanted_ = Unwanted::kRefuse;
  WeightVersion version_;
  std::int64_t opened_ns_ = 0;
  std::int64_t phase_ns_ = 0;  // as phases_, the loop's too while the caller is in finish(); then guarded by mutex_
  bool transfer_started_ = false;
  wire::Phases phases_;

  std::mutex pack_mutex_;
  std::unique_ptr<DataSource> source_;  // this and what follows guarded by pack_mutex_
  std::int64_t staging_bytes_ = 0;      // of each staging buffer, 0 before the first
  std::vector<Registered> registered_;
  Packer packer_;
  BucketFiller filler_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<const std::function<bool()>*> sleepers_;  // what they wait for; guarded by mutex_
  SessionFlow flow_;                                    // this and what follows guarded by mutex_
  StagingPool pool_;
  std::optional<Status> failure_;
  Phase phase_ = Phase::kOpen;
  ProgressDeadline deadline_;
  std::int64_t pinged_ns_ = 0;
  std::map<std::pair<std::size_t, MemoryId>, Status> acknowledged_;
  std::vector<std::shared_ptr<ReleaseOnce>> dropped_;  // to be let go of outside the lock
  std::deque<Job> queue_;
  bool packing_ = false;  // the packing thread holds a job
  bool stop_packing_ = false;

  std::atomic<std::uint64_t> progress_{0};
  std::thread packing_thread_;
  std::unique_ptr<ConnectionLoop> loop_;  // last: its thread uses all of the above
};

}  // namespace headrace
