#include "tests/receiver/family_matrix.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "tests/receiver/layout_judge.h"

namespace headrace::testing {
namespace {

std::vector<FamilyMatrix> all_matrices() {
  return {deepseek_v4_matrix(), fused_moe_matrix(), dense_matrix()};
}

std::vector<Combination> combinations(const FamilyMatrix& matrix) {
  std::vector<Combination> all;
  for (const std::string& variant : matrix.variants)
    for (const std::string& division : matrix.divisions)
      for (const std::string& padding : matrix.paddings)
        for (const std::string& dtype : matrix.dtypes) all.push_back({variant, division, padding, dtype});
  return all;
}

bool matches(const Combination& pattern, const Combination& c) {
  const auto one = [](const std::string& expected, const std::string& actual) { return expected == "*" || expected == actual; };
  return one(pattern.variant, c.variant) && one(pattern.division, c.division) && one(pattern.padding, c.padding) &&
         one(pattern.dtype, c.dtype);
}

const MatrixRow* row_of(const FamilyMatrix& matrix, const Combination& c) {
  for (const MatrixRow& row : matrix.rows)
    if (matches(row.pattern, c)) return &row;
  return nullptr;
}

std::string name_of(const FamilyMatrix& matrix, const Combination& c) {
  return matrix.family + " " + c.variant + " " + c.division + " " + c.padding + " " + c.dtype;
}

Result<ModelLayout> build(const FamilyMatrix& matrix, const Trial& trial, const ParallelLayout& parallel, std::int32_t rank) {
  ModelRequest request;
  request.family = matrix.family;
  request.variant = trial.variant;
  request.parallel = parallel;
  request.rank = rank;
  request.redundant_experts = trial.redundant_experts;
  request.scopes = trial.scopes;
  request.dtype = trial.dtype;
  return build_model(request, trial.config ? &*trial.config : nullptr, trial.tensors);
}

bool test_exists(const std::string& name) {
  const ::testing::UnitTest& tests = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < tests.total_test_suite_count(); ++s) {
    const ::testing::TestSuite& suite = *tests.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      if (std::string(suite.name()) + "." + suite.GetTestInfo(t)->name() == name) return true;
    }
  }
  return false;
}

void expect_judged(const FamilyMatrix& matrix, const Combination& c) {
  const ParallelLayout parallel = parse_layout(c.division).value_or_throw();
  const Trial trial = matrix.trial(c);
  for (std::int32_t rank = 0; rank < parallel.ranks(); ++rank) {
    const Result<ModelLayout> layout = build(matrix, trial, parallel, rank);
    ASSERT_TRUE(layout.ok()) << name_of(matrix, c) << " rank " << rank << ": " << layout.status().to_string();
    const JudgedRank judged = judge_layout(layout.value());
    EXPECT_GT(judged.tensors, 0U) << name_of(matrix, c);
    for (const std::string& defect : judged.defects) ADD_FAILURE() << name_of(matrix, c) << " rank " << rank << ": " << defect;
  }
}

void expect_refused(const FamilyMatrix& matrix, const Combination& c, const std::string& text) {
  const Result<ModelLayout> layout = build(matrix, matrix.trial(c), parse_layout(c.division).value_or_throw(), 0);
  ASSERT_FALSE(layout.ok()) << name_of(matrix, c);
  EXPECT_NE(layout.status().message().find(text), std::string::npos) << name_of(matrix, c) << ": " << layout.status().message();
}

TEST(FamilyMatrix, HasNoEmptyCell) {
  for (const FamilyMatrix& matrix : all_matrices()) {
    for (const Combination& c : combinations(matrix)) {
      const MatrixRow* row = row_of(matrix, c);
      ASSERT_NE(row, nullptr) << name_of(matrix, c) << ": nothing says what this is";
      EXPECT_FALSE(row->text.empty()) << name_of(matrix, c);
    }
  }
}

TEST(FamilyMatrix, HasNoRowThatSpeaksOfNothing) {
  for (const FamilyMatrix& matrix : all_matrices()) {
    std::set<const MatrixRow*> used;
    for (const Combination& c : combinations(matrix)) used.insert(row_of(matrix, c));
    for (const MatrixRow& row : matrix.rows) EXPECT_EQ(used.count(&row), 1U) << name_of(matrix, row.pattern) << ": " << row.text;
  }
}

TEST(FamilyMatrix, NamesTestsThatExist) {
  for (const FamilyMatrix& matrix : all_matrices()) {
    for (const MatrixRow& row : matrix.rows) {
      EXPECT_TRUE(row.verdict != Verdict::kJudged || test_exists(row.text)) << matrix.family << ": there is no test " << row.text;
    }
  }
}

TEST(FamilyMatrix, HoldsInEveryCell) {
  for (const FamilyMatrix& matrix : all_matrices()) {
    for (const Combination& c : combinations(matrix)) {
      const MatrixRow* row = row_of(matrix, c);
      ASSERT_NE(row, nullptr) << name_of(matrix, c);
      const char* mark = "-";
      if (row->verdict == Verdict::kJudged) {
        mark = "judged";
        expect_judged(matrix, c);
      } else if (row->verdict == Verdict::kRefused) {
        mark = "refused";
        expect_refused(matrix, c, row->text);
      }
      std::printf("%-12s %-28s %-8s %-7s %-8s %-8s %s\n", matrix.family.c_str(), c.variant.c_str(), c.division.c_str(), c.padding.c_str(),
                  c.dtype.c_str(), mark, row->text.c_str());
    }
  }
}

}  // namespace
}  // namespace headrace::testing
