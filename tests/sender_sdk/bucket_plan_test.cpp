#include "sender_sdk/bucket_plan.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <numeric>

namespace headrace {
namespace {

wire::ManifestEntry entry_of(Shape shape, std::string name = "w", Dtype dtype = Dtype::kU8) {
  const Box box = Box::whole(shape);
  return {std::move(name), dtype, std::move(shape), box};
}

wire::Wanted wants(std::vector<std::int64_t> granule, std::vector<Box> boxes) {
  return {false, std::move(granule), std::move(boxes)};
}

/// Plans one entry for receivers named "rank 0", "rank 1", ...
Result<BucketPlan> plan_of(const std::vector<wire::ManifestEntry>& entries, const std::vector<std::vector<wire::Wanted>>& answers,
                           std::int64_t bucket_bytes, Unwanted unwanted = Unwanted::kRefuse) {
  const std::vector<std::span<const wire::Wanted>> spans(answers.begin(), answers.end());
  std::vector<std::string> names;
  for (std::size_t r = 0; r < answers.size(); ++r) names.push_back("rank " + std::to_string(r));
  return make_bucket_plan({entries, spans, names, bucket_bytes, unwanted});
}

/// How often each element of a tensor goes to a receiver, row-major.
std::vector<int> deliveries(const BucketPlan& plan, std::size_t entry, std::uint32_t receiver, const Shape& shape) {
  std::vector<int> count(static_cast<std::size_t>(*element_count(shape)), 0);
  for (const Cell& cell : plan.cells_of(entry)) {
    const auto& group = plan.groups[cell.group];
    if (std::find(group.begin(), group.end(), receiver) == group.end()) continue;
    for (std::size_t i = 0; i < count.size(); ++i) {
      auto rest = static_cast<std::int64_t>(i);
      bool inside = true;
      for (std::size_t d = shape.size(); d-- > 0;) {
        const std::int64_t at = rest % shape[d];
        rest /= shape[d];
        inside = inside && at >= cell.box.lo[d] && at < cell.box.hi[d];
      }
      if (inside) ++count[i];
    }
  }
  return count;
}

std::vector<int> expected_deliveries(const std::vector<Box>& boxes, const Shape& shape) {
  BucketPlan plan;
  plan.groups = {{0}};
  for (const Box& box : boxes) plan.cells.push_back({box, 0});
  plan.entries = {{0, static_cast<std::uint32_t>(boxes.size())}};
  return deliveries(plan, 0, 0, shape);
}

TEST(BucketPlan, PacksOnceWhatAllReceiversWantWhole) {
  const auto entry = entry_of({8, 16});
  const auto want = wants({1, 1}, {entry.box});
  const auto plan = plan_of({entry}, {{want}, {want}, {want}}, 1 << 20);
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  ASSERT_EQ(plan.value().cells.size(), 1U);
  EXPECT_EQ(plan.value().cells[0].box, entry.box);
  EXPECT_EQ(plan.value().groups[0], (std::vector<std::uint32_t>{0, 1, 2}));
}

TEST(BucketPlan, SharesTheOverlapOfDifferentBoxes) {
  const auto entry = entry_of({12});
  const auto plan = plan_of({entry}, {{wants({1}, {Box{{0}, {8}}})}, {wants({1}, {Box{{4}, {12}}})}}, 1 << 20);
  ASSERT_TRUE(plan.ok());
  const auto cells = plan.value().cells_of(0);
  ASSERT_EQ(cells.size(), 3U);
  EXPECT_EQ(cells[1].box, (Box{{4}, {8}}));
  EXPECT_EQ(plan.value().groups[cells[1].group], (std::vector<std::uint32_t>{0, 1}));
}

TEST(BucketPlan, PacksSeparatelyForAReceiverThatTheCutWouldBreak) {
  const auto entry = entry_of({12});
  // The second receiver's edge at 4 is no multiple of the first one's granule.
  const auto plan = plan_of({entry}, {{wants({3}, {entry.box})}, {wants({4}, {Box{{4}, {12}}})}}, 1 << 20);
  ASSERT_TRUE(plan.ok());
  for (const Cell& cell : plan.value().cells_of(0)) EXPECT_EQ(plan.value().groups[cell.group].size(), 1U);
  EXPECT_EQ(plan.value().cells_of(0).size(), 2U);
}

TEST(BucketPlan, SplitsATensorLargerThanABucketOutermostFirst) {
  const auto entry = entry_of({10, 100}, "big", Dtype::kF32);
  const auto plan = plan_of({entry}, {{wants({2, 50}, {entry.box})}}, 700);
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  for (const Cell& cell : plan.value().cells_of(0)) {
    EXPECT_LE(cell.box.elements() * 4, 700);
    EXPECT_EQ(cell.box.lo[0] % 2, 0);
    EXPECT_EQ(cell.box.lo[1] % 50, 0);
  }
  EXPECT_EQ(plan.value().cells_of(0).size(), 10U);
  const auto rows = plan_of({entry}, {{wants({2, 50}, {entry.box})}}, 1'700);
  ASSERT_TRUE(rows.ok());
  EXPECT_EQ(rows.value().cells_of(0).size(), 3U) << "4, 4 and 2 rows";
}

TEST(BucketPlan, NamesTheTensorWhoseSmallestCutIsLargerThanABucket) {
  const auto entry = entry_of({8, 100}, "layers.0.huge");
  const auto plan = plan_of({entry}, {{wants({8, 50}, {entry.box})}}, 399);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), Code::kInvalidArgument);
  EXPECT_NE(plan.status().message().find("layers.0.huge"), std::string::npos);
  EXPECT_NE(plan.status().message().find("400 bytes"), std::string::npos);
  EXPECT_NE(plan.status().message().find("399"), std::string::npos);
}

TEST(BucketPlan, NamesEveryEntryThatIsNotWantedAsAWhole) {
  const auto all = wants({1}, {Box{{0}, {4}}});
  const auto some = wants({1}, {Box{{0}, {2}}});
  const wire::Wanted nothing{false, {1}, {}};
  const wire::Wanted ignored{true, {}, {}};
  const std::vector entries{entry_of({4}, "whole"), entry_of({4}, "hole"), entry_of({4}, "unwanted"), entry_of({4}, "dropped")};
  const auto plan = plan_of(entries, {{all, some, nothing, ignored}, {nothing, nothing, ignored, ignored}}, 1 << 20);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), Code::kInvalidArgument);
  const std::string& text = plan.status().message();
  EXPECT_NE(text.find("2 of 4 entries"), std::string::npos) << text;
  EXPECT_NE(text.find("hole"), std::string::npos);
  EXPECT_NE(text.find("unwanted"), std::string::npos);
  EXPECT_EQ(text.find("dropped"), std::string::npos);
  EXPECT_TRUE(plan_of(entries, {{all, some, nothing, ignored}}, 1 << 20, Unwanted::kAllow).ok());
}

