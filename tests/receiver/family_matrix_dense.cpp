#include "tests/receiver/family_matrix.h"

namespace headrace::testing {
namespace {

Trial dense_trial(const Combination& c) {
  Trial trial;
  trial.variant = c.variant;
  const Dtype dtype = c.dtype == "bf16" ? Dtype::kBF16 : Dtype::kF32;
  trial.tensors = {matrix_tensor("a.weight", dtype, {6, 8}), matrix_tensor("a.bias", dtype, {6}), matrix_tensor("step", Dtype::kI64, {})};
  return trial;
}

}  // namespace

FamilyMatrix dense_matrix() {
  FamilyMatrix matrix;
  matrix.family = "dense";
  matrix.variants = {"plain"};
  matrix.divisions = {"tp1", "tp2", "ep2"};
  matrix.paddings = {"exact", "padded"};
  matrix.dtypes = {"f32", "bf16"};
  matrix.trial = dense_trial;
  matrix.rows = {
      {{"plain", "*", "padded", "*"}, Verdict::kNone, "tensors stay as they are: there is nothing to pad"},
      {{"plain", "tp1", "exact", "*"}, Verdict::kJudged, "Dense.GivesEachTensorAStorageOfItsName"},
      {{"plain", "*", "exact", "*"}, Verdict::kRefused, "the family has one rank"},
  };
  return matrix;
}

}  // namespace headrace::testing
