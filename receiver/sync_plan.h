#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/digest.h"
#include "core/wire/messages.h"
#include "kernels/executor.h"
#include "kernels/fingerprint.h"
#include "receiver/storage_table.h"
#include "receiver/weight_index.h"

namespace headrace {

/// Keys of expert runs are one per (rule, placement); no layout has more placements of one tensor than this.
inline constexpr std::uint32_t kPlacementsMax = 8;

/// One sender's share of an update.
struct SenderPart {
  std::string sender;
  Digest digest;  // of the exact manifest bytes
  std::vector<wire::ManifestEntry> entries;
};

/// Whether a name matches one of these fnmatch patterns.
bool matches_any(std::span<const std::string> patterns, const std::string& name);

struct PlanOptions {
  std::vector<std::string> scopes;
  wire::OverlapRule overlap = wire::OverlapRule::kRefuse;
  std::vector<std::string> optional_names{};    // fnmatch patterns
  bool check_coverage = true;                   // false: part of an update, as one call of load() brings it
  std::shared_ptr<const ExpertMaps> experts{};  // where experts live now; none: as the layout has them
};

/// What happens to one entry of one sender on this rank.
struct PlanEntry {
  std::int32_t tensor = -1;  // index into SyncPlan::tensors(); -1: nothing is wanted of it
  bool ignored = false;      // the engine drops the name
  std::vector<Box> wanted;   // disjoint, in coordinates of the tensor
};

/// One checkpoint tensor with bytes for this rank, whoever brings them.
struct PlanTensor {
  std::uint32_t rule = 0;
  std::int32_t expert = -1;
  std::span<const std::int32_t> slots;                           // in the plan's own maps
  TensorKey key;                                                 // of the tensor as it is sent
  std::vector<std::pair<std::uint32_t, std::uint32_t>> entries;  // (sender, entry) that bring it
  TensorKey live_key;                                            // of the tensor as storage holds it; another only with a cast
  ElementCast cast{};
  std::int64_t elem_bytes = 1;  // of the tensor as it is sent
};

/// A staged group as one sender brings it.
struct PlanGroup {
  std::uint32_t group = 0;             // index into ModelLayout::groups
  std::vector<std::uint32_t> entries;  // of the sender
  std::vector<std::uint32_t> tensors;  // of the plan
  std::int64_t elements = 0;           // wanted of all of them
};

/// The nests of a rule, cut once for the whole of what a rank wants, and where boxes may be cut. Precomputed for each rule of an index.
struct RuleGeometry {
  TensorGeometry source;
  std::vector<std::int64_t> granule;
  std::vector<Box> boxes;           // distinct boxes of the placements, disjoint
  std::vector<StridedCopy> packed;  // per placement: from the packed box to slot 0
  std::int64_t wanted_bytes = 0;
};

/// The geometry of every rule. kInvalidArgument names rules whose nests, boxes or storages do not fit. Immutable; any thread.
class PlanGeometry {
 public:
  static Result<PlanGeometry> build(const WeightIndex& index, const StorageTable& table);
  const RuleGeometry& of(std::uint32_t rule) const { return rules_[rule]; }
  /// Address of a layout's storage.
  std::byte* storage(std::uint32_t index) const { return index == kScratchStorage ? nullptr : storages_[index]; }