TEST(BucketPlan, LetsAnotherSendersBytesStayUnwantedOnlyEntirely) {
  const wire::Wanted nothing{false, {1}, {}};
  EXPECT_TRUE(plan_of({entry_of({4})}, {{nothing}}, 1 << 20, Unwanted::kAllowEntirely).ok());
  EXPECT_FALSE(plan_of({entry_of({4})}, {{wants({1}, {Box{{0}, {2}}})}}, 1 << 20, Unwanted::kAllowEntirely).ok());
}

TEST(BucketPlan, RefusesAnswersThatDoNotFitTheEntry) {
  const auto refused = [](const std::vector<wire::Wanted>& answer) {
    const auto plan = plan_of({entry_of({4, 4})}, {answer}, 1 << 20);
    return !plan.ok() && plan.status().code() == Code::kCorruption && plan.status().message().find("rank 0") != std::string::npos;
  };
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(refused({wants({1}, {Box{{0, 0}, {4, 4}}})}));
  EXPECT_TRUE(refused({wants({0, 1}, {Box{{0, 0}, {4, 4}}})}));
  EXPECT_TRUE(refused({wants({1, 1}, {Box{{0, 0}, {4, 5}}})}));
  EXPECT_TRUE(refused({wants({1, 1}, {Box{{0, 0}, {0, 4}}})}));
  EXPECT_TRUE(refused({wants({1, 1}, {Box{{0, 0}, {3, 4}}, Box{{2, 0}, {4, 4}}})})) << "bytes asked for twice";
}

