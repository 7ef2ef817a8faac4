#include "examples/demo/demo_report.h"

#include <fmt/format.h>

#include "cli/output.h"
#include "core/checkpoint/json_text.h"

namespace headrace {
namespace {

std::uint64_t number(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  return value == nullptr ? 0 : value->as_uint64().value_or(0);
}

double real(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  return value == nullptr ? 0 : value->as_double().value_or(0);
}

bool flag(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  return value != nullptr && value->as_bool().value_or(false);
}

void add_receipt(DemoStep& step, const JsonValue& receipt) {
  ++step.receipts;
  step.applied_bytes += number(receipt, "applied_bytes");
  step.tensors += number(receipt, "tensors");
  step.expert_tensors += number(receipt, "expert_tensors");
  step.batches += number(receipt, "batches");
  step.copies += number(receipt, "copies");
  step.runs += number(receipt, "runs");
  step.run_experts += number(receipt, "run_experts");
  step.engram_calls += number(receipt, "engram_calls");
  step.proven = step.proven && flag(receipt, "proven");
}

JsonValue step_json(const DemoStep& step) {
  const JsonValue phases = JsonObject()
                               .set("manifest", step.manifest_ms)
                               .set("transfer", step.transfer_ms)
                               .set("prepare", step.prepare_ms)
                               .set("commit", step.commit_ms)
                               .done();
  return JsonObject()
      .set("version", step.version)
      .set("ms", step.ms)
      .set("wire_bytes", step.wire_bytes)
      .set("applied_bytes", step.applied_bytes)
      .set("gbps", step.gbps())
      .set("tensors", step.tensors)
      .set("expert_tensors", step.expert_tensors)
      .set("ns_per_tensor", step.ns_per_tensor())
      .set("batches", step.batches)
      .set("copies", step.copies)
      .set("runs", step.runs)
      .set("experts_per_run", step.experts_per_run())
      .set("fingerprints_equal", step.fingerprints_equal)
      .set("engram_calls", step.engram_calls)
      .set("phases_ms", phases)
      .done();
}

}  // namespace

void add_report(DemoStep& step, const JsonValue& report, bool lead) {
  step.wire_bytes += number(report, "wire_bytes");
  if (!lead) return;
  if (const JsonValue* version = report.find("version"); version != nullptr && version->as_string() != nullptr) {
    step.version = *version->as_string();
  }
  step.ms = real(report, "total_ms");
  step.proven = flag(report, "proven");
  if (const JsonValue* phases = report.find("phases_ms")) {
    step.manifest_ms = real(*phases, "manifest");
    step.transfer_ms = real(*phases, "transfer");
    step.prepare_ms = real(*phases, "prepare");
    step.commit_ms = real(*phases, "commit");
  }
  const JsonValue* receipts = report.find("receipts");
  if (receipts == nullptr || receipts->as_array() == nullptr) return;
  for (const JsonValue& receipt : *receipts->as_array()) add_receipt(step, receipt);
}

JsonValue demo_json(const DemoResult& result) {
  JsonValue::Array steps;
  for (const DemoStep& step : result.steps) steps.push_back(step_json(step));
  return JsonObject()
      .set("schema", "headrace.demo/1")
      .set("verified", result.verified)
      .set("ranks", result.ranks)
      .set("senders", result.senders)
      .set("steps", steps)
      .set("oracle", JsonObject().set("bytes_compared", result.bytes_compared).set("bytes_different", result.bytes_different).done())
      .set("fault", JsonObject()
                        .set("injected", result.fault.injected)
                        .set("state_after", result.fault.state_after)
                        .set("served_while_torn", result.fault.served_while_torn)
                        .set("recovered", result.fault.recovered)
                        .done())
      .set("receiver_extra_bytes_max", result.receiver_extra_bytes_max)
      .done();
}

std::string table_heading() {
  return fmt::format("{:<8} {:>7} {:>9} {:>9} {:>10} {:>8} {:>10} {:>8} {:>7} {:>8}  {:<22} {}", "version", "ms", "wire", "applied", "rate",
                     "tensors", "ns/tensor", "copies", "runs", "exp/run", "manifest/move/prove/ok", "bytes that differ");
}

std::string table_line(const DemoStep& step) {
  const std::string phases =
      fmt::format("{:.0f}/{:.0f}/{:.0f}/{:.0f} ms", step.manifest_ms, step.transfer_ms, step.prepare_ms, step.commit_ms);
  return fmt::format("{:<8} {:>7.0f} {:>9} {:>9} {:>7.2f} GB/s {:>6} {:>10.0f} {:>8} {:>7} {:>8.1f}  {:<22} {} of {}", step.version,
                     step.ms, cli::human_bytes(step.wire_bytes), cli::human_bytes(step.applied_bytes), step.gbps(), step.tensors,
                     step.ns_per_tensor(), step.copies, step.runs, step.experts_per_run(), phases, step.bytes_different,
                     cli::human_bytes(step.bytes_compared));
}

}  // namespace headrace
