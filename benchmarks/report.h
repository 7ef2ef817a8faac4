#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint/json.h"

namespace headrace::bench {

/// One line of the table. Made by chaining: what was measured, what it is compared with, what it has to reach.
struct Row {
  std::string name;
  double value = 0;
  std::string unit;
  std::string reference{};  // what `reference_value`, in the same unit, was measured with; empty: none
  std::optional<double> reference_value{};
  std::optional<double> ratio{};  // value / reference_value
  std::string target{};           // in words; empty: none
  std::optional<bool> ok{};       // whether the target was reached; none without a target
  std::string note{};             // for people only

  Row& against(std::string what, double measured);
  Row& ratio_at_least(double bound);
  Row& ratio_at_most(double bound);
  Row& ratio_exactly_one();
  Row& value_at_most(double bound);
  /// value <= reference_value + bound.
  Row& excess_at_most(double bound);
  Row& remark(std::string text);
};

/// What the figures were measured on.
struct Machine {
  std::string cpu;
  std::string isa;                        // the widest vectors that the kernels use here
  std::vector<std::uint64_t> page_sizes;  // bytes, the base page first, then that of transparent huge pages
  std::string commit;                     // empty: unknown
};
Machine this_machine(std::string commit);

/// {schema, machine: {cpu, isa, page_sizes, commit}, rows: [{name, value, unit, reference, reference_value, ratio, target, ok}]}; null
/// where there is none.
JsonValue report_json(const Machine& machine, const std::vector<Row>& rows);
/// The same for a terminal; notes stand below their rows.
std::string report_text(const Machine& machine, const std::vector<Row>& rows);
/// The table of docs/performance.md.
std::string report_markdown(const Machine& machine, const std::vector<Row>& rows);

bool all_reached(const std::vector<Row>& rows);

}  // namespace headrace::bench
