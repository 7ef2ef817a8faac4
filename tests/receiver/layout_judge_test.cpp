#include "tests/receiver/layout_judge.h"

#include <gtest/gtest.h>

#include "tests/receiver/small_model.h"

namespace headrace::testing {
namespace {

TEST(LayoutJudge, FindsNothingWrongWithACompleteLayout) {
  const JudgedRank judged = judge_layout(small_model::layout());
  EXPECT_EQ(judged.defects, std::vector<std::string>{});
  EXPECT_EQ(judged.tensors, 4U);
  EXPECT_EQ(judged.storages.at("plain"), seeded_tensor("a.weight", Dtype::kBF16, {6, 8}));
  EXPECT_EQ(judged.storages.at("experts")[4], std::byte{0xEE});
}

TEST(LayoutJudge, SeesBytesThatNothingWrites) {
  ModelLayout layout = small_model::layout();
  layout.constants.clear();
  const JudgedRank judged = judge_layout(layout);
  ASSERT_EQ(judged.defects.size(), 3U);
  EXPECT_EQ(judged.defects[0], "experts: byte 4 of 64 was not written, or depends on the cut");
  EXPECT_EQ(judged.defects[1], "experts: 32 bytes written into 64");
}

TEST(LayoutJudge, SeesBytesThatAreWrittenTwice) {
  ModelLayout layout = small_model::layout();
  layout.named.push_back({"again.weight", layout.named[1].rule});
  EXPECT_FALSE(judge_layout(layout).defects.empty());
}

TEST(LayoutJudge, SaysWhatTheReceiverWouldRefuse) {
  ModelLayout layout = small_model::layout();
  layout.storages[0].bytes = 92;
  ASSERT_EQ(judge_layout(layout).defects.size(), 1U);
}

}  // namespace
}  // namespace headrace::testing
