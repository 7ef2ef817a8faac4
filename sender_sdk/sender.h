#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "core/base/status.h"
#include "core/base/unique_fd.h"
#include "core/base/weight_version.h"
#include "core/wire/reports.h"

namespace [[gnu::visibility("default")]] headrace {

/// Where and as whom a trainer process connects.
struct SenderOptions {
  std::string job;
  std::string sender = "trainer-0";    // unique within the job
  std::vector<std::string> endpoints;  // "ipc://PATH", "tcp://127.0.0.1:PORT"; empty: every live rank in the job's run directory
  std::string data_path = "auto";      // auto | shm | inline; auto takes the best that every receiver can do
  std::int64_t bucket_bytes = 0;       // 0: the default; receivers may lower it
  std::uint32_t staging_buffers = 0;   // 0: the default
  std::uint32_t threads = 1;           // for packing large tensors; 0: one for each core, up to 4
  bool fingerprints = true;            // false only for measuring: the receiver then refuses to call the update proven
  std::int64_t connect_timeout_ms = 10'000;
  std::int64_t deadline_ms = 0;  // without progress; 0: the default
};

/// Where the bytes of one entry lie. Element (i0, i1, ...) of the entry's box, counted from its corner, is at data + sum_j i_j *
/// strides[j].
struct TensorView {
  const void* data = nullptr;
  std::vector<std::int64_t>
      strides;  // bytes, one per dimension; empty: packed row-major. Innermost stride may be any; nothing is copied raw that is not packed
};

/// One tensor, or the box of one, that this sender will bring.
struct SenderEntry {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;             // of the whole tensor
  std::optional<Box> box;  // none: the whole tensor
  /// Where its bytes lie already at open(). Needed of those for which wants_value() is true, and read of no others: whoever holds its
  /// tensors gives it for all. What add() brings later must be the same bytes.
  std::optional<TensorView> value{};
};

struct UpdateOptions {
  WeightVersion version;
  std::vector<SenderEntry> entries;  // in any order
  std::vector<std::string> scopes{"target"};
  std::vector<std::string> senders;  // all senders of this update, the lead first; empty: this one alone
  wire::OverlapRule overlap = wire::OverlapRule::kRefuse;
  /// true: the connected ranks are brought up to `version`, which all other ranks of their engine hold and go on holding (one rank was
  /// started anew, or is torn). The guard opens when all hold it again.
  bool repair = false;
};

/// Names of ignored entries that a report lists; the count tells of more.
inline constexpr std::size_t kIgnoredNamesMax = 100;

/// What an update did, over all receivers.
struct UpdateReport {
  WeightVersion version;
  std::uint64_t session = 0;
  std::uint64_t wire_bytes = 0;     // packed (or read in place) once, however many receivers read them
  std::uint64_t applied_bytes = 0;  // summed over receivers
  std::string data_path;
  std::uint64_t buckets = 0;
  std::uint64_t registered_bytes = 0;      // of wire_bytes, read in place from registered memory
  bool proven = false;                     // every receiver found every fingerprint equal
  wire::Phases phases_ms;                  // as this sender saw them: whole phases, all receivers
  double total_ms = 0;                     // open() to the last COMMITTED
  std::uint64_t ignored = 0;               // entries that every engine drops: nothing of them was sent
  std::vector<std::string> ignored_names;  // the first kIgnoredNamesMax of them
  std::vector<wire::Receipt> receipts;     // one per receiver
};

/// A receiver that this sender is connected to.
struct ReceiverInfo {
  std::string endpoint;
  wire::Welcome welcome;
};

/// A trainer's end of an update. One thread calls it at a time; a thread of its own keeps the connections alive, so a caller may take its
/// time between calls (up to the deadline). Every failure is sticky until the next open(); it names rank, phase, bucket and tensor, and has
/// been told to all receivers. A call refused for its own arguments (an unknown or repeated name, a view that does not fit, missing entries
/// at finish()) changes nothing: the update goes on.
class Sender {
 public:
  /// Connects to every receiver and agrees on protocol and data path. kUnavailable: no receiver; kFailedPrecondition: another job or host;
  /// kUnsupported: no data path in common, with what both sides have.
  static Result<std::unique_ptr<Sender>> connect(const SenderOptions& options);
  ~Sender();
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  const std::vector<ReceiverInfo>& receivers() const noexcept;
  /// Whether a receiver must know what this tensor holds before it accepts an update: global scales and the like, of a few bytes each.
  bool wants_value(std::string_view name) const;

  /// Opens an update and returns when all receivers have accepted all senders' manifests and may be sent buckets. The lead (first of
  /// `senders`) opens the session, the others wait for it. kInvalidArgument carries every receiver's defects; then nothing was written
  /// anywhere. An entry whose value is wanted and not given is refused by name before anything is sent.
  /// `options` are read only: a caller that keeps them spares the copy of all entries in every step.
  Status open(const UpdateOptions& options);
  /// Of an open update: UpdateOptions::entries, as indices, in an order that keeps staged groups together. Theirs, where there is no group.
  std::vector<std::uint32_t> order() const;
  /// Hands over one entry. The bytes have been packed when it returns, unless they lie in registered memory: those are read in place and
  /// must not change until finish() returned. Each entry once, in any order, but for those of a staged group, which come one after the
  /// other: an entry of another group in between is refused (kFailedPrecondition). Blocks while all staging buffers are on the way.
  Status add(std::string_view name, const TensorView& view);
  /// The same without waiting for a staging buffer: `view` must stay valid until `released` is called (once, from any thread, also after a
  /// failure).
  Status add_async(std::string_view name, TensorView view, std::function<void(const Status&)> released);
  /// Ends the update: every entry must have been added. Returns when every rank has committed the version.
  Result<UpdateReport> finish();
  /// Gives the update up and tells all receivers why. Ranks that have written are torn then.
  void abort(const std::string& reason);
  /// After a lead was lost between PREPARED and COMMIT: finishes that session when every rank has it prepared or committed.
  /// kFailedPrecondition otherwise, with the state of each rank; a full update is then the way out.
  Result<UpdateReport> resolve_in_doubt();

  /// Registered memory: tensors whose views lie in it are read by the receivers in place, without packing. Lives until release() or the
  /// Sender's end. kUnsupported on a data path that cannot share memory.
  Result<std::span<std::byte>> allocate(std::size_t bytes);
  /// Registers memory of the caller, given as a memfd of this size; it is sealed against shrinking. The span is our own mapping of it.
  Result<std::span<std::byte>> adopt(UniqueFd descriptor, std::size_t bytes);
  /// kInvalidArgument when `memory` is not what allocate() or adopt() returned; kFailedPrecondition during an update.
  Status release(std::span<std::byte> memory);

 private:
  class Impl;
  explicit Sender(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace headrace
