#include "sender_sdk/group_order.h"

#include <gtest/gtest.h>

namespace headrace {
namespace {

using Receivers = std::vector<std::vector<wire::EntryGroup>>;

TEST(GroupOrder, KeepsAGroupTogetherUntilItIsWhole) {
  GroupOrder order;
  const std::vector<wire::EntryGroup> groups{{"a", {0, 1}}, {"b", {2, 3}}};
  ASSERT_TRUE(order.begin(5, Receivers{groups}).ok());
  order.take(0);
  EXPECT_EQ(order.check(2).code(), Code::kFailedPrecondition);
  EXPECT_NE(order.check(2).message().find("1 more of group a"), std::string::npos) << order.check(2).message();
  EXPECT_TRUE(order.check(4).ok()) << "an entry of no group disturbs none";
  EXPECT_TRUE(order.check(1).ok());
  order.take(1);
  EXPECT_TRUE(order.check(3).ok());
  order.take(3);
  order.take(2);
}

TEST(GroupOrder, HoldsEveryReceiverToItsOwnGroups) {
  GroupOrder order;
  const std::vector<wire::EntryGroup> first{{"a", {0, 1}}};
  const std::vector<wire::EntryGroup> second{{"b", {1}}, {"c", {2, 3}}};
  ASSERT_TRUE(order.begin(4, Receivers{first, {}, second}).ok());
  order.take(2);
  EXPECT_TRUE(order.check(0).ok()) << "the second receiver wants 0 in no group";
  EXPECT_FALSE(order.check(1).ok());
  order.take(3);
  EXPECT_TRUE(order.check(1).ok());
}

TEST(GroupOrder, PutsEachGroupWhereItsFirstEntryStands) {
  GroupOrder order;
  const std::vector<wire::EntryGroup> groups{{"a", {5, 1}}, {"b", {2, 4}}};
  ASSERT_TRUE(order.begin(7, Receivers{groups, {}, groups}).ok());
  EXPECT_EQ(order.order(), (std::vector<std::uint32_t>{0, 1, 5, 2, 4, 3, 6}));
  ASSERT_TRUE(order.begin(3, {}).ok());
  EXPECT_EQ(order.order(), (std::vector<std::uint32_t>{0, 1, 2}));
}

TEST(GroupOrder, RefusesGroupsThatNoManifestFits) {
  GroupOrder order;
  EXPECT_EQ(order.begin(2, Receivers{{{"a", {0, 2}}}}).code(), Code::kCorruption);
  EXPECT_EQ(order.begin(2, Receivers{{{"a", {0}}, {"b", {0}}}}).code(), Code::kCorruption);
}

}  // namespace
}  // namespace headrace
