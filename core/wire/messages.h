#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/base/digest.h"
#include "core/base/dtype.h"
#include "core/base/fingerprint_sum.h"
#include "core/base/ids.h"
#include "core/base/shape.h"
#include "core/base/status.h"
#include "core/base/weight_version.h"
#include "core/wire/reports.h"

// The messages of one update, as values. docs/protocol.md is their twin: who sends what when, and what each field means on the wire.
// Names of fields here are the keys on the wire (core/wire/fields.h).
namespace headrace::wire {

/// Numbers on the wire; they never change their meaning.
enum class MessageType : std::uint8_t {
  kHello = 1,
  kWelcome = 2,
  kOpen = 3,
  kOpened = 4,
  kManifest = 5,
  kAccept = 6,
  kReject = 7,
  kConfirm = 8,
  kBegin = 9,
  kBucket = 10,
  kConsumed = 11,
  kEnd = 12,
  kPrepared = 13,
  kCommit = 14,
  kCommitted = 15,
  kAbort = 16,
  kError = 17,
  kPing = 18,
  kPong = 19,
  kStatusRequest = 20,
  kStatusReply = 21,
  kFingerprintRequest = 22,
  kFingerprintReply = 23,
  kReadRequest = 24,
  kReadReply = 25,
  kStorageRequest = 26,
  kStorageReply = 27,
};

/// A failure as the other side is told. The first one of a session sticks.
struct Failure {
  std::uint32_t code = 0;  // headrace::Code
  std::string message;
  std::string engine;
  std::int64_t rank = -1;    // receiver's rank; -1 when a sender failed
  std::string sender;        // the sender concerned, if one is
  std::string phase;         // "hello", "open", "manifest", "transfer", "prepare", "commit"
  std::int64_t bucket = -1;  // sequence number, -1 for none
  std::string name;          // tensor
  std::string expected;
  std::string actual;
};

struct Hello {
  std::uint32_t protocol_min = 0;
  std::uint32_t protocol_max = 0;
  std::string job;
  std::string sender;  // unique within the job, e.g. "trainer-0"; empty for tools that only ask
  std::string boot_id;
  std::vector<std::string> devices;
  std::vector<std::string> data_paths;
};

struct Open {
  std::string version;
  std::vector<std::string> scopes;
  std::vector<std::string> senders;    // all of this session, the lead first
  std::uint32_t overlap = 0;           // OverlapRule
  std::vector<std::uint32_t> ranks{};  // the only ones that are updated, of each engine: a repair; empty: all
};

struct Opened {
  std::string version;
  std::vector<std::string> senders;
  Digest expert_map{};  // read after the engine was found quiescent; the same on all ranks of an engine
};

/// One tensor, or a box of one, that a sender brings.
struct ManifestEntry {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;  // of the whole tensor
  Box box;      // what this sender has of it
  bool operator==(const ManifestEntry&) const = default;
};

/// What the whole tensor of an entry holds.
struct EntryValue {
  std::uint32_t entry = 0;
  std::vector<std::byte> bytes;
  bool operator==(const EntryValue&) const = default;
};

struct Manifest {
  Digest digest;                     // of `entries`
  bool known = false;                // entries are left out: the receiver has accepted this digest before
  std::vector<std::byte> entries;    // encode_entries()
  std::vector<EntryValue> values{};  // those that WELCOME asks for, also with `known`
};

/// What a receiver wants of one entry.
struct Wanted {
  bool ignored = false;               // the engine drops this name on purpose; no boxes
  std::vector<std::int64_t> granule;  // where boxes may be cut, elements per dimension
  std::vector<Box> boxes;             // empty: nothing
};

/// Entries of one sender that a receiver computes from together: they come one after the other, with no other group's in between.
struct EntryGroup {
  std::string name;
  std::vector<std::uint32_t> entries;
};

struct Accept {
  Digest digest;  // of the manifest it answers
  Digest plan_key;
  bool known = false;          // `wanted` is left out: the same as last time for this plan key
  std::vector<Wanted> wanted;  // one for each entry
  std::uint64_t ignored = 0;   // entries that this receiver's engine drops
  std::int64_t bucket_bytes_max = 0;
  std::vector<EntryGroup> groups;
};

struct Reject {
  std::uint64_t defects_total = 0;
  std::vector<Failure> defects;
};

struct Confirm {};

struct Begin {
  std::uint32_t credits = 0;  // buckets that may be on the way at a time, per (sender, receiver)
};

/// A box and where its bytes lie.
struct Extent {
  std::uint32_t entry = 0;
  MemoryId memory;
  std::int64_t offset = 0;            // bytes from the start of the memory to element box.lo
  std::optional<Box> box;             // none: the whole of what this receiver wants of the entry, one box
  std::vector<std::int64_t> strides;  // bytes, one per dimension; empty: packed row-major
};

struct Bucket {
  std::uint64_t sequence = 0;  // from 0, per (sender, receiver)
  std::vector<Extent> extents;
};

struct Consumed {
  std::uint64_t sequence = 0;
};

struct EntryFingerprint {
  std::uint32_t entry = 0;
  FingerprintSum sum;
};

struct End {
  std::uint64_t buckets = 0;
  std::vector<EntryFingerprint> fingerprints;  // over exactly this receiver's boxes; entries without bytes for it are left out
};

struct Prepared {
  Receipt receipt;
};

struct Commit {};

struct Committed {
  Receipt receipt;
};

struct Abort {
  Failure failure;
};

struct ErrorReport {
  Failure failure;
  std::uint32_t state = 0;  // SessionState after it
};

struct Ping {
  std::uint64_t progress = 0;  // rises whenever the sender got further
};

struct Pong {
  std::uint64_t progress = 0;
  std::uint32_t state = 0;
};

struct StatusRequest {};

/// Whole values of what lies in live storage, per checkpoint tensor and box.
struct FingerprintRequest {
  std::uint64_t from = 0;  // index of the first tensor
  std::uint64_t count = 0;
};

struct FingerprintReply {
  std::uint64_t total = 0;  // tensors in all
  std::string version;
  std::vector<TensorFingerprint> tensors;
};

/// Bytes of a checkpoint tensor read back from live storage.
struct ReadRequest {
  std::string name;
  Box box;
};

struct ReadReply {
  std::vector<std::byte> bytes;  // packed row-major
};

struct StorageRequest {};

struct StorageInfo {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;
  std::uint64_t address = 0;  // in the receiver's process
  std::uint64_t bytes = 0;
};

struct StorageReply {
  std::uint64_t pid = 0;
  std::vector<StorageInfo> storages;
};

using Body = std::variant<Hello, Welcome, Open, Opened, Manifest, Accept, Reject, Confirm, Begin, Bucket, Consumed, End, Prepared, Commit,
                          Committed, Abort, ErrorReport, Ping, Pong, StatusRequest, StatusReply, FingerprintRequest, FingerprintReply,
                          ReadRequest, ReadReply, StorageRequest, StorageReply>;

/// Body alternatives stand in the order of their numbers.
inline MessageType type_of(const Body& body) {
  return static_cast<MessageType>(body.index() + 1);
}
std::string_view message_name(MessageType type) noexcept;

struct Message {
  SessionId session;        // 0 outside a session
  Incarnation incarnation;  // of the receiver, as its WELCOME said; 0 in HELLO
  Body body;
};

/// Puts a Status and where it happened into a Failure.
Failure make_failure(const Status& status, std::string phase);
/// The other way: the code and a message that names engine, rank, phase, bucket and tensor.
Status to_status(const Failure& failure);

}  // namespace headrace::wire