TEST(BucketPlan, PlansScalarsAndTensorsWithoutElements) {
  const auto scalar = entry_of({}, "scale", Dtype::kF32);
  const auto empty = entry_of({0, 4}, "none");
  const auto plan = plan_of({scalar, empty}, {{wants({}, {scalar.box}), wire::Wanted{false, {1, 1}, {}}}}, 64);
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_EQ(plan.value().cells_of(0).size(), 1U);
  EXPECT_TRUE(plan.value().cells_of(1).empty());
}

/// Disjoint boxes at multiples of the granule (or the tensor's end), by cutting the tensor at random and keeping some of the pieces.
std::vector<Box> random_boxes(const Shape& shape, const std::vector<std::int64_t>& granule) {
  std::vector<Box> pieces{Box::whole(shape)};
  const int cuts = *rc::gen::inRange(0, 4);
  for (int i = 0; i < cuts; ++i) {
    const auto p = static_cast<std::size_t>(*rc::gen::inRange<std::size_t>(0, pieces.size()));
    const auto d = static_cast<std::size_t>(*rc::gen::inRange<std::size_t>(0, shape.size()));
    const std::int64_t at = *rc::gen::inRange<std::int64_t>(0, shape[d]) / granule[d] * granule[d];
    if (at <= pieces[p].lo[d] || at >= pieces[p].hi[d]) continue;
    Box behind = pieces[p];
    behind.lo[d] = at;
    pieces[p].hi[d] = at;
    pieces.push_back(behind);
  }
  std::vector<Box> kept;
  for (const Box& piece : pieces) {
    if (*rc::gen::inRange(0, 4) != 0) kept.push_back(piece);
  }
  return kept;
}

TEST(BucketPlan, GivesEveryReceiverExactlyItsBoxesOnceAtItsGranuleUnderTheLimit) {
  const bool held = rc::check([] {
    const auto rank = *rc::gen::inRange<std::size_t>(1, 4);
    Shape shape;
    for (std::size_t d = 0; d < rank; ++d) shape.push_back(*rc::gen::inRange<std::int64_t>(1, 13));
    const auto receivers = *rc::gen::inRange<std::size_t>(1, 5);
    std::vector<std::vector<wire::Wanted>> answers;
    std::int64_t unit = 1;
    for (std::size_t r = 0; r < receivers; ++r) {
      std::vector<std::int64_t> granule;
      for (std::size_t d = 0; d < rank; ++d) granule.push_back(*rc::gen::inRange<std::int64_t>(1, 5));
      answers.push_back({wants(granule, random_boxes(shape, granule))});
    }
    // The largest common granule of any group decides what still fits; with the whole tensor as limit nothing is refused.
    for (const std::int64_t dimension : shape) unit *= dimension;
    const std::int64_t limit = *rc::gen::element(unit, std::max<std::int64_t>(unit / 2, 1), std::int64_t{1} << 20);
    const auto plan = plan_of({entry_of(shape)}, answers, limit, Unwanted::kAllow);
    if (!plan.ok()) {
      RC_ASSERT(limit < unit);
      return;
    }
    for (std::uint32_t r = 0; r < receivers; ++r) {
      const wire::Wanted& want = answers[r][0];
      RC_ASSERT(deliveries(plan.value(), 0, r, shape) == expected_deliveries(want.boxes, shape));
      for (const Cell& cell : plan.value().cells_of(0)) {
        RC_ASSERT(cell.box.elements() <= limit);
        const auto& group = plan.value().groups[cell.group];
        if (std::find(group.begin(), group.end(), r) == group.end()) continue;
        for (std::size_t d = 0; d < rank; ++d) {
          RC_ASSERT(cell.box.lo[d] % want.granule[d] == 0);
          RC_ASSERT(cell.box.hi[d] % want.granule[d] == 0 || cell.box.hi[d] == shape[d]);
        }
      }
    }
  });
  EXPECT_TRUE(held);
}

}  // namespace
}  // namespace headrace
