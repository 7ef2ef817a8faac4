#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/checkpoint/json.h"

namespace headrace {

/// One update as its trainers and its judge saw it.
struct DemoStep {
  std::string version;
  double ms = 0;
  std::uint64_t wire_bytes = 0;     // of all trainers
  std::uint64_t applied_bytes = 0;  // of all ranks
  std::uint64_t tensors = 0;        // applied, over all ranks
  std::uint64_t expert_tensors = 0;
  std::uint64_t batches = 0;
  std::uint64_t copies = 0;
  std::uint64_t runs = 0;
  std::uint64_t run_experts = 0;
  std::uint64_t engram_calls = 0;
  std::size_t receipts = 0;
  bool proven = false;              // what every receipt says
  bool fingerprints_equal = false;  // that, and what the judge found
  double manifest_ms = 0;
  double transfer_ms = 0;
  double prepare_ms = 0;
  double commit_ms = 0;
  std::uint64_t bytes_compared = 0;
  std::uint64_t bytes_different = 0;

  double gbps() const { return ms > 0 ? static_cast<double>(applied_bytes) / ms / 1e6 : 0; }
  double ns_per_tensor() const { return tensors > 0 ? ms * 1e6 / static_cast<double>(tensors) : 0; }
  double experts_per_run() const { return runs > 0 ? static_cast<double>(run_experts) / static_cast<double>(runs) : 0; }
};

struct DemoFault {
  bool injected = false;
  std::string state_after;
  bool served_while_torn = false;
  bool recovered = false;
};

struct DemoResult {
  bool verified = false;
  std::uint32_t ranks = 0;
  std::uint32_t senders = 0;
  std::vector<DemoStep> steps;
  std::uint64_t bytes_compared = 0;
  std::uint64_t bytes_different = 0;
  DemoFault fault;
  std::uint64_t receiver_extra_bytes_max = 0;
};

/// Reads what a trainer's report says: its own wire bytes are added; everything else is taken when it is the lead's.
void add_report(DemoStep& step, const JsonValue& report, bool lead);
/// The document "headrace.demo/1" of docs/cli.md.
JsonValue demo_json(const DemoResult& result);
/// The heading and one line of the table of updates. Without colour.
std::string table_heading();
std::string table_line(const DemoStep& step);

}  // namespace headrace
