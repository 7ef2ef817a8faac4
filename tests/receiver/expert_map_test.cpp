#include "receiver/expert_map.h"

#include <gtest/gtest.h>

namespace headrace {
namespace {

std::vector<std::int32_t> slots(const ExpertMap& map, std::int32_t expert) {
  const auto span = map.slots_of(expert);
  return {span.begin(), span.end()};
}

std::string refusal(const Result<ExpertMap>& result) {
  EXPECT_FALSE(result.ok());
  if (result.ok()) return {};
  EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
  return result.status().message();
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
  const ExpertMap map = ExpertMap::from_physical(6, {5, 2, 5, 0, 2, 5, 1, 3, 4, 1, 3, 4}, {0, 1, 2, 3, 4, 5}).value_or_throw();
  EXPECT_EQ(slots(map, 5), (std::vector<std::int32_t>{0, 2, 5}));
  EXPECT_EQ(slots(map, 2), (std::vector<std::int32_t>{1, 4}));
  EXPECT_EQ(slots(map, 0), std::vector<std::int32_t>{3});
  EXPECT_TRUE(slots(map, 1).empty());
}

TEST(ExpertMap, CountsLocalSlotsInTheOrderThatTheRankHasThem) {
  // Physical slots dealt out one by one: rank 1 of 2 holds 1, 3, 5.
  const ExpertMap map = ExpertMap::from_physical(6, {0, 1, 2, 3, 4, 5}, {1, 3, 5}).value_or_throw();
  EXPECT_EQ(slots(map, 3), std::vector<std::int32_t>{1});
  EXPECT_TRUE(slots(map, 2).empty());
}

TEST(ExpertMap, KeepsItsSlotsAcrossARebalance) {
  const ExpertMap before = ExpertMap::initial(4, 2, 1, 2).value_or_throw();
  const ExpertMap after = before.rebalanced(std::vector<std::int32_t>{0, 1, 3, 2, 0, 2}).value_or_throw();
  EXPECT_EQ(after.local_slots(), 3);
  EXPECT_EQ(slots(after, 2), (std::vector<std::int32_t>{0, 2}));
  EXPECT_EQ(slots(after, 0), std::vector<std::int32_t>{1});
  EXPECT_TRUE(slots(after, 3).empty());
}

TEST(ExpertMap, RefusesWhatDoesNotDivideByBothNumbers) {
  const std::string message = refusal(ExpertMap::initial(384, 1, 0, 4));
  EXPECT_NE(message.find("385"), std::string::npos);
  EXPECT_NE(message.find("4 ranks"), std::string::npos);
}

TEST(ExpertMap, RefusesNumbersOutOfRange) {
  EXPECT_FALSE(ExpertMap::initial(0, 0, 0, 1).ok());
  EXPECT_FALSE(ExpertMap::initial(4, -4, 0, 1).ok());
  EXPECT_FALSE(ExpertMap::initial(4, 0, 4, 4).ok());
  EXPECT_FALSE(ExpertMap::initial(4, 0, -1, 4).ok());
  EXPECT_FALSE(ExpertMap::initial(4, 0, 0, 0).ok());
  EXPECT_FALSE(ExpertMap::initial(INT32_MAX, INT32_MAX, 0, 1).ok());
  EXPECT_NE(refusal(ExpertMap::initial(8, ExpertMap::kPhysicalMax, 0, 8)).find("262144"), std::string::npos);
  EXPECT_FALSE(ExpertMap::from_physical(0, {}, {}).ok());
  EXPECT_NE(refusal(ExpertMap::from_physical(2, {0, 1}, {2})).find("local slot 2"), std::string::npos);
  EXPECT_NE(refusal(ExpertMap::from_physical(2, {0, 1}, {1, 1})).find("named twice"), std::string::npos);
}

TEST(ExpertMap, NamesTheLayerOfALiveMapThatDoesNotFit) {
  const ExpertMap layer = ExpertMap::initial(3, 1, 0, 2).value_or_throw();
  const ExpertMaps maps({layer, layer});
  const std::vector<std::string> names{"layers.3.", "layers.4."};
  const auto said = [&](std::vector<std::vector<std::int32_t>> physical) {
    const auto result = maps.rebalanced(physical, names);
    EXPECT_FALSE(result.ok());
    return result.ok() ? std::string() : result.status().message();
  };
  const std::vector<std::int32_t> good{2, 1, 0, 2};
  EXPECT_EQ(said({good}), "expert map: 1 MoE layers, the model has 2");
  EXPECT_EQ(said({good, {0, 1, 2}}), "MoE layer 1 (layers.4.): expert map: 3 physical slots, there are 4");
  EXPECT_EQ(said({{0, 1, 3, 2}, good}), "MoE layer 0 (layers.3.): expert map: physical slot 2 holds expert 3, the model has 3");
  EXPECT_EQ(said({good, {0, -1, 1, 2}}), "MoE layer 1 (layers.4.): expert map: physical slot 1 holds expert -1, the model has 3");
  EXPECT_EQ(said({good, {0, 2, 0, 2}}), "MoE layer 1 (layers.4.): expert map: none of 4 physical slots holds expert 1");
  EXPECT_TRUE(maps.rebalanced(std::vector<std::vector<std::int32_t>>{good, {0, 1, 2, 1}}, names).ok());
}

TEST(ExpertMaps, DigestIsThatOfAllRanksAndTellsMapsApart) {
  const auto digest = [](std::int32_t rank, std::vector<std::vector<std::int32_t>> physical) {
    std::vector<ExpertMap> layers;
    for (auto& layer : physical) layers.push_back(ExpertMap::from_physical(2, layer, {2 * rank, 2 * rank + 1}).value_or_throw());
    return ExpertMaps(std::move(layers)).digest();
  };
  EXPECT_EQ(digest(0, {{0, 1, 1, 0}}), digest(1, {{0, 1, 1, 0}}));
  EXPECT_NE(digest(0, {{0, 1, 1, 0}}), digest(0, {{0, 1, 0, 1}}));
  EXPECT_NE(digest(0, {{0, 1, 1, 0}, {0, 1, 0, 1}}), digest(0, {{0, 1, 0, 1}, {0, 1, 1, 0}}));
  EXPECT_NE(digest(0, {{0, 1, 1, 0}}), digest(0, {{0, 1, 1, 0}, {0, 1, 1, 0}}));
}

}  // namespace
}  // namespace headrace
