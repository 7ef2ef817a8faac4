#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/weight_version.h"
#include "core/device/device.h"
#include "core/wire/reports.h"
#include "receiver/models/family.h"
#include "receiver/storage_table.h"

namespace [[gnu::visibility("default")]] headrace {

/// What a group's hook works on. Everything stays valid until the hook returns.
struct StagedCall {
  std::string_view group;
  std::span<const std::span<const std::byte>> inputs;  // one per entry, in the group's order: packed bytes of what this rank wants
  std::span<std::byte> work;                           // StagedGroup::work_bytes, any content
  std::span<const std::span<std::byte>> outputs;       // one per output, in the group's order: live storage
};

/// Makes the outputs of a whole group, in place. On the receiver's apply thread, ordered with all copies; it may be called again with the
/// same or other inputs. A failure leaves the rank torn.
using StagedHook = std::function<Status(const StagedCall&)>;
/// By StagedGroup::hook.
using StagedHooks = std::map<std::string, StagedHook, std::less<>>;

/// What an engine tells the receiver, and what it is asked to do. All are optional; they are called on the receiver's apply thread, never
/// under a lock, and must return in bounded time. An exception from one is a failure of the session with its text.
struct EngineHooks {
  /// Before OPEN is answered: ok attests that no forward pass runs and none will start until the guard opens. Missing: the caller promises
  /// it.
  std::function<Status()> quiescent;
  /// Where every storage lies now. Missing: where the table says.
  std::function<std::vector<StorageLocation>()> locate;
  /// Which logical expert each physical slot holds now, over all ranks: [MoE layer][physical slot], layers in the order of
  /// ModelLayout::experts. Asked after `quiescent`, with EPLB
  /// frozen and drained until the guard opens, again before PREPARED, and after notify(kExpertRebalance). Missing: where the layout says.
  std::function<std::vector<std::vector<std::int32_t>>()> expert_map;
  /// Which of ModelLayout::launch_constants captured graphs have by value, and these values, by name; one that is left out is in no graph.
  /// Asked at each OPEN, after `expert_map`. Missing: graphs have what was committed last, and before the first update anything is taken.
  std::function<std::map<std::string, double>()> launch_constants;
  /// After the last byte and its proof, before PREPARED: refresh what is derived from the weights, in place.
  std::function<Status()> derive;
  /// Before `derive`, once, and only if rows of host-resident tables (scope "tables") arrived: page work, barriers, whatever the tables
  /// need.
  std::function<Status()> finish_tables;
  /// After COMMIT: invalidate caches. A failure closes the guard.
  std::function<Status()> committed;
  /// What makes the outputs of the layout's staged groups; each group's hook must be there.
  StagedHooks staged{};
};

struct ReceiverOptions {
  std::string job;
  std::string engine = "engine-0";
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;                               // of this engine
  std::string endpoint;                                  // empty: ipc in the run directory; or "tcp://127.0.0.1:PORT"
  std::vector<std::string> data_paths{"shm", "inline"};  // in order of preference
  std::uint32_t threads = 1;                             // that copy and fingerprint; 0: one for each core, up to 4
  std::uint32_t credits = 2;                             // buckets on the way per sender
  std::int64_t bucket_bytes_max = 0;                     // 0: the limit
  std::int64_t deadline_ms = 0;                          // without progress; 0: the default
  bool require_proof = true;  // false: also commits updates whose senders bring no fingerprints; for measuring only
  /// Checkpoint names that an update need not bring: fnmatch patterns.
  std::vector<std::string> optional_names;
};

/// One tensor for the plain call: its checkpoint name and packed row-major bytes.
struct NamedView {
  std::string_view name;
  Dtype dtype = Dtype::kU8;
  std::span<const std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// What an engine does between updates that concerns its weights. kRecapture, before graphs are captured again: the next update may bring
/// other launch constants.
enum class EngineEvent : std::uint8_t { kSleep, kDiscard, kExpertRebalance, kLoraLoad, kForeignReload, kRecapture };

/// A place in the row of sessions that end at a receiver: before the next one. Of the receiver that gave it.
struct UpdateMark {
  std::uint64_t ended = 0;
};

struct WaitOptions {
  std::optional<UpdateMark> since;  // where to look from, so that no session is missed that ends before the call; none: from the call
  std::int64_t deadline_ms = 0;     // without a sign of progress: the call, and each step of a session of that version; 0: the receiver's
};

/// A rank's end of an update: takes buckets from senders and writes them into live storage, in place and proven. One progress thread owns
/// the session; the public calls may come from any one thread at a time, but those that wait for an update from any number of them.
class Receiver {
 public:
  /// Writes the layout's constants, claims the place in the run directory and starts listening. `table` is sealed and lists the storages of
  /// `layout` under its names; `device` and the memory outlive the receiver. kFailedPrecondition: somebody else serves this rank;
  /// kInvalidArgument: table and layout do not fit, with every difference.
  static Result<std::unique_ptr<Receiver>> start(ReceiverOptions options, ModelLayout layout, const StorageTable& table, Device& device,
                                                 EngineHooks hooks = {});
  /// Stops listening; senders of an open session see a lost peer.
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  const std::string& endpoint() const noexcept;
  wire::StatusReply status() const;
  /// Of every checkpoint tensor that this rank holds a part of, read from live storage, in order with what writes it.
  Result<std::vector<wire::TensorFingerprint>> fingerprints() const;

  // The plain call, for engines that hand over named tensors themselves. Same index, runs and executor; every call is checked before its
  // own first byte.

  /// kFailedPrecondition while a session is open.
  Status begin(const WeightVersion& version);
  /// Writes these tensors; returns when their bytes are in place and may be reused. After an error in the second or a later call the state
  /// is torn.
  Status load(std::span<const NamedView> tensors);
  /// Checks coverage and fingerprints against what load() was given, runs the hooks, publishes the version.
  Result<wire::Receipt> finish();
  Status abort(const std::string& reason);

  // Waiting for an update that senders bring.

  UpdateMark mark() const;
  /// Returns when `version` is committed here, with its receipt: at once where it is held already, otherwise when the `committed` hook has
  /// returned. The first session of that version that ended since the mark decides, also where others followed; only the last 16 are
  /// remembered, and the last OPEN that was refused. kFailedPrecondition: that session failed, was refused, or is in doubt, with the state
  /// and all that the failure says; kDeadlineExceeded: no sign of progress, which counts until it is committed and not while the hook runs;
  /// kCancelled: `stop` was asked for, or end_waits() called. Deadlines are looked at ten times a second. Not in a hook.
  Result<wire::Receipt> wait_for(const WeightVersion& version, const WaitOptions& options = {}, const std::stop_token& stop = {}) const;
  /// Ends all waits, also those that begin later, with kCancelled and this reason. Before a receiver goes that others may be waiting for.
  void end_waits(const std::string& reason);

  /// Tells of an event outside any update; an open session is ended as the state table says.
  Status notify(EngineEvent event);

  /// What stands behind this face; public for tests that put another channel or clock below it.
  class Impl;

 private:
  explicit Receiver(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace headrace
