#include <functional>
#include <string>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

struct Lie {
  std::string name;
  std::function<void(wire::Bucket&)> tell;
  std::string reason;
};

class LyingBucket : public ReceiverFixture, public testing::WithParamInterface<Lie> {};

TEST_P(LyingBucket, WritesNoByteWhenItIsTheFirst) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/1", 1);
  open_update(sender, 8, "run/2");
  wire::Bucket bucket{0, payload_extents()};
  GetParam().tell(bucket);
  sender.send(bucket, payload(2));
  const auto error = sender.expect<wire::ErrorReport>();
  EXPECT_NE(error.failure.message.find(GetParam().reason), std::string::npos) << error.failure.message;
  EXPECT_EQ(error.failure.phase, "transfer");
  EXPECT_EQ(error.failure.rank, 0);
  EXPECT_EQ(state(), "idle");
  EXPECT_EQ(status().version, "run/1");
  expect_live(1);
}

TEST_P(LyingBucket, TearsWhatWasBeingWrittenAndAFullUpdateRecovers) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/1", 1);
  open_update(sender, 8, "run/2");
  const auto data = payload(2);
  sender.send(wire::Bucket{0, {payload_extents()[1]}}, data);
  sender.expect<wire::Consumed>();
  auto extents = payload_extents();
  wire::Bucket bucket{0, extents};
  GetParam().tell(bucket);
  bucket.sequence += 1;
  sender.send(bucket, data);
  const auto error = sender.expect<wire::ErrorReport>();
  EXPECT_EQ(error.state, static_cast<std::uint32_t>(SessionState::kTorn));
  EXPECT_EQ(error.failure.bucket, static_cast<std::int64_t>(bucket.sequence));
  EXPECT_EQ(status().version, "");
  EXPECT_EQ(status().attempted_version, "run/2");
  EXPECT_EQ(guard().slots[0].state, SlotState::kTorn);
  update(sender, 9, "run/2", 3);
  expect_live(3);
  EXPECT_EQ(guard().slots[0].state, SlotState::kCommitted);
}

INSTANTIATE_TEST_SUITE_P(
    AllKinds, LyingBucket,
    testing::Values(Lie{"EntryOutOfRange", [](wire::Bucket& b) { b.extents[0].entry = 5; }, "entry 5 of a manifest of 5"},
                    Lie{"EntryNotWanted", [](wire::Bucket& b) { b.extents[0].entry = 4; }, "this rank wants nothing of it"},
                    Lie{"SequenceGap", [](wire::Bucket& b) { b.sequence += 1; }, "not gapless"},
                    Lie{"BoxOutside", [](wire::Bucket& b) { b.extents[0].box = Box{{0, 0}, {7, 8}}; }, "does not lie in shape"},
                    Lie{"BoxOfOtherRank", [](wire::Bucket& b) { b.extents[1].box = Box{{2, 0}, {4, 4}}; }, "lies in no wanted region"},
                    Lie{"BoxEmpty", [](wire::Bucket& b) { b.extents[0].box = Box{{2, 0}, {2, 8}}; }, "lies in no wanted region"},
                    Lie{"BoxOfWrongRank", [](wire::Bucket& b) { b.extents[0].box = Box{{0}, {6}}; }, "does not lie in shape"},
                    Lie{"SameBytesTwice", [](wire::Bucket& b) { b.extents.push_back(b.extents[0]); }, "came before"},
                    Lie{"OverlappingBoxes",
                        [](wire::Bucket& b) {
                          b.extents[0].box = Box{{0, 0}, {3, 8}};
                          b.extents.push_back({0, MemoryId{1}, 0, Box{{2, 0}, {4, 8}}, {}});
                        },
                        "overlaps"},
                    Lie{"OffsetNegative", [](wire::Bucket& b) { b.extents[0].offset = -1; }, "of a memory of 140"},
                    Lie{"OffsetBeyond", [](wire::Bucket& b) { b.extents[0].offset = 45; }, "of a memory of 140"},
                    Lie{"OffsetHuge", [](wire::Bucket& b) { b.extents[0].offset = INT64_MAX; }, "of a memory of 140"},
                    Lie{"StridesTooFew",
                        [](wire::Bucket& b) {
                          b.extents[0].box = Box{{0, 0}, {6, 8}};
                          b.extents[0].strides = {16};
                        },
                        "strides"},
                    Lie{"StridesNegative",
                        [](wire::Bucket& b) {
                          b.extents[0].box = Box{{0, 0}, {6, 8}};
                          b.extents[0].strides = {-16, 2};
                        },
                        "strides"},
                    Lie{"StridesBeyond",
                        [](wire::Bucket& b) {
                          b.extents[0].box = Box{{0, 0}, {6, 8}};
                          b.extents[0].strides = {64, 2};
                        },
                        "of a memory of 140"},
                    Lie{"StridesOverflow",
                        [](wire::Bucket& b) {
                          b.extents[0].box = Box{{0, 0}, {6, 8}};
                          b.extents[0].strides = {INT64_MAX, INT64_MAX};
                        },
                        "strides"}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace headrace
