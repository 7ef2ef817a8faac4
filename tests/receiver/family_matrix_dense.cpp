#include "tests/receiver/deepseek_inventory.h"
#include "tests/receiver/family_matrix.h"
#include "tests/receiver/small_checkpoints.h"

namespace headrace::testing {
namespace {

/// "stacked llama" and "stacked bert" are one variant of the family and two models.
Trial dense_trial(const Combination& c) {
  Trial trial;
  trial.variant = c.variant.substr(0, c.variant.find(' '));
  const Dtype dtype = c.dtype == "bf16" ? Dtype::kBF16 : Dtype::kF32;
  if (c.dtype == "f32 as bf16") trial.dtype = Dtype::kBF16;
  if (c.variant == "plain") {
    trial.tensors = {matrix_tensor("a.weight", dtype, {6, 8}), matrix_tensor("a.bias", dtype, {6}), matrix_tensor("step", Dtype::kI64, {})};
    return trial;
  }
  const std::int64_t vocabulary = c.padding == "exact" ? 128 : 100;
  const SmallCheckpoint checkpoint = c.variant == "stacked bert" ? bert_checkpoint({.vocabulary = vocabulary, .dtype = dtype})
                                                                 : llama_checkpoint({.vocabulary = vocabulary, .dtype = dtype});
  trial.config = json(checkpoint.config);
  trial.tensors = checkpoint.tensors;
  return trial;
}

}  // namespace

FamilyMatrix dense_matrix() {
  FamilyMatrix matrix;
  matrix.family = "dense";
  matrix.variants = {"plain", "stacked llama", "stacked bert"};
  matrix.divisions = {"tp1", "tp2", "tp3", "tp4", "ep2"};
  matrix.paddings = {"exact", "padded"};
  matrix.dtypes = {"f32", "bf16", "f32 as bf16"};
  matrix.trial = dense_trial;
  matrix.rows = {
      {{"plain", "*", "padded", "*"}, Verdict::kNone, "tensors stay as they are: there is nothing to pad"},
      {{"plain", "tp1", "exact", "*"}, Verdict::kJudged, "Dense.GivesEachTensorAStorageOfItsName"},
      {{"plain", "*", "exact", "*"}, Verdict::kRefused, "the family has one rank"},
      {{"*", "ep2", "*", "*"}, Verdict::kRefused, "no experts to divide"},
      {{"*", "tp3", "*", "*"}, Verdict::kRefused, "does not divide by 3"},
      {{"*", "*", "*", "f32 as bf16"}, Verdict::kJudged, "DenseStacked.KeepsFloatsInTheDtypeThatIsAskedFor"},
      {{"stacked llama", "*", "*", "*"}, Verdict::kJudged, "DenseStacked.PlacesTheBytesOfDecodersAsTheFormulasSay"},
      {{"stacked bert", "*", "*", "*"}, Verdict::kJudged, "DenseStacked.PlacesTheBytesOfEncodersAsTheFormulasSay"},
  };
  return matrix;
}

}  // namespace headrace::testing
