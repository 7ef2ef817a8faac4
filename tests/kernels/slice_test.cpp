#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>

#include "kernels/strided_copy.h"
#include "tests/kernels/naive_copy.h"
#include "tests/kernels/random_nest.h"

namespace headrace {
namespace {

using Coordinates = std::vector<std::int64_t>;

/// Which element of a row-major tensor, and which byte of it, stands at an offset.
struct Place {
  Coordinates element;
  std::int64_t byte = 0;
};

Place place_of(const TensorGeometry& tensor, std::int64_t offset) {
  Place place{Coordinates(tensor.shape.size()), offset % tensor.elem_bytes};
  std::int64_t index = offset / tensor.elem_bytes;
  for (std::size_t d = tensor.shape.size(); d-- > 0;) {
    place.element[d] = index % tensor.shape[d];
    index /= tensor.shape[d];
  }
  return place;
}

bool inside(const Box& box, const Place& place) {
  for (std::size_t d = 0; d < box.rank(); ++d) {
    if (place.element[d] < box.lo[d] || place.element[d] >= box.hi[d]) return false;
  }
  return true;
}

/// The (memory, destination) pairs that the slice has to have.
std::set<std::pair<std::int64_t, std::int64_t>> expected_moves(const StridedCopy& copy, const TensorGeometry& tensor, const Box& box,
                                                               std::int64_t offset, const Coordinates& strides) {
  std::set<std::pair<std::int64_t, std::int64_t>> pairs;
  naive::each_byte(copy, [&](std::int64_t s, std::int64_t d) {
    const Place place = place_of(tensor, s);
    if (!inside(box, place)) return;
    std::int64_t at = offset + place.byte;
    for (std::size_t j = 0; j < box.rank(); ++j) at += (place.element[j] - box.lo[j]) * strides[j];
    pairs.emplace(at, d);
  });
  return pairs;
}

std::set<std::pair<std::int64_t, std::int64_t>> moves(const StridedCopy& copy) {
  std::set<std::pair<std::int64_t, std::int64_t>> pairs;
  if (copy.run_bytes > 0) naive::each_byte(copy, [&](std::int64_t s, std::int64_t d) { pairs.emplace(s, d); });
  return pairs;
}

/// Strides of memory that holds a box: packed, or with room between rows.
Coordinates memory_strides(const Box& box, std::int64_t elem_bytes, bool padded) {
  Coordinates strides = packed_strides(box.shape(), elem_bytes);
  std::int64_t extra = 0;
  for (std::size_t d = strides.size(); padded && d-- > 0;) {
    strides[d] += extra;
    extra = extra * box.shape()[d] + (d + 1 == strides.size() ? 0 : 8);
    if (d + 1 == strides.size()) extra = 8;
  }
  return strides;
}

struct Case {
  std::string name;
  StridedCopy copy;
  TensorGeometry tensor;
  Coordinates granules;
};

StridedCopy nest(std::int64_t run, std::vector<CopyDim> dims, std::int64_t src = 0, std::int64_t dst = 0) {
  return StridedCopy::make(src, dst, run, dims);
}

StridedCopy to_slots(StridedCopy copy, std::vector<std::int32_t> slots) {
  copy.indexed_dim = 0;
  copy.slots = std::make_shared<const std::vector<std::int32_t>>(std::move(slots));
  return copy;
}

/// Layouts that the receiver uses, on small shapes.
std::vector<Case> cases() {
  const std::int64_t hidden = 256;
  const std::int64_t inter = 256;
  const std::int64_t padded = 512;
  const std::int64_t r1 = hidden / 32;
  const std::int64_t r2 = inter / 32;
  return {
      {"flat 2-D", StridedCopy::flat(0, 7, 48 * 10 * 2), {{48, 10}, 2}, {1, 1}},
      {"flat 3-D of single bytes", StridedCopy::flat(0, 0, 60), {{3, 4, 5}, 1}, {1, 1, 1}},
      {"1-D", StridedCopy::flat(0, 5, 40), {{10}, 4}, {1}},
      {"scalar", StridedCopy::flat(0, 5, 4), {{}, 4}, {}},
      {"dimensions of size 1", StridedCopy::flat(0, 0, 32), {{1, 4, 1, 2, 1}, 4}, {1, 1, 1, 1, 1}},
      {"L1 weight", nest(8 * hidden / 2, {{inter / 8, 8 * hidden / 2, 16 * hidden / 2}}), {{inter, hidden / 2}, 1}, {8, 1}},
      {"L1 scale",
       nest(4, {{inter / 64, 64 * r1, 512}, {4, 16 * r1, 4}, {2, 8 * r1, 256}, {8, r1, 16}, {hidden / 128, 4, 8 * padded}}),
       {{inter, r1}, 1},
       {64, 4}},
      {"L2 weight", nest(inter / 2, {{hidden, inter / 2, padded / 2}}), {{hidden, inter / 2}, 1}, {1, 1}},
      {"L2 scale",
       nest(4, {{hidden / 128, 128 * r2, 512}, {4, 32 * r2, 4}, {32, r2, 16}, {inter / 128, 4, 4 * hidden}}),
       {{hidden, r2}, 1},
       {128, 4}},
      {"rows of one rank, permuted", nest(16 * 6, {{2, 512 * 6, 96}, {32, 96, 192}}, 2 * 512 * 6), {{4 * 512, 6}, 1}, {512, 1}},
      {"columns permuted", nest(32, {{3, 4096, 4096}, {8, 512, 32}, {16, 32, 256}}), {{3, 4096}, 1}, {1, 512}},
      {"each row 4 times", nest(6, {{5, 6, 24}, {4, 0, 6}}), {{5, 3}, 2}, {1, 1}},
      {"rows of a fused tensor into slots", to_slots(nest(24, {{4, 24, 24}}), {5, 0, 3, 2}), {{4, 6, 2}, 2}, {1, 1, 1}},
  };
}

TEST(Slice, StatesTheGranuleOfEveryLayout) {
  for (const Case& c : cases()) {
    const auto granules = granule(c.copy, c.tensor);
    ASSERT_TRUE(granules.ok()) << c.name << ": " << granules.status().to_string();
    EXPECT_EQ(granules.value(), c.granules) << c.name;
  }
}

/// A random box on the granule.
Box random_box(const Case& c) {
  Box box;
  for (std::size_t d = 0; d < c.tensor.shape.size(); ++d) {
    const std::int64_t size = c.tensor.shape[d];
    const std::int64_t steps = (size + c.granules[d] - 1) / c.granules[d];
    const std::int64_t lo = randomly::number(0, 2) == 0 ? 0 : randomly::number(0, steps - 1);
    const std::int64_t hi = randomly::number(0, 2) == 0 ? steps : randomly::number(lo + 1, steps);
    box.lo.push_back(lo * c.granules[d]);
    box.hi.push_back(std::min(size, hi * c.granules[d]));
  }
  return box;
}

RC_GTEST_PROP(Slice, CoversExactlyTheBox, ()) {
  const std::vector<Case> all = cases();
  const Case& c = all[static_cast<std::size_t>(randomly::number(0, static_cast<std::int64_t>(all.size()) - 1))];
  RC_LOG() << c.name << "\n";
  const Box box = random_box(c);
  const std::int64_t offset = randomly::number(0, 20);
  const Coordinates strides = memory_strides(box, c.tensor.elem_bytes, randomly::number(0, 1) == 1);
  const Result<StridedCopy> part = slice(c.copy, c.tensor, box, offset, strides);
  if (!part.ok()) RC_FAIL(part.status().to_string() + " box " + to_string(box));
  RC_ASSERT(moves(part.value()) == expected_moves(c.copy, c.tensor, box, offset, strides));
}

RC_GTEST_PROP(Slice, AllSlicesTogetherAreTheWhole, ()) {
  const std::vector<Case> all = cases();
  const Case& c = all[static_cast<std::size_t>(randomly::number(0, static_cast<std::int64_t>(all.size()) - 1))];
  RC_PRE(!c.tensor.shape.empty());
  const auto d = static_cast<std::size_t>(randomly::number(0, static_cast<std::int64_t>(c.tensor.shape.size()) - 1));
  std::map<std::int64_t, int> written;
  Box box = Box::whole(c.tensor.shape);
  for (std::int64_t lo = 0; lo < c.tensor.shape[d]; lo = box.hi[d]) {
    box.lo[d] = lo;
    box.hi[d] = std::min(c.tensor.shape[d], lo + c.granules[d] * randomly::number(1, 3));
    const Result<StridedCopy> part = slice(c.copy, c.tensor, box, 0, packed_strides(box.shape(), c.tensor.elem_bytes));
    RC_ASSERT(part.ok());
    for (const auto& [s, to] : moves(part.value())) ++written[to];
  }
  naive::each_byte(c.copy, [&](std::int64_t, std::int64_t to) { RC_ASSERT(written[to] == 1); });
  RC_ASSERT(static_cast<std::int64_t>(written.size()) == c.copy.dst_bytes());
}

TEST(Slice, OfTheWholePackedTensorIsTheNestItself) {
  for (const Case& c : cases()) {
    const Result<StridedCopy> part =
        slice(c.copy, c.tensor, Box::whole(c.tensor.shape), 0, packed_strides(c.tensor.shape, c.tensor.elem_bytes));
    ASSERT_TRUE(part.ok()) << c.name;
    EXPECT_EQ(moves(part.value()), moves(c.copy)) << c.name;
  }
}

TEST(Slice, RefusesCutsBesideTheGranule) {
  const Case l1 = cases()[5];
  const Result<StridedCopy> part = slice(l1.copy, l1.tensor, Box{{4, 0}, {256, 128}}, 0, std::vector<std::int64_t>{128, 1});
  EXPECT_EQ(part.status().code(), Code::kInvalidArgument);
  EXPECT_NE(part.status().message().find("dimension 0 is cut to [4,256), expected multiples of 8"), std::string::npos)
      << part.status().message();
}

TEST(Slice, RefusesSourcesThatBreakARun) {
  const StridedCopy copy = StridedCopy::flat(0, 0, 48);
  const TensorGeometry tensor{{6, 4}, 2};
  const auto broken = slice(copy, tensor, Box::whole(tensor.shape), 0, std::vector<std::int64_t>{2, 12});
  EXPECT_EQ(broken.status().code(), Code::kInvalidArgument);
  EXPECT_NE(broken.status().message().find("stand 12 bytes apart, a run needs 2"), std::string::npos) << broken.status().message();
  EXPECT_TRUE(slice(copy, tensor, Box{{0, 1}, {6, 2}}, 0, std::vector<std::int64_t>{2, 12}).ok());
}

TEST(Slice, RefusesBoxesAndTensorsThatDoNotFit) {
  const StridedCopy copy = StridedCopy::flat(0, 0, 24);
  const std::vector<std::int64_t> strides{4, 1};
  EXPECT_EQ(slice(copy, {{6, 4}, 1}, Box{{0, 0}, {7, 4}}, 0, strides).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(slice(copy, {{6, 4}, 1}, Box{{2, 0}, {2, 4}}, 0, strides).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(slice(copy, {{0, 4}, 1}, Box{{0, 0}, {0, 4}}, 0, strides).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(slice(copy, {{6, 4}, 1}, Box{{0, 0}, {6, 4}}, 0, std::vector<std::int64_t>{4}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(slice(copy, {{6, 4}, 1}, Box{{0, 0}, {3, 4}}, 0, std::vector<std::int64_t>{-4, 1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(slice(copy, {{5, 4}, 1}, Box{{0, 0}, {3, 4}}, 0, strides).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(granule(copy, {{5, 4}, 1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(granule(copy, {{0, 4}, 1}).status().code(), Code::kInvalidArgument);
}

TEST(Slice, OfRowsThatTheNestDoesNotReadMovesNothing) {
  const StridedCopy upper_half = StridedCopy::flat(12, 0, 12);
  const Result<StridedCopy> part = slice(upper_half, {{6, 4}, 1}, Box{{0, 0}, {3, 4}}, 0, std::vector<std::int64_t>{4, 1});
  ASSERT_TRUE(part.ok()) << part.status().to_string();
  EXPECT_EQ(part.value().dst_bytes(), 0);
}

TEST(Slice, TakesAllThatTheNestReadsWhereverThatBegins) {
  // Tiles of 4 rows that begin at row 3 of 12, and columns 1 to 3 of 5: the steps of 4 rows are no multiples of 4.
  const StridedCopy copy = nest(2, {{2, 20, 32}, {4, 5, 4}}, 16);
  const TensorGeometry tensor{{12, 5}, 1};
  EXPECT_EQ(granule(copy, tensor).value(), (Coordinates{12, 1}));
  const Result<StridedCopy> part = slice(copy, tensor, Box{{3, 1}, {11, 3}}, 0, std::vector<std::int64_t>{2, 1});
  ASSERT_TRUE(part.ok()) << part.status().to_string();
  EXPECT_EQ(moves(part.value()), moves(nest(2, {{2, 8, 32}, {4, 2, 4}})));
  EXPECT_EQ(slice(copy, tensor, Box{{3, 1}, {7, 3}}, 0, std::vector<std::int64_t>{2, 1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(slice(copy, tensor, Box{{0, 0}, {3, 5}}, 0, std::vector<std::int64_t>{5, 1}).value().dst_bytes(), 0);
}

TEST(Slice, OfNestsThatDoNotFollowTheTensorTakesWholeTensorsOnly) {
  // Runs of 6 bytes over rows of 4.
  const StridedCopy copy = nest(6, {{4, 6, 8}});
  const TensorGeometry tensor{{6, 4}, 1};
  const auto granules = granule(copy, tensor);
  ASSERT_TRUE(granules.ok());
  EXPECT_EQ(granules.value(), (Coordinates{6, 4}));
  const Result<StridedCopy> whole = slice(copy, tensor, Box::whole(tensor.shape), 3, std::vector<std::int64_t>{4, 1});
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole.value(), nest(6, {{4, 6, 8}}, 3));
  EXPECT_EQ(slice(copy, tensor, Box{{0, 0}, {3, 4}}, 0, std::vector<std::int64_t>{4, 1}).status().code(), Code::kInvalidArgument);
}

TEST(PackNest, PacksTransposedAndBroadcastViews) {
  // A [5,3] tensor of 2-byte elements seen as [3,4,5]: transposed, and repeated in the middle.
  const std::vector<std::int64_t> shape{3, 4, 5};
  const std::vector<std::int64_t> strides{2, 0, 6};
  const Result<StridedCopy> pack = pack_nest(shape, 2, strides);
  ASSERT_TRUE(pack.ok()) << pack.status().to_string();
  std::set<std::pair<std::int64_t, std::int64_t>> expected;
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < 3; ++i) {
    for (std::int64_t j = 0; j < 4; ++j) {
      for (std::int64_t k = 0; k < 5; ++k) {
        for (std::int64_t b = 0; b < 2; ++b) expected.emplace(i * 2 + k * 6 + b, at++);
      }
    }
  }
  EXPECT_EQ(moves(pack.value()), expected);
}

TEST(PackNest, OfPackedMemoryIsFlat) {
  EXPECT_EQ(pack_nest(std::vector<std::int64_t>{3, 4, 5}, 2, std::vector<std::int64_t>{40, 10, 2}).value(), StridedCopy::flat(0, 0, 120));
  EXPECT_EQ(pack_nest(std::vector<std::int64_t>{}, 8, std::vector<std::int64_t>{}).value(), StridedCopy::flat(0, 0, 8));
  EXPECT_EQ(pack_nest(std::vector<std::int64_t>(12, 1), 8, std::vector<std::int64_t>(12, 77)).value(), StridedCopy::flat(0, 0, 8));
}

TEST(PackNest, RefusesWhatOneNestCannotSay) {
  EXPECT_EQ(pack_nest(std::vector<std::int64_t>{3, 0}, 2, std::vector<std::int64_t>{2, 2}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(pack_nest(std::vector<std::int64_t>{3, 2}, 2, std::vector<std::int64_t>{-4, 2}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(pack_nest(std::vector<std::int64_t>{3, 2}, 2, std::vector<std::int64_t>{4}).status().code(), Code::kInvalidArgument);
  std::vector<std::int64_t> strides;
  for (std::int64_t d = 9; d-- > 0;) strides.push_back(std::int64_t{3} << (2 * d));
  EXPECT_EQ(pack_nest(std::vector<std::int64_t>(9, 2), 1, strides).status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace headrace
