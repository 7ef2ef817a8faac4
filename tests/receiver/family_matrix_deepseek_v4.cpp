#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/family_matrix.h"

namespace headrace::testing {
namespace {

/// Experts of 384 rows have a rest of 512, those of 512 have none.
Trial deepseek_v4_trial(const Combination& c) {
  Trial trial;
  trial.variant = c.padding == "padded" ? replaced(c.variant, "plain", "padded") : c.variant;
  std::string config = v41_divided_config(256, 384, 8);
  if (c.dtype == "bf16") config = replaced(config, "\"fp4\"", "\"bf16\"");
  if (c.dtype == "nvfp4") config = replaced(config, "\"fp4\"", "\"fp4\",\"moe_quant_algo\":\"NVFP4\"");
  if (c.dtype == "fp8") config = replaced(config, "\"fp4\"", "\"fp8\"");
  trial.config = json(config);
  return trial;
}

}  // namespace

FamilyMatrix deepseek_v4_matrix() {
  FamilyMatrix matrix;
  matrix.family = "deepseek_v4";
  matrix.variants = {"plain",
                     "sglang",
                     "plain+fused_shared",
                     "plain+row_scales",
                     "plain+swizzled_scales",
                     "plain+mega_attention",
                     "plain+grouped_wo_a",
                     "plain+swizzled_scales+mega_attention+grouped_wo_a"};
  matrix.divisions = {"tp1", "tp2", "tp8", "ep2", "ep4", "tp4,ep4", "tp2,ep4", "tp4,ep2"};
  matrix.paddings = {"exact", "padded"};
  matrix.dtypes = {"fp4", "nvfp4", "bf16", "fp8"};
  matrix.trial = deepseek_v4_trial;
  matrix.rows = {
      {{"sglang", "*", "padded", "*"}, Verdict::kNone, "SGLang pads nothing"},
      {{"*", "tp4,ep2", "*", "*"}, Verdict::kRefused, "2 expert ranks are no multiple of 4 ranks"},
      {{"*", "*", "*", "fp8"}, Verdict::kRefused, "expert_dtype is fp8"},
      {{"sglang", "*", "exact", "fp4"}, Verdict::kJudged, "DeepseekV4Experts.HoldsBothScalesOfSglang"},
      {{"sglang", "*", "exact", "*"}, Verdict::kRefused, "sglang is of fp4 experts"},
      {{"plain+fused_shared", "*", "padded", "*"}, Verdict::kRefused, "384 wide"},
      {{"plain+fused_shared", "*", "exact", "*"}, Verdict::kJudged, "DeepseekV4Experts.HoldsFusedSharedExpertsAsOneMoreSlot"},
      {{"plain", "*", "exact", "fp4"}, Verdict::kJudged, "DeepseekV4Experts.HoldsFp4AsTheKernelReadsThem"},
      {{"plain", "*", "exact", "nvfp4"}, Verdict::kJudged, "DeepseekV4Experts.HoldsNvfp4WithItsGlobalScales"},
      {{"plain", "*", "exact", "bf16"}, Verdict::kJudged, "DeepseekV4Experts.HoldsBf16WithoutScales"},
      {{"plain", "*", "padded", "fp4"}, Verdict::kJudged, "DeepseekV4Experts.HoldsPaddedFp4WithZerosBehindThem"},
      {{"plain", "*", "padded", "*"}, Verdict::kRefused, "padded is of fp4 experts"},
  };
  const std::string tiles = "DeepseekTensorParallel.KeepsScalesByRowAndInTiles";
  const std::string turns = "MegaAttention.TakesFeaturesOfHeadsInTurnsOnEveryRank";
  for (const auto& [words, test] : {std::pair("row_scales", tiles), std::pair("swizzled_scales", tiles), std::pair("grouped_wo_a", tiles),
                                    std::pair("mega_attention", turns), std::pair("swizzled_scales+mega_attention+grouped_wo_a", turns)}) {
    const std::string variant = std::string("plain+") + words;
    matrix.rows.push_back({{variant, "*", "*", "fp4"}, Verdict::kJudged, test});
    matrix.rows.push_back({{variant, "*", "exact", "*"}, Verdict::kJudged, test});
    matrix.rows.push_back({{variant, "*", "padded", "*"}, Verdict::kRefused, "padded is of fp4 experts"});
  }
  return matrix;
}

}  // namespace headrace::testing
