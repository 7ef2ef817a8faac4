#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/measure.h"
#include "benchmarks/planned_update.h"
#include "benchmarks/reference_copy.h"
#include "benchmarks/statistics.h"
#include "benchmarks/v41_model.h"

namespace headrace::bench {
namespace {

TEST(Median, IsTheMiddleValueOrTheMeanOfTheTwoMiddleOnes) {
  EXPECT_EQ(median({7}), 7);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({9, 1, 5, 2}), 3.5);
  EXPECT_EQ(median({1, 1, 1, 1000, 1}), 1);
}

TEST(Spread, IsTheLargestDeviationAsAShareOfTheMedian) {
  EXPECT_EQ(spread({10, 10, 10}), 0);
  EXPECT_DOUBLE_EQ(spread({10, 12, 9}), 0.2);
  EXPECT_DOUBLE_EQ(spread({10, 12, 1}), 0.9);
}

TEST(GigabytesPerSecond, CountsPowersOfAThousand) {
  EXPECT_DOUBLE_EQ(gigabytes_per_second(3e9, 1.5), 2);
}

TEST(Interleave, RunsTheWorksInTurnAfterOneRoundThatDoesNotCount) {
  std::string order;
  double next = 0;
  const std::array<TimedWork, 3> works{[&] { return order += 'a', ++next; }, [&] { return order += 'b', ++next; },
                                       [&] { return order += 'c', ++next; }};
  const std::vector<std::vector<double>> seconds = interleave("order", 5, works);
  EXPECT_EQ(order, "abcabcabcabcabcabc");
  ASSERT_EQ(seconds.size(), 3u);
  EXPECT_EQ(seconds[0], (std::vector<double>{4, 7, 10, 13, 16}));
  EXPECT_EQ(seconds[2], (std::vector<double>{6, 9, 12, 15, 18}));
}

TEST(Interleave, PassesTheFailureOfAWorkOn) {
  int calls = 0;
  const std::array<TimedWork, 1> works{[&]() -> double {
    if (++calls == 3) throw std::runtime_error("third");
    return 1;
  }};
  EXPECT_THROW(interleave("failure", 5, works), std::runtime_error);
  EXPECT_EQ(calls, 3);
}

std::vector<std::byte> numbered(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

TEST(PlainCopy, MovesExactlyTheBytesThatItIsGivenAtAnyAlignmentWithEveryKind) {
  const std::vector<std::byte> source = numbered(5000);
  for (const CopyKind kind : copy_kinds()) {
    for (const std::size_t offset : {0U, 1U, 31U, 64U}) {
      for (const std::size_t size : {0U, 1U, 63U, 64U, 65U, 1000U, 4096U, 4900U}) {
        std::vector<std::byte> destination(5000, std::byte{0xee});
        std::vector<std::byte> expected = destination;
        for (std::size_t i = 0; i < size; ++i) expected[offset + i] = source[3 + i];
        plain_copy(kind, std::span(source).subspan(3, size), std::span(destination).subspan(offset, size));
        EXPECT_EQ(destination, expected) << copy_kind_name(kind) << " of " << size << " to " << offset;
      }
    }
  }
}

TEST(PlainCopy, OfSeveralThreadsMovesTheSameBytes) {
  const std::vector<std::byte> source = numbered(100'003);
  WorkerPool pool(3);
  for (const CopyKind kind : copy_kinds()) {
    std::vector<std::byte> destination(source.size());
    plain_copy(kind, pool, source, destination);
    EXPECT_EQ(destination, source) << copy_kind_name(kind);
  }
}

TEST(ReadSum, AddsWordsAndTrailingBytes) {
  std::vector<std::byte> bytes(67, std::byte{0});
  bytes[0] = std::byte{5};
  bytes[9] = std::byte{1};   // second byte of the second word
  bytes[66] = std::byte{3};  // behind the last word
  EXPECT_EQ(read_sum(bytes), 5u + 256u + 3u);
}

TEST(SenderOrder, OfV41HasTheNamesOfThePublishedCheckpointWithoutDraftsAndTables) {
  const std::vector<wire::ManifestEntry> entries = sender_order(v41_layout({}, 4, 0), 1, true);
  EXPECT_EQ(entries.size(), 93'680u);
}

TEST(SenderOrder, BringsASlotOfAllTrainerRanksBeforeTheNext) {
  const ModelLayout layout = experts_only(v41_layout({.layers = 1, .experts = 8}, 1, 0));
  std::vector<std::string> names;
  for (const wire::ManifestEntry& entry : sender_order(layout, 2, false)) names.push_back(entry.name);
  const auto at = [](int expert, const std::string& leaf) { return "layers.0.ffn.experts." + std::to_string(expert) + "." + leaf; };
  std::vector<std::string> expected;
  for (const int slot : {0, 1, 2, 3}) {
    for (const std::string w : {"w1", "w3", "w2"}) {
      for (const int expert : {slot, slot + 4}) {
        expected.push_back(at(expert, w + ".weight"));
        expected.push_back(at(expert, w + ".scale"));
      }
    }
  }
  EXPECT_EQ(names, expected);
}

TEST(FilledBuckets, HoldEveryCellOnceInOrderAtCacheLines) {
  const ModelLayout layout = tiny_layout(40);
  const StorageBlock storage = StorageBlock::reserve(layout);
  std::vector<wire::ManifestEntry> entries = sender_order(layout, 1, false);
  ASSERT_EQ(entries.size(), 40u);
  const PlannedUpdate update(layout, storage, entries, 65'536);
  ASSERT_EQ(update.buckets().size(), 3u);
  std::uint32_t next = 0;
  for (const StagedBucket& bucket : update.buckets()) {
    EXPECT_LE(bucket.bytes, 65'536);
    std::int64_t end = 0;
    for (const StagedCell& cell : bucket.cells) {
      EXPECT_EQ(cell.entry, next++);
      EXPECT_EQ(cell.offset % 64, 0);
      EXPECT_GE(cell.offset, end);
      end = cell.offset + cell.bytes;
    }
  }
  EXPECT_EQ(next, 40u);
  EXPECT_EQ(update.wanted_bytes(), 40 * 4096);
}

}  // namespace
}  // namespace headrace::bench
