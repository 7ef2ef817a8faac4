#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/family_matrix.h"

namespace headrace::testing {
namespace {

/// Experts of 256 and 384 rows: with and without a rest of 512.
Trial deepseek_v4_trial(const Combination& c) {
  Trial trial;
  trial.variant = c.padding == "padded" ? "padded" : c.variant;
  trial.config = json(v41_tiny_config(256, 384, 4));
  return trial;
}

}  // namespace

FamilyMatrix deepseek_v4_matrix() {
  FamilyMatrix matrix;
  matrix.family = "deepseek_v4";
  matrix.variants = {"plain"};
  matrix.divisions = {"tp1", "ep2", "ep4"};
  matrix.paddings = {"exact", "padded"};
  matrix.dtypes = {"fp4"};
  matrix.trial = deepseek_v4_trial;
  matrix.rows = {
      {{"plain", "*", "exact", "fp4"}, Verdict::kJudged, "DeepseekV4.PlacesExpertBytesAsTheFormulasSayWithoutPadding"},
      {{"plain", "*", "padded", "fp4"}, Verdict::kJudged, "DeepseekV4.PlacesExpertBytesAsTheFormulasSayWithPadding"},
  };
  return matrix;
}

}  // namespace headrace::testing
