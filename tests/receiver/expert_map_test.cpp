#include "receiver/expert_map.h"

#include <gtest/gtest.h>

namespace headrace {
namespace {

std::vector<std::int32_t> slots(const ExpertMap& map, std::int32_t expert) {
  const auto span = map.slots_of(expert);
  return {span.begin(), span.end()};
}

TEST(ExpertMap, GivesEachRankItsContiguousShareAtLoad) {
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    const ExpertMap map = ExpertMap::initial(384, 0, rank, 4).value_or_throw();
    EXPECT_EQ(map.experts(), 384);
    EXPECT_EQ(map.local_slots(), 96);
    for (std::int32_t e = 0; e < 384; ++e) {
      if (e / 96 == rank) {
        EXPECT_EQ(slots(map, e), std::vector<std::int32_t>{e % 96});
      } else {
        EXPECT_TRUE(slots(map, e).empty());
      }
    }
  }
}

TEST(ExpertMap, PutsRedundantExpertsBehindTheOthers) {
  // 8 experts and 4 redundant on 2 ranks: rank 1 holds physical 6..11, that is logical 6, 7, 0, 1, 2, 3.
  const ExpertMap map = ExpertMap::initial(8, 4, 1, 2).value_or_throw();
  EXPECT_EQ(map.local_slots(), 6);
  EXPECT_EQ(slots(map, 6), std::vector<std::int32_t>{0});
  EXPECT_EQ(slots(map, 0), std::vector<std::int32_t>{2});
  EXPECT_EQ(slots(map, 3), std::vector<std::int32_t>{5});
  EXPECT_TRUE(slots(map, 4).empty());
}

TEST(ExpertMap, ListsEveryReplicaInAscendingOrder) {
  const std::vector<std::int32_t> live{5, 2, 5, 0, 2, 5};
  const ExpertMap map = ExpertMap::from_slots(6, live).value_or_throw();
  EXPECT_EQ(slots(map, 5), (std::vector<std::int32_t>{0, 2, 5}));
  EXPECT_EQ(slots(map, 2), (std::vector<std::int32_t>{1, 4}));
  EXPECT_EQ(slots(map, 0), std::vector<std::int32_t>{3});
  EXPECT_TRUE(slots(map, 1).empty());
}

TEST(ExpertMap, RefusesWhatDoesNotDivideByBothNumbers) {
  const auto result = ExpertMap::initial(384, 1, 0, 4);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
  EXPECT_NE(result.status().message().find("385"), std::string::npos);
  EXPECT_NE(result.status().message().find("4 ranks"), std::string::npos);
}

TEST(ExpertMap, RefusesNumbersOutOfRange) {
  EXPECT_FALSE(ExpertMap::initial(0, 0, 0, 1).ok());
  EXPECT_FALSE(ExpertMap::initial(4, -4, 0, 1).ok());
  EXPECT_FALSE(ExpertMap::initial(4, 0, 4, 4).ok());
  EXPECT_FALSE(ExpertMap::initial(4, 0, -1, 4).ok());
  EXPECT_FALSE(ExpertMap::initial(4, 0, 0, 0).ok());
  EXPECT_FALSE(ExpertMap::initial(INT32_MAX, INT32_MAX, 0, 1).ok());
  EXPECT_FALSE(ExpertMap::from_slots(4, std::vector<std::int32_t>{0, 4}).ok());
  EXPECT_FALSE(ExpertMap::from_slots(4, std::vector<std::int32_t>{-1}).ok());
}

TEST(ExpertMap, DigestTellsMapsApart) {
  const auto digest = [](std::int32_t experts, std::vector<std::int32_t> live) {
    return ExpertMap::from_slots(experts, live).value_or_throw().digest();
  };
  EXPECT_EQ(digest(4, {0, 1}), digest(4, {0, 1}));
  EXPECT_NE(digest(4, {0, 1}), digest(4, {1, 0}));
  EXPECT_NE(digest(4, {0, 1}), digest(5, {0, 1}));
  EXPECT_NE(digest(4, {0, 1}), digest(4, {0, 1, 1}));
}

}  // namespace
}  // namespace headrace