 private:
  std::vector<RuleGeometry> rules_;
  std::vector<std::byte*> storages_;
};

/// What the proof of an update says of a storage: its bytes are what was sent, what they were converted from was, or what a hook made it
/// from was.
enum class StorageProof : std::uint8_t { kBytes, kConverted, kInputs };

struct WrittenStorage {
  std::uint32_t storage = 0;  // index into ModelLayout::storages
  StorageProof proof = StorageProof::kBytes;
};

/// Everything that is known about an update before its first byte: all senders' manifests resolved against index and table. Immutable and
/// pure.
class SyncPlan {
 public:
  /// The plan, or every defect of the manifests together.
  struct Outcome {
    std::shared_ptr<const SyncPlan> plan;  // shared: kept for the next update while an apply in flight still uses it; null with defects
    std::vector<wire::Failure> defects;    // at most limits::kDefectsMax of them
    std::uint64_t defects_total = 0;
  };
  /// `index` and `geometry` outlive the plan.
  static Outcome compile(const WeightIndex& index, const PlanGeometry& geometry, const Digest& table, std::vector<SenderPart> parts,
                         const PlanOptions& options);
  /// The hash that names a plan: of senders, manifest digests, table, expert map, scopes and overlap rule.
  static Digest key_of(const WeightIndex& index, const Digest& table, std::span<const SenderPart> parts, const PlanOptions& options);

  const Digest& key() const noexcept { return key_; }
  std::span<const SenderPart> parts() const noexcept { return parts_; }
  const ExpertMaps& experts() const noexcept { return *experts_; }
  std::span<const PlanEntry> entries(std::uint32_t sender) const { return entries_.at(sender); }
  std::span<const PlanTensor> tensors() const noexcept { return tensors_; }
  /// Groups that a sender brings.
  std::span<const PlanGroup> groups(std::uint32_t sender) const { return groups_.at(sender); }
  /// The storages that the plan writes, each once, in the order of the layout.
  std::span<const WrittenStorage> written() const noexcept { return written_; }
  /// Says in a receipt what the plan is about: tensors, experts among them, storages by what is proved of them.
  void describe(wire::Receipt& receipt) const;
  /// Whether rows of host-resident tables are among the tensors.
  bool brings_tables() const noexcept { return brings_tables_; }
  /// Whether any tensor is converted.
  bool converts() const noexcept { return converts_; }
  /// The answer to one sender; to one that has kept what was wanted of its manifest (`known`), without that list.
  wire::Accept accept_for(std::uint32_t sender, bool known = false) const;
  const wire::ManifestEntry& entry(std::uint32_t sender, std::uint32_t index) const { return parts_[sender].entries[index]; }
  const WeightIndex& index() const noexcept { return *index_; }
  const PlanGeometry& geometry() const noexcept { return *geometry_; }

  /// One nest and the (parameter, shard) that it belongs to.
  struct KeyedJob {
    std::uint32_t key = 0;
    bool expert = false;
    CopyJob job;
  };
  /// Appends the nests that bring `box` of a tensor from `source` (its element box.lo at byte 0, `strides` bytes or packed when empty) to
  /// all its places; those of a staged group lie in `scratch`. kInvalidArgument when the box is not cut at the granule or lies in no
  /// placement as a whole.
  Status append_jobs(const PlanTensor& tensor, const Box& box, const std::byte* source, std::span<const std::int64_t> strides,
                     std::vector<KeyedJob>& jobs, std::byte* scratch = nullptr) const;
  /// The nest that reads the same bytes as append_jobs() in terms of the tensor: its destination side counts bytes of the whole tensor.
  Result<StridedCopy> tensor_nest(const PlanTensor& tensor, const Box& box, std::span<const std::int64_t> strides) const;

 private:
  friend class PlanCompiler;
  SyncPlan() = default;

  const WeightIndex* index_ = nullptr;
  const PlanGeometry* geometry_ = nullptr;
  Digest key_;
  std::shared_ptr<const ExpertMaps> experts_;  // shared: the slots of tensors_ lie in it, and the session that agreed on it may be over
  std::vector<SenderPart> parts_;
  std::vector<std::vector<PlanEntry>> entries_;
  std::vector<PlanTensor> tensors_;
  std::vector<std::vector<PlanGroup>> groups_;  // per sender
  std::vector<WrittenStorage> written_;
  std::uint64_t expert_tensors_ = 0;
  bool converts_ = false;
  bool brings_tables_ = false;
  std::vector<std::uint64_t> ignored_;  // entries that the engine drops, per sender
};

}  // namespace headrace
