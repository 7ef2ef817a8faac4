#pragma once

#include "core/wire/limits.h"
#include "core/wire/messages.h"

// One list of fields per message, read by the encoder, the decoder and the test of docs/protocol.md. `f(key, member, limit)`; limits are
// bytes for texts and blobs, items for lists.
namespace headrace::wire {

template <class F>
void fields(Phases& m, F& f) {
  f("manifest", m.manifest);
  f("transfer", m.transfer);
  f("prepare", m.prepare);
  f("commit", m.commit);
}

template <class F>
void fields(OutputProof& m, F& f) {
  f("name", m.name, limits::kNameBytesMax);
  f("proof", m.proof, limits::kIdBytesMax);
}

template <class F>
void fields(Receipt& m, F& f) {
  f("engine", m.engine, limits::kIdBytesMax);
  f("rank", m.rank);
  f("version", m.version);
  f("session", m.session);
  f("data_path", m.data_path, limits::kIdBytesMax);
  f("device", m.device, limits::kIdBytesMax);
  f("wire_bytes", m.wire_bytes);
  f("applied_bytes", m.applied_bytes);
  f("tensors", m.tensors);
  f("expert_tensors", m.expert_tensors);
  f("buckets", m.buckets);
  f("batches", m.batches);
  f("copies", m.copies);
  f("runs", m.runs);
  f("run_experts", m.run_experts);
  f("fingerprints", m.fingerprints);
  f("engram_calls", m.engram_calls);
  f("plan_cached", m.plan_cached);
  f("proven", m.proven);
  f("proved_bytes", m.proved_bytes);
  f("proved_converted", m.proved_converted);
  f("proved_inputs", m.proved_inputs);
  f("outputs", m.outputs, limits::kOutputsMax);
  f("phases_ms", m.phases);
}

template <class F>
void fields(Failure& m, F& f) {
  f("code", m.code);
  f("message", m.message, limits::kTextBytesMax);
  f("engine", m.engine, limits::kIdBytesMax);
  f("rank", m.rank);
  f("sender", m.sender, limits::kIdBytesMax);
  f("phase", m.phase, limits::kIdBytesMax);
  f("bucket", m.bucket);
  f("name", m.name, limits::kNameBytesMax);
  f("expected", m.expected, limits::kTextBytesMax);
  f("actual", m.actual, limits::kTextBytesMax);
}

template <class F>
void fields(Hello& m, F& f) {
  f("protocol_min", m.protocol_min);
  f("protocol_max", m.protocol_max);
  f("job", m.job, limits::kIdBytesMax);
  f("sender", m.sender, limits::kIdBytesMax);
  f("boot_id", m.boot_id, limits::kIdBytesMax);
  f("devices", m.devices, limits::kIdBytesMax);
  f("data_paths", m.data_paths, limits::kIdBytesMax);
}

template <class F>
void fields(ValueRule& m, F& f) {
  f("prefix", m.prefix, limits::kNameBytesMax);
  f("suffix", m.suffix, limits::kNameBytesMax);
  f("experts", m.experts);
}

template <class F>
void fields(Welcome& m, F& f) {
  f("protocol", m.protocol);
  f("job", m.job, limits::kIdBytesMax);
  f("engine", m.engine, limits::kIdBytesMax);
  f("rank", m.rank);
  f("ranks", m.ranks);
  f("boot_id", m.boot_id, limits::kIdBytesMax);
  f("devices", m.devices, limits::kIdBytesMax);
  f("data_paths", m.data_paths, limits::kIdBytesMax);
  f("descriptor_path", m.descriptor_path, limits::kTextBytesMax);
  f("table", m.table);
  f("expert_map", m.expert_map);
  f("scopes", m.scopes, limits::kIdBytesMax);
  f("state", m.state);
  f("state_session", m.state_session);
  f("version", m.version, 2 * limits::kIdBytesMax);
  f("bucket_bytes_max", m.bucket_bytes_max);
  f("deadline_ms", m.deadline_ms);
  f("values", m.values, limits::kValueRulesMax);
}

template <class F>
void fields(Open& m, F& f) {
  f("version", m.version, 2 * limits::kIdBytesMax);
  f("scopes", m.scopes, limits::kIdBytesMax);
  f("senders", m.senders, limits::kIdBytesMax);
  f("overlap", m.overlap);
  f("ranks", m.ranks, limits::kRanksMax);
}

template <class F>
void fields(Opened& m, F& f) {
  f("version", m.version, 2 * limits::kIdBytesMax);
  f("senders", m.senders, limits::kIdBytesMax);
  f("expert_map", m.expert_map);
}

template <class F>
void fields(Manifest& m, F& f) {
  f("digest", m.digest);
  f("known", m.known);
  f("entries", m.entries, limits::kMessageBytesMax);
  f("values", m.values, limits::kValuesMax);
}

template <class F>
void fields(EntryGroup& m, F& f) {
  f("name", m.name, limits::kNameBytesMax);
  f("entries", m.entries, limits::kManifestEntriesMax);
}

template <class F>
void fields(Accept& m, F& f) {
  f("digest", m.digest);
  f("plan_key", m.plan_key);
  f("known", m.known);
  f("wanted", m.wanted, limits::kManifestEntriesMax);
  f("ignored", m.ignored);
  f("bucket_bytes_max", m.bucket_bytes_max);
  f("groups", m.groups, limits::kManifestEntriesMax);
}

template <class F>
void fields(Reject& m, F& f) {
  f("defects_total", m.defects_total);
  f("defects", m.defects, limits::kDefectsMax);
}

template <class F>
void fields(Confirm&, F&) {}

template <class F>
void fields(Begin& m, F& f) {
  f("credits", m.credits);
}

template <class F>
void fields(Bucket& m, F& f) {
  f("sequence", m.sequence);
  f("extents", m.extents, limits::kExtentsMax);
}

template <class F>
void fields(Consumed& m, F& f) {
  f("sequence", m.sequence);
}

template <class F>
void fields(End& m, F& f) {
  f("buckets", m.buckets);
  f("fingerprints", m.fingerprints, limits::kManifestEntriesMax);
}

template <class F>
void fields(Prepared& m, F& f) {
  f("receipt", m.receipt);
}

template <class F>
void fields(Commit&, F&) {}

template <class F>
void fields(Committed& m, F& f) {
  f("receipt", m.receipt);
}

template <class F>
void fields(Abort& m, F& f) {
  f("failure", m.failure);
}

template <class F>
void fields(ErrorReport& m, F& f) {
  f("failure", m.failure);
  f("state", m.state);
}

template <class F>
void fields(Ping& m, F& f) {
  f("progress", m.progress);
}

template <class F>
void fields(Pong& m, F& f) {
  f("progress", m.progress);
  f("state", m.state);
}

template <class F>
void fields(StatusRequest&, F&) {}

template <class F>
void fields(StatusReply& m, F& f) {
  f("job", m.job, limits::kIdBytesMax);
  f("engine", m.engine, limits::kIdBytesMax);
  f("rank", m.rank);
  f("ranks", m.ranks);
  f("pid", m.pid);
  f("state", m.state);
  f("version", m.version, 2 * limits::kIdBytesMax);
  f("attempted_version", m.attempted_version, 2 * limits::kIdBytesMax);
  f("serving", m.serving);
  f("updates", m.updates);
  f("storages", m.storages);
  f("storage_bytes", m.storage_bytes);
  f("engram_calls", m.engram_calls);
  f("memory_extra_bytes_max", m.memory_extra_bytes_max);
  f("table", m.table);
  f("family", m.family, limits::kIdBytesMax);
  f("layout", m.layout, limits::kIdBytesMax);
  f("variant", m.variant, limits::kIdBytesMax);
  f("last_failure", m.last_failure, limits::kTextBytesMax);
  f("discards", m.discards);
}

template <class F>
void fields(FingerprintRequest& m, F& f) {
  f("from", m.from);
  f("count", m.count);
}

template <class F>
void fields(TensorFingerprint& m, F& f) {
  f("name", m.name, limits::kNameBytesMax);
  f("dtype", m.dtype);
  f("shape", m.shape, limits::kDimsMax);
  f("box", m.box);
  f("copies", m.copies);
  f("equal", m.equal);
  f("sum", m.sum);
}

template <class F>
void fields(FingerprintReply& m, F& f) {
  f("total", m.total);
  f("version", m.version, 2 * limits::kIdBytesMax);
  f("tensors", m.tensors, limits::kManifestEntriesMax);
}

template <class F>
void fields(ReadRequest& m, F& f) {
  f("name", m.name, limits::kNameBytesMax);
  f("box", m.box);
}

template <class F>
void fields(ReadReply& m, F& f) {
  f("bytes", m.bytes, limits::kReadBytesMax);
}

template <class F>
void fields(StorageRequest&, F&) {}

template <class F>
void fields(StorageInfo& m, F& f) {
  f("name", m.name, limits::kNameBytesMax);
  f("dtype", m.dtype);
  f("shape", m.shape, limits::kDimsMax);
  f("address", m.address);
  f("bytes", m.bytes);
}

template <class F>
void fields(StorageReply& m, F& f) {
  f("pid", m.pid);
  f("storages", m.storages, limits::kManifestEntriesMax);
}

}  // namespace headrace::wire
