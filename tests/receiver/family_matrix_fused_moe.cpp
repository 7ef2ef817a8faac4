#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/family_matrix.h"
#include "tests/receiver/small_checkpoints.h"

namespace headrace::testing {
namespace {

Trial fused_moe_trial(const Combination& c) {
  Trial trial;
  trial.variant = c.variant;
  if (c.padding == "padded") trial.variant = c.variant == "plain" ? "padded" : c.variant + "+padded";
  const SmallCheckpoint checkpoint = moe_checkpoint({.experts = 5,
                                                     .hidden = 64,
                                                     .intermediate = 64,
                                                     .form = c.dtype == "bf16 as f32" ? "bf16" : c.dtype,
                                                     .block = c.dtype == "fp8" ? 24 : 4});
  if (c.dtype == "bf16 as f32") trial.dtype = Dtype::kF32;
  trial.config = json(checkpoint.config);
  trial.tensors = checkpoint.tensors;
  return trial;
}

}  // namespace

FamilyMatrix fused_moe_matrix() {
  FamilyMatrix matrix;
  matrix.family = "fused_moe";
  matrix.variants = {"plain", "round_robin", "transposed", "global_scales", "round_robin+transposed"};
  matrix.divisions = {"tp1", "tp2", "ep2", "tp2,ep4", "tp4,ep2"};
  matrix.paddings = {"exact", "padded"};
  matrix.dtypes = {"bf16", "bf16 as f32", "fp8", "mxfp4", "nvfp4", "joint", "joint_turned"};
  matrix.trial = fused_moe_trial;
  matrix.rows = {
      {{"*", "tp4,ep2", "*", "*"}, Verdict::kRefused, "2 is no multiple of 4"},
      {{"round_robin", "*", "*", "joint"}, Verdict::kRefused, "consecutive"},
      {{"round_robin", "*", "*", "joint_turned"}, Verdict::kRefused, "consecutive"},
      {{"round_robin+transposed", "*", "*", "joint"}, Verdict::kRefused, "consecutive"},
      {{"round_robin+transposed", "*", "*", "joint_turned"}, Verdict::kRefused, "consecutive"},
      {{"*", "*", "*", "joint"}, Verdict::kJudged, "FusedMoe.TakesOneTensorForAllExperts"},
      {{"*", "*", "*", "joint_turned"}, Verdict::kJudged, "FusedMoe.TakesOneTensorForAllExperts"},
      {{"*", "*", "*", "bf16 as f32"}, Verdict::kJudged, "FusedMoe.KeepsFloatsInTheDtypeThatIsAskedForAndScalesAsTheyAre"},
      {{"*", "*", "*", "fp8"}, Verdict::kJudged, "FusedMoe.RepeatsBlockScalesWhereARankEndsInsideABlock"},
      {{"*", "*", "*", "mxfp4"}, Verdict::kJudged, "FusedMoe.PlacesPackedWeightsAndTheirScales"},
      {{"*", "*", "*", "nvfp4"}, Verdict::kJudged, "FusedMoe.PlacesPackedWeightsAndTheirScales"},
      {{"round_robin", "*", "*", "bf16"}, Verdict::kJudged, "FusedMoe.DividesExpertsOverRanksInBothOrders"},
      {{"round_robin+transposed", "*", "*", "bf16"}, Verdict::kJudged, "FusedMoe.DividesExpertsOverRanksInBothOrders"},
      {{"*", "*", "*", "bf16"}, Verdict::kJudged, "FusedMoe.PlacesExpertBytesAsTheFormulasSay"},
  };
  return matrix;
}

}  // namespace headrace::testing
