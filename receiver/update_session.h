#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/ids.h"
#include "core/transport/control.h"
#include "core/wire/messages.h"
#include "receiver/applier.h"
#include "receiver/coverage.h"
#include "receiver/global_values.h"
#include "receiver/sync_plan.h"

namespace headrace {

/// One named sender of a session, connected or not.
struct SessionSender {
  std::string name;
  std::optional<PeerId> peer;
  std::optional<SenderPart> part;
  bool known_manifest = false;             // it sent only the digest
  std::vector<wire::EntryValue> values{};  // that its MANIFEST brought, by entry
  bool confirmed = false;
  bool ended = false;
  std::uint64_t buckets = 0;         // taken: the sequence number that comes next
  std::uint64_t consumed = 0;        // of them answered
  std::uint64_t progress = 0;        // as its last PING said
  const PlanGroup* group = nullptr;  // the staged group that has begun and is not whole
  std::int64_t group_left = 0;       // elements that it still wants
  std::span<std::byte> scratch{};    // where its groups are gathered; empty when it brings none
};

/// One update: who takes part, what was agreed, what has arrived. A value on the progress thread; it decides nothing about states
/// (session_table.h).
struct UpdateSession {
  UpdateSession(SessionId session_id, WeightVersion session_version, const Clock& session_clock, std::int64_t deadline_ms)
      : id(session_id),
        version(std::move(session_version)),
        clock(&session_clock),
        deadline(session_clock, deadline_ms),
        opened_ns(clock->now_ns()) {}

  SessionId id;
  WeightVersion version;
  PlanOptions options;
  std::vector<SessionSender> senders;  // the lead first; empty for the plain call
  bool opened = false;                 // the engine has attested, storage is in place
  bool begun = false;                  // every sender confirmed
  bool proving = false;                // the proof stands behind the buckets on the apply thread, or is done
  std::shared_ptr<const SyncPlan> plan;
  std::shared_ptr<const std::vector<AskedValue>> asked;  // entries whose values are asked for, by sender and entry
  std::optional<ValueTable> values;                      // none where the layout asks for none
  std::unique_ptr<Coverage> coverage;
  ExpectedSums sums;
  std::uint64_t sums_given = 0;            // entries with a fingerprint so far
  std::vector<FingerprintSum> input_sums;  // of the entries of staged groups, as the hooks were given them
  std::vector<CastSums> cast_sums;         // of the tensors that are converted, as their bytes were read
  wire::Receipt receipt;
  const Clock* clock;
  ProgressDeadline deadline;
  std::int64_t opened_ns;
  std::int64_t phase_ns = 0;  // start of the present phase

  bool plain() const noexcept { return senders.empty(); }
  SessionSender* find(const PeerId& peer) {
    for (SessionSender& sender : senders)
      if (sender.peer == peer) return &sender;
    return nullptr;
  }
  SessionSender* find(std::string_view name) {
    for (SessionSender& sender : senders)
      if (sender.name == name) return &sender;
    return nullptr;
  }
  bool all_ended() const noexcept {
    return std::all_of(senders.begin(), senders.end(), [](const SessionSender& s) { return s.ended; });
  }
  /// Every sender has ended, and the work of every bucket is done and counted.
  bool applied() const noexcept {
    return all_ended() && std::all_of(senders.begin(), senders.end(), [](const SessionSender& s) { return s.consumed == s.buckets; });
  }
  /// Everything has come that the proof needs. It follows the buckets on their thread, so it waits for one's completion only where that
  /// brings sums: of what was converted, or given to the hook of a group.
  bool provable() const noexcept { return !proving && all_ended() && ((cast_sums.empty() && input_sums.empty()) || applied()); }
  std::uint32_t index_of(const SessionSender& sender) const { return static_cast<std::uint32_t>(&sender - senders.data()); }

  /// Adopts a plan: coverage and sums start empty.
  void adopt(std::shared_ptr<const SyncPlan> agreed);
  /// Checks one bucket against plan, coverage and memory, and turns it into nests; nothing is written. On failure `failure` names bucket
  /// and tensor. `resolve` gives the readable bytes of a memory.
  using Resolve = std::function<Result<std::span<const std::byte>>(MemoryId)>;
  Status check_bucket(SessionSender& sender, const wire::Bucket& bucket, std::uint32_t credits, const Resolve& resolve, ApplyWork& work,
                      wire::Failure& failure);
  /// Takes a sender's fingerprints: each wanted entry once, nothing else. An empty list is possible only when nothing is to be proven.
  Status check_end(SessionSender& sender, const wire::End& end, bool require_proof, wire::Failure& failure);
  /// That what MANIFEST said an entry holds sums to what END says of its bytes, where this receiver asked for it.
  Status check_claim(const SessionSender& sender, const wire::EntryFingerprint& fingerprint, wire::Failure& failure) const;
  /// The value that was asked for of an entry; null for none.
  const AskedValue* asked_of(std::uint32_t sender, std::uint32_t entry) const;
  /// Keeps the sender's groups apart: `elements` of an entry of `group` (an index, -1 for none) go into its scratch; with the last of them
  /// the group's run is appended.
  Status check_group(const SessionSender& sender, std::int32_t group) const;
  void take_group(SessionSender& sender, std::int32_t group, std::int64_t elements, ApplyWork& work) const;
  /// Adds what the apply thread did to the receipt and to the sums of conversions.
  void count(const ApplyStats& stats);
  /// Milliseconds since the last call, or since OPEN.
  double lap_ms();
  /// Which senders have not done what is due, for deadline messages.
  std::string waiting_for() const;
};

}  // namespace headrace
