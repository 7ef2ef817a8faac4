#include "sender_sdk/report_json.h"

#include <utility>

#include "core/checkpoint/json_text.h"

namespace headrace {
namespace {

JsonValue phases_json(const wire::Phases& phases) {
  return JsonObject()
      .set("manifest", phases.manifest)
      .set("transfer", phases.transfer)
      .set("prepare", phases.prepare)
      .set("commit", phases.commit)
      .done();
}

JsonValue outputs_json(const std::vector<wire::OutputProof>& outputs) {
  JsonValue::Array listed;
  for (const wire::OutputProof& output : outputs) listed.push_back(JsonObject().set("name", output.name).set("proof", output.proof).done());
  return JsonValue(std::move(listed));
}

}  // namespace

JsonObject& add_counts(JsonObject& object, const wire::Receipt& receipt) {
  return object.set("wire_bytes", receipt.wire_bytes)
      .set("applied_bytes", receipt.applied_bytes)
      .set("tensors", receipt.tensors)
      .set("expert_tensors", receipt.expert_tensors)
      .set("buckets", receipt.buckets)
      .set("batches", receipt.batches)
      .set("copies", receipt.copies)
      .set("runs", receipt.runs)
      .set("run_experts", receipt.run_experts);
}

JsonValue receipt_json(const wire::Receipt& receipt) {
  JsonObject object;
  object.set("engine", receipt.engine)
      .set("rank", receipt.rank)
      .set("version", receipt.version.to_string())
      .set("session", receipt.session)
      .set("data_path", receipt.data_path)
      .set("device", receipt.device);
  return add_counts(object, receipt)
      .set("fingerprints", receipt.fingerprints)
      .set("engram_calls", receipt.engram_calls)
      .set("plan_cached", receipt.plan_cached)
      .set("proven", receipt.proven)
      .set("proved_bytes", receipt.proved_bytes)
      .set("proved_converted", receipt.proved_converted)
      .set("proved_inputs", receipt.proved_inputs)
      .set("outputs", outputs_json(receipt.outputs))
      .set("phases_ms", phases_json(receipt.phases))
      .done();
}

JsonValue report_json(const UpdateReport& report) {
  JsonValue::Array receipts;
  for (const wire::Receipt& receipt : report.receipts) receipts.push_back(receipt_json(receipt));
  return JsonObject()
      .set("version", report.version.to_string())
      .set("session", report.session)
      .set("wire_bytes", report.wire_bytes)
      .set("applied_bytes", report.applied_bytes)
      .set("registered_bytes", report.registered_bytes)
      .set("data_path", report.data_path)
      .set("buckets", report.buckets)
      .set("proven", report.proven)
      .set("total_ms", report.total_ms)
      .set("phases_ms", phases_json(report.phases_ms))
      .set("ignored", report.ignored)
      .set("ignored_names", json_array(report.ignored_names))
      .set("receipts", receipts)
      .done();
}

}  // namespace headrace
