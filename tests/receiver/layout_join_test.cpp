#include "receiver/layout_join.h"

#include <gtest/gtest.h>

#include "receiver/weight_index.h"
#include "tests/receiver/layout_judge.h"
#include "tests/receiver/small_model.h"

namespace headrace::testing {
namespace {

/// A drafter beside the small model: it takes "a.weight" too, has rows [3, 6) of "rows.weight", and two experts of its own.
ModelLayout drafter() {
  ModelLayout model = small_model::layout();
  model.experts = {ExpertMap::initial(2, 0, 0, 1).value()};
  model.named[1].rule.placements[0].box = Box{{3, 0}, {6, 4}};
  model.named[1].rule.placements[0].copy = StridedCopy::flat(12, 0, 12);
  model.expert_rules[0].prefix = "layers.1.ffn.experts.";
  return model;
}

std::string refusal(ModelLayout first, ModelLayout second) {
  const Result<ModelLayout> joined = join_layouts(std::move(first), std::move(second), "draft.");
  EXPECT_EQ(joined.status().code(), Code::kUnsupported);
  return joined.ok() ? "" : joined.status().message();
}

NameScan answers(std::string known, ScanAnswer answer) {
  return [known = std::move(known), answer](std::string_view name) { return name == known ? answer : ScanAnswer{}; };
}

TEST(LayoutJoin, ATensorOfBothModelsLandsInTheStoragesOfBoth) {
  const ModelLayout joined = join_layouts(small_model::layout(), drafter(), "draft.").value_or_throw();
  const JudgedRank judged = judge_layout(joined);
  EXPECT_EQ(judged.defects, std::vector<std::string>{});
  const JudgedRank alone = judge_layout(small_model::layout());
  const JudgedRank draft = judge_layout(drafter());
  ASSERT_EQ(judged.storages.size(), 6U);
  for (const auto& [name, bytes] : alone.storages) EXPECT_EQ(judged.storages.at(name), bytes) << name;
  for (const auto& [name, bytes] : draft.storages) EXPECT_EQ(judged.storages.at("draft." + name), bytes) << name;
  EXPECT_EQ(judged.storages.at("plain"), judged.storages.at("draft.plain"));
  EXPECT_EQ(judged.tensors, 6U) << "two of both, two experts of each";
}

TEST(LayoutJoin, MapsOfExpertsStandBehindEachOther) {
  const WeightIndex index(join_layouts(small_model::layout(), drafter(), "draft.").value_or_throw());
  EXPECT_EQ(index.resolve("layers.0.ffn.experts.3.w1.weight").kind, Resolution::Kind::kNotLocal);
  EXPECT_EQ(index.resolve("layers.1.ffn.experts.1.w1.weight").kind, Resolution::Kind::kPlaced);
  EXPECT_EQ(index.resolve("layers.1.ffn.experts.3.w1.weight").kind, Resolution::Kind::kUnknown);
  const std::vector<std::vector<std::int32_t>> moved{{3, 2, 1, 0}, {1, 0}};
  const ExpertMaps live = index.rebalanced(moved).value_or_throw();
  EXPECT_EQ(index.resolve("layers.0.ffn.experts.3.w1.weight", live).slots[0], 0);
  EXPECT_EQ(index.resolve("layers.1.ffn.experts.1.w1.weight", live).slots[0], 0);
}

TEST(LayoutJoin, AnythingThatIsNotTheSameToBothIsRefusedByName) {
  ModelLayout second = drafter();
  second.named[0].rule.shape = {8, 6};
  EXPECT_NE(refusal(small_model::layout(), second).find("a.weight: shapes [6,8] and [8,6]"), std::string::npos);
  second = drafter();
  second.named[0].rule.scope = "draft";
  EXPECT_NE(refusal(small_model::layout(), second).find("a.weight: scopes target and draft"), std::string::npos);
  second = drafter();
  second.named[0].rule.dtypes = {Dtype::kF16};
  EXPECT_NE(refusal(small_model::layout(), second).find("a.weight: kept as BF16 and as F16"), std::string::npos);
  second = drafter();
  second.named[1].rule.placements[0].box = Box{{2, 0}, {5, 4}};
  EXPECT_NE(refusal(small_model::layout(), second).find("rows.weight: boxes"), std::string::npos);
  second = drafter();
  for (int i = 0; i < 8; ++i) second.named[0].rule.placements.push_back(second.named[0].rule.placements[0]);
  EXPECT_NE(refusal(small_model::layout(), second).find("a.weight: 10 placements"), std::string::npos);
  second = drafter();
  second.expert_rules[0].prefix = "layers.0.ffn.experts.";
  EXPECT_NE(refusal(small_model::layout(), second).find("layers.0.ffn.experts.0.w1.weight: both models have experts"), std::string::npos);
}

TEST(LayoutJoin, ATensorOfAStagedGroupIsOfOneModelOnly) {
  ModelLayout second = drafter();
  StagedGroup group{.name = "pair", .hook = "make", .entries = {{"a.weight", second.named[0].rule}}, .outputs = {0}};
  group.entries[0].rule.placements.clear();
  second.named.erase(second.named.begin());
  second.groups.push_back(group);
  EXPECT_NE(refusal(small_model::layout(), second).find("a.weight: both take it, and one in a staged group"), std::string::npos);
  EXPECT_NE(refusal(second, small_model::layout()).find("a.weight: both take it, and one in a staged group"), std::string::npos);
  second.groups[0].entries[0].name = "own.weight";
  const ModelLayout joined = join_layouts(small_model::layout(), second, "draft.").value_or_throw();
  EXPECT_EQ(joined.groups[0].name, "draft.pair");
  EXPECT_EQ(joined.storages[joined.groups[0].outputs[0]].name, "draft.plain");
}

TEST(LayoutJoin, StoragesOfOneNameAreRefused) {
  EXPECT_EQ(join_layouts(small_model::layout(), drafter(), "").status().code(), Code::kInvalidArgument);
}

TEST(LayoutJoin, ANameIsWhatEitherModelMakesOfIt) {
  ScanAnswer dropped;
  dropped.kind = ScanAnswer::Kind::kDropped;
  const ScanAnswer plain{.kind = ScanAnswer::Kind::kParam, .param = "plain", .shard = {}};
  ModelLayout first = small_model::layout();
  ModelLayout second = drafter();
  first.scan = answers("odd", dropped);
  second.scan = answers("spelled", plain);
  const WeightIndex one(join_layouts(first, second, "draft.").value_or_throw());
  EXPECT_EQ(one.resolve("odd").kind, Resolution::Kind::kDropped);
  ASSERT_EQ(one.resolve("spelled").kind, Resolution::Kind::kUnknown) << "of the draft alone, and a.weight is a tensor of both";
  EXPECT_EQ(one.resolve("neither").kind, Resolution::Kind::kUnknown);
  first.scan = answers("spelled", plain);
  const WeightIndex both(join_layouts(first, second, "draft.").value_or_throw());
  const Resolution found = both.resolve("spelled");
  ASSERT_EQ(found.kind, Resolution::Kind::kPlaced);
  EXPECT_EQ(both.rule(found.rule).placements.size(), 2U) << "both spell the same tensor so";
  second.scan = answers("spelled", {.kind = ScanAnswer::Kind::kParam, .param = "rows", .shard = {}});
  const WeightIndex torn(join_layouts(first, second, "draft.").value_or_throw());
  EXPECT_EQ(torn.resolve("spelled").kind, Resolution::Kind::kUnknown) << "two tensors of one name";
}

TEST(LayoutJoin, ATensorThatOneModelKnowsUnderAnotherNameIsRefused) {
  ModelLayout second = drafter();
  second.named[0].name = "b.weight";
  second.scan = answers("a.weight", {.kind = ScanAnswer::Kind::kParam, .param = "plain", .shard = {}});
  EXPECT_NE(refusal(small_model::layout(), second).find("a.weight: one model knows it as b.weight"), std::string::npos);
}

}  // namespace
}  // namespace headrace::testing
