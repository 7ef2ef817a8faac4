#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/json.h"
#include "receiver/models/family.h"

/// The table of all layouts: family x variant x division x padding x dtype. Each family has a file that gives its axes and its rows; a
/// combination that no row speaks of fails the test.
namespace headrace::testing {

struct Combination {
  std::string variant;
  std::string division;  // as parse_layout() reads it
  std::string padding;   // "exact": every size fills its unit; "padded": some does not
  std::string dtype;     // as the family's file calls the form that the checkpoint has
};

/// What a combination is, in the order in which a reader should believe it.
enum class Verdict {
  kJudged,   // built for every rank and judged in the table's own test; `text` names the test that compares its bytes with an oracle
  kRefused,  // tried; the refusal's message contains `text`
  kNone,     // cannot be asked for; `text` says why
};

/// Speaks of every combination that it matches; "*" matches all. The first row that matches counts.
struct MatrixRow {
  Combination pattern;
  Verdict verdict = Verdict::kNone;
  std::string text;
};

/// A small model of one combination.
struct Trial {
  std::string variant;  // of the request
  std::optional<JsonValue> config{};
  std::vector<CheckpointTensor> tensors{};
  std::optional<Dtype> dtype{};  // of the request
  std::int32_t redundant_experts = 0;
  std::vector<std::string> scopes{"target"};
};

struct FamilyMatrix {
  std::string family;
  std::vector<std::string> variants;
  std::vector<std::string> divisions;
  std::vector<std::string> paddings;
  std::vector<std::string> dtypes;
  std::vector<MatrixRow> rows;
  std::function<Trial(const Combination&)> trial;
};

FamilyMatrix deepseek_v4_matrix();
FamilyMatrix fused_moe_matrix();
FamilyMatrix dense_matrix();

inline CheckpointTensor matrix_tensor(std::string name, Dtype dtype, Shape shape) {
  CheckpointTensor tensor;
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

}  // namespace headrace::testing
