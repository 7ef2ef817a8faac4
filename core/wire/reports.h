#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/base/fingerprint_sum.h"
#include "core/base/shape.h"
#include "core/base/weight_version.h"

// What users of a receiver or a sender see of the wire: states, receipts, and what a receiver says of itself. Everything else is in
// messages.h; docs/protocol.md is the twin of both.
namespace headrace {
namespace [[gnu::visibility("default")]] wire {

/// States of a receiver's session, as PONG and STATUS report them.
enum class SessionState : std::uint8_t { kIdle = 0, kOpen = 1, kApplying = 2, kPrepared = 3, kTorn = 4, kInDoubt = 5 };
std::string_view session_state_name(SessionState state) noexcept;

struct Phases {         // milliseconds
  double manifest = 0;  // OPEN to the last ACCEPT
  double transfer = 0;  // first bucket to the last END
  double prepare = 0;   // last END to PREPARED
  double commit = 0;    // PREPARED to COMMITTED
};

/// A storage of which something else was proved than its bytes.
struct OutputProof {
  std::string name;
  std::string proof;  // "converted" or "inputs"
};

/// What one receiver says about one update.
struct Receipt {
  std::string engine;
  std::uint32_t rank = 0;
  WeightVersion version;
  std::uint64_t session = 0;
  std::string data_path;
  std::string device;
  std::uint64_t wire_bytes = 0;      // bytes that this receiver read out of buckets
  std::uint64_t applied_bytes = 0;   // bytes written to live storage
  std::uint64_t tensors = 0;         // manifest entries with bytes for this receiver
  std::uint64_t expert_tensors = 0;  // those of them that are experts
  std::uint64_t buckets = 0;
  std::uint64_t batches = 0;       // executor calls
  std::uint64_t copies = 0;        // nests executed
  std::uint64_t runs = 0;          // expert runs
  std::uint64_t run_experts = 0;   // experts in them
  std::uint64_t fingerprints = 0;  // live values compared with the senders' sums, each repeat and replica by itself
  std::uint64_t engram_calls = 0;  // finish work for host tables
  bool plan_cached = false;
  bool proven = false;  // every fingerprint was equal
  // Storages that this update wrote, by what was proved of them: their bytes as they were sent, what these were converted to, or only what
  // a staged group's hook was given.
  std::uint64_t proved_bytes = 0;
  std::uint64_t proved_converted = 0;
  std::uint64_t proved_inputs = 0;
  std::vector<OutputProof> outputs;  // those that are not `bytes`, at most limits::kOutputsMax
  Phases phases;
};

/// Tensors that a receiver must know before it accepts: `<prefix>E.<suffix>` for E < experts; of no experts: `suffix`, tied to `prefix`.
struct ValueRule {
  std::string prefix;  // does not end in a digit
  std::string suffix;
  std::uint32_t experts = 0;
  bool operator==(const ValueRule&) const = default;
};

struct Welcome {
  std::uint32_t protocol = 0;
  std::string job;
  std::string engine;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;  // of the engine
  std::string boot_id;
  std::vector<std::string> devices;
  std::vector<std::string> data_paths;
  std::string descriptor_path;  // empty: none
  Digest table;
  Digest expert_map;
  std::vector<std::string> scopes;
  std::uint32_t state = 0;          // SessionState
  std::uint64_t state_session = 0;  // the session of Prepared, InDoubt or Torn; else the last committed one
  std::string version;              // RUN/STEP of what is served; empty: none
  std::int64_t bucket_bytes_max = 0;
  std::int64_t deadline_ms = 0;
  std::vector<ValueRule> values;  // what a MANIFEST must say beside its entries
};

/// What a receiver holds of one checkpoint tensor.
struct TensorFingerprint {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;
  Box box;
  std::uint32_t copies = 1;  // repeats and replicas, all equal when `equal`
  bool equal = true;
  FingerprintSum sum;  // of the first copy
};

enum class OverlapRule : std::uint8_t {
  kRefuse = 0,           // two senders with the same bytes are a defect
  kFirstSenderOwns = 1,  // equal boxes are taken from the sender that stands first in OPEN
};

struct StatusReply {
  std::string job;
  std::string engine;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint64_t pid = 0;
  std::uint32_t state = 0;
  std::string version;
  std::string attempted_version;  // of the open or torn session
  bool serving = false;           // the engine's guard is open
  std::uint64_t updates = 0;
  std::uint64_t storages = 0;
  std::uint64_t storage_bytes = 0;
  std::uint64_t engram_calls = 0;
  std::uint64_t memory_extra_bytes_max =
      0;  // peak of anonymous and shared resident memory with staging, less storage and the value before the first update
  Digest table;
  std::string family;
  std::string layout;
  std::string variant;
  std::string last_failure;
  std::uint64_t discards = 0;  // how often the content of live storage was lost, announced or found
};

}  // namespace wire
}  // namespace headrace
