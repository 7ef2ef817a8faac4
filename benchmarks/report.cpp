#include "benchmarks/report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <utility>

#include "core/base/check.h"
#include "core/checkpoint/json_text.h"
#include "kernels/host_kernels.h"

namespace headrace::bench {
namespace {

std::string number(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e15) return fmt::format("{:.0f}", value);
  const double size = std::abs(value);
  return fmt::format("{:.{}f}", value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

std::string ratio_text(const Row& row) {
  return row.ratio ? fmt::format("{:.2f}", *row.ratio) : std::string();
}

std::string reference_text(const Row& row) {
  if (!row.reference_value) return {};
  return fmt::format("{} {} ({})", number(*row.reference_value), row.unit, row.reference);
}

std::string verdict(const Row& row) {
  return !row.ok ? "" : *row.ok ? "yes" : "MISSED";
}

using Cells = std::array<std::string, 6>;
constexpr std::array<const char*, 6> kHeads{"row", "value", "reference", "ratio", "target", "reached"};

Cells cells_of(const Row& row) {
  return {row.name, fmt::format("{} {}", number(row.value), row.unit), reference_text(row), ratio_text(row), row.target, verdict(row)};
}

std::string machine_text(const Machine& machine) {
  return fmt::format("{}, {}, pages of {} bytes, commit {}", machine.cpu, machine.isa, fmt::join(machine.page_sizes, " and "),
                     machine.commit.empty() ? "unknown" : machine.commit);
}

JsonValue text_or_null(const std::string& text) {
  return text.empty() ? JsonValue() : to_json(text);
}

JsonValue row_json(const Row& row) {
  return JsonObject()
      .set("name", row.name)
      .set("value", row.value)
      .set("unit", row.unit)
      .set("reference", text_or_null(row.reference))
      .set("reference_value", row.reference_value ? to_json(*row.reference_value) : JsonValue())
      .set("ratio", row.ratio ? to_json(*row.ratio) : JsonValue())
      .set("target", text_or_null(row.target))
      .set("ok", row.ok ? to_json(*row.ok) : JsonValue())
      .done();
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace

Row& Row::against(std::string what, double measured) {
  reference = std::move(what);
  reference_value = measured;
  if (measured != 0) ratio = value / measured;
  return *this;
}

Row& Row::ratio_at_least(double bound) {
  HEADRACE_CHECK(ratio.has_value(), "a ratio needs a reference");
  target = fmt::format("ratio >= {:.2f}", bound);
  ok = *ratio >= bound;
  return *this;
}

Row& Row::ratio_at_most(double bound) {
  HEADRACE_CHECK(ratio.has_value(), "a ratio needs a reference");
  target = fmt::format("ratio <= {:.2f}", bound);
  ok = *ratio <= bound;
  return *this;
}

Row& Row::ratio_exactly_one() {
  HEADRACE_CHECK(reference_value.has_value(), "equality needs a reference");
  target = "equal";
  ok = value == *reference_value;
  return *this;
}

Row& Row::value_at_most(double bound) {
  target = fmt::format("<= {} {}", number(bound), unit);
  ok = value <= bound;
  return *this;
}

Row& Row::excess_at_most(double bound) {
  HEADRACE_CHECK(reference_value.has_value(), "an excess needs a reference");
  target = fmt::format("<= reference + {} {}", number(bound), unit);
  ok = value <= *reference_value + bound;
  return *this;
}

Row& Row::remark(std::string text) {
  note = std::move(text);
  return *this;
}

Machine this_machine(std::string commit) {
  Machine machine;
  machine.cpu = cpu_name();
  const std::vector<std::string> targets = simd_targets();
  machine.isa = targets.empty() ? "scalar" : targets.front();
  machine.page_sizes.push_back(static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
  std::ifstream huge("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
  if (std::uint64_t bytes = 0; huge >> bytes) machine.page_sizes.push_back(bytes);
  machine.commit = std::move(commit);
  return machine;
}

JsonValue report_json(const Machine& machine, const std::vector<Row>& rows) {
  JsonValue::Array lines;
  for (const Row& row : rows) lines.push_back(row_json(row));
  return JsonObject()
      .set("schema", "headrace.bench/1")
      .set("machine", JsonObject()
                          .set("cpu", machine.cpu)
                          .set("isa", machine.isa)
                          .set("page_sizes", json_array(machine.page_sizes))
                          .set("commit", text_or_null(machine.commit))
                          .done())
      .set("rows", lines)
      .done();
}

std::string report_text(const Machine& machine, const std::vector<Row>& rows) {
  std::vector<Cells> table{Cells{}};
  std::copy(kHeads.begin(), kHeads.end(), table.front().begin());
  for (const Row& row : rows) table.push_back(cells_of(row));
  std::array<std::size_t, 6> widths{};
  for (const Cells& cells : table)
    for (std::size_t c = 0; c < cells.size(); ++c) widths[c] = std::max(widths[c], cells[c].size());
  std::string text = machine_text(machine) + "\n\n";
  for (std::size_t r = 0; r < table.size(); ++r) {
    const Cells& cells = table[r];
    text += fmt::format("{:<{}}  {:>{}}  {:<{}}  {:>{}}  {:<{}}  {}\n", cells[0], widths[0], cells[1], widths[1], cells[2], widths[2],
                        cells[3], widths[3], cells[4], widths[4], cells[5]);
    if (r > 0 && !rows[r - 1].note.empty()) text += fmt::format("{:<{}}    {}\n", "", widths[0], rows[r - 1].note);
  }
  return text;
}

std::string report_markdown(const Machine& machine, const std::vector<Row>& rows) {
  std::string text = machine_text(machine) + ".\n\n";
  text += fmt::format("| {} |\n|---|---|---|---|---|---|\n", fmt::join(kHeads, " | "));
  for (const Row& row : rows) text += fmt::format("| {} |\n", fmt::join(cells_of(row), " | "));
  return text;
}

bool all_reached(const std::vector<Row>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.ok.value_or(true); });
}

}  // namespace headrace::bench
