#include "benchmarks/rows.h"

#include <algorithm>

namespace headrace::bench {

bool Selection::wants(std::string_view row) const {
  return prefixes_.empty() ||
         std::any_of(prefixes_.begin(), prefixes_.end(), [&](const std::string& prefix) { return row.starts_with(prefix); });
}

const std::vector<std::string>& row_names() {
  static const std::vector<std::string> kNames{
      "apply/v41_ep4/t1", "apply/v41_ep4/t2",    "apply/scales",        "apply/tiny",         "index/v41",       "plan/v41",
      "plan/v41/known",   "plan/growth",         "runs/v41/r1",         "runs/v41/r1/shared", "runs/v41/r2",     "runs/v41/r2/shared",
      "runs/v41/r4",      "runs/v41/r4/shared",  "fingerprint/read",    "fingerprint/fused",  "e2e/shm",         "e2e/shm/nofp",
      "e2e/registered",   "e2e/registered/nofp", "e2e/registered/gain", "e2e/fanout",         "e2e/fanout/wire", "e2e/tiny",
      "e2e/idle",         "e2e/memory",          "e2e/memory/growth"};
  return kNames;
}

}  // namespace headrace::bench
