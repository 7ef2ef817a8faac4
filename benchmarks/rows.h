#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/report.h"

namespace headrace::bench {

/// Chooses rows by the prefixes that a person gave; none chooses all.
class Selection {
 public:
  explicit Selection(std::vector<std::string> prefixes) : prefixes_(std::move(prefixes)) {}
  bool wants(std::string_view row) const;

 private:
  std::vector<std::string> prefixes_;
};

/// Adds its rows that are wanted. Throws Error when something could not be measured.
using RowGroup = void(const Selection&, std::vector<Row>&);

void apply_rows(const Selection& selection, std::vector<Row>& rows);
void index_rows(const Selection& selection, std::vector<Row>& rows);
void plan_rows(const Selection& selection, std::vector<Row>& rows);
void runs_rows(const Selection& selection, std::vector<Row>& rows);
void fingerprint_rows(const Selection& selection, std::vector<Row>& rows);
void e2e_rows(const Selection& selection, std::vector<Row>& rows);

/// Beside other projects' packages, whose figures benchmarks/peers/peers.py has left at `figures_path`; not among row_names().
void peer_rows(const std::string& figures_path, std::vector<Row>& rows);

/// The names of all rows, in the order of the table.
const std::vector<std::string>& row_names();

}  // namespace headrace::bench
