#include "python/src/records.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <span>
#include <string>

namespace nb = nanobind;

namespace headrace::python {
namespace {

nb::object record(const char* name, const nb::dict& fields) {
  return nb::module_::import_("headrace.records").attr(name)(**fields);
}

nb::object text_or_none(const std::string& text) {
  return text.empty() ? nb::none() : nb::object(nb::str(text.c_str(), text.size()));
}

nb::tuple numbers(std::span<const std::int64_t> values) {
  nb::list list;
  for (const std::int64_t value : values) list.append(value);
  return nb::tuple(list);
}

nb::tuple texts(std::span<const std::string> values) {
  nb::list list;
  for (const std::string& value : values) list.append(value);
  return nb::tuple(list);
}

nb::object phases_record(const wire::Phases& phases) {
  nb::dict fields;
  fields["manifest"] = phases.manifest;
  fields["transfer"] = phases.transfer;
  fields["prepare"] = phases.prepare;
  fields["commit"] = phases.commit;
  return record("Phases", fields);
}

}  // namespace

nb::object receipt_record(const wire::Receipt& receipt) {
  nb::list outputs;
  for (const wire::OutputProof& output : receipt.outputs) outputs.append(nb::make_tuple(output.name, output.proof));
  nb::dict fields;
  fields["engine"] = receipt.engine;
  fields["rank"] = receipt.rank;
  fields["version"] = receipt.version.to_string();
  fields["session"] = receipt.session;
  fields["data_path"] = receipt.data_path;
  fields["device"] = receipt.device;
  fields["wire_bytes"] = receipt.wire_bytes;
  fields["applied_bytes"] = receipt.applied_bytes;
  fields["tensors"] = receipt.tensors;
  fields["expert_tensors"] = receipt.expert_tensors;
  fields["buckets"] = receipt.buckets;
  fields["batches"] = receipt.batches;
  fields["copies"] = receipt.copies;
  fields["runs"] = receipt.runs;
  fields["run_experts"] = receipt.run_experts;
  fields["fingerprints"] = receipt.fingerprints;
  fields["engram_calls"] = receipt.engram_calls;
  fields["plan_cached"] = receipt.plan_cached;
  fields["proven"] = receipt.proven;
  fields["proved_bytes"] = receipt.proved_bytes;
  fields["proved_converted"] = receipt.proved_converted;
  fields["proved_inputs"] = receipt.proved_inputs;
  fields["outputs"] = nb::tuple(outputs);
  fields["phases_ms"] = phases_record(receipt.phases);
  return record("Receipt", fields);
}

nb::object report_record(const UpdateReport& report) {
  nb::list receipts;
  for (const wire::Receipt& receipt : report.receipts) receipts.append(receipt_record(receipt));
  nb::dict fields;
  fields["version"] = report.version.to_string();
  fields["session"] = report.session;
  fields["wire_bytes"] = report.wire_bytes;
  fields["applied_bytes"] = report.applied_bytes;
  fields["registered_bytes"] = report.registered_bytes;
  fields["data_path"] = report.data_path;
  fields["buckets"] = report.buckets;
  fields["proven"] = report.proven;
  fields["total_ms"] = report.total_ms;
  fields["phases_ms"] = phases_record(report.phases_ms);
  fields["ignored"] = report.ignored;
  fields["ignored_names"] = texts(report.ignored_names);
  fields["receipts"] = nb::tuple(receipts);
  return record("Report", fields);
}

nb::object status_record(const wire::StatusReply& status) {
  nb::dict fields;
  fields["job"] = status.job;
  fields["engine"] = status.engine;
  fields["rank"] = status.rank;
  fields["ranks"] = status.ranks;
  fields["pid"] = status.pid;
  fields["state"] = std::string(wire::session_state_name(static_cast<wire::SessionState>(status.state)));
  fields["version"] = text_or_none(status.version);
  fields["attempted_version"] = text_or_none(status.attempted_version);
  fields["serving"] = status.serving;
  fields["updates"] = status.updates;
  fields["storages"] = status.storages;
  fields["storage_bytes"] = status.storage_bytes;
  fields["engram_calls"] = status.engram_calls;
  fields["memory_extra_bytes_max"] = status.memory_extra_bytes_max;
  fields["table"] = status.table.hex();
  fields["family"] = status.family;
  fields["layout"] = status.layout;
  fields["variant"] = status.variant;
  fields["last_failure"] = text_or_none(status.last_failure);
  fields["discards"] = status.discards;
  return record("Status", fields);
}

nb::object fingerprint_record(const wire::TensorFingerprint& value) {
  nb::dict fields;
  fields["value"] = fmt::format("{:016x}{:016x}", value.sum.lanes[0], value.sum.lanes[1]);
  fields["dtype"] = std::string(dtype_name(value.dtype));
  fields["shape"] = numbers(value.shape);
  fields["box"] = nb::make_tuple(numbers(value.box.lo), numbers(value.box.hi));
  fields["copies"] = value.copies;
  fields["equal"] = value.equal;
  return record("Fingerprint", fields);
}

nb::object receiver_record(const ReceiverInfo& info) {
  nb::dict fields;
  fields["endpoint"] = info.endpoint;
  fields["engine"] = info.welcome.engine;
  fields["rank"] = info.welcome.rank;
  fields["ranks"] = info.welcome.ranks;
  fields["version"] = text_or_none(info.welcome.version);
  fields["state"] = std::string(wire::session_state_name(static_cast<wire::SessionState>(info.welcome.state)));
  fields["scopes"] = texts(info.welcome.scopes);
  return record("ReceiverInfo", fields);
}

}  // namespace headrace::python
