#include "receiver/expert_runs.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "receiver/models/family.h"
#include "receiver/weight_index.h"
#include "tests/receiver/deepseek_inventory.h"

namespace headrace {
namespace {

using Bytes = std::vector<std::byte>;

/// Carries out one job, loop by loop; counts writes per byte when asked to.
void execute(const CopyJob& job, std::size_t dim, std::int64_t src, std::int64_t dst) {
  if (dim == job.copy.dim_count) {
    for (std::int64_t b = 0; b < job.copy.run_bytes; ++b) job.dst[dst + b] = job.src[src + b];
    return;
  }
  for (std::int64_t i = 0; i < job.copy.dims[dim].count; ++i) {
    const bool indexed = job.copy.indexed_dim == static_cast<int>(dim);
    const std::int64_t step = indexed ? job.copy.slots->at(static_cast<std::size_t>(i)) : i;
    execute(job, dim + 1, src + i * job.copy.dims[dim].src_stride, dst + step * job.copy.dims[dim].dst_stride);
  }
}
void execute(const CopyJob& job) {
  execute(job, 0, job.copy.src_offset, job.copy.dst_offset);
}

constexpr int kExperts = 32;
constexpr int kRanks = 4;
constexpr int kLocal = kExperts / kRanks;

/// Names of one layer's experts as trainers of R expert-parallel ranks emit them: slot i of every rank, w1 and w3 of all, then w2 of all.
std::vector<std::string> emission(int trainer_ranks) {
  std::vector<std::string> names;
  const int per_rank = kExperts / trainer_ranks;
  for (int i = 0; i < per_rank; ++i) {
    for (const std::string w : {"w1", "w3", "w2"}) {
      for (int r = 0; r < trainer_ranks; ++r) {
        for (const std::string part : {"weight", "scale"}) {
          std::string name = "layers.0.ffn.experts.";
          name.append(std::to_string(r * per_rank + i)).append(".").append(w).append(".").append(part);
          names.push_back(std::move(name));
        }
      }
    }
  }
  return names;
}

/// One inference rank with its storages, fed bucket by bucket through single nests and through runs.
class Feed {
 public:
  explicit Feed(std::int32_t rank) : index_(layout(rank)) {
    for (const StorageSpec& s : index_.layout().storages) {
      single_.emplace_back(static_cast<std::size_t>(s.bytes), std::byte{0xAA});
      joined_.emplace_back(static_cast<std::size_t>(s.bytes), std::byte{0xAA});
    }
  }

  /// A bucket holds its tensors back to back. `own_bases`: each job has its tensor's address as source instead of the bucket's.
  /// Returns the runs.
  std::vector<CopyJob> bucket(std::span<const std::string> names, bool own_bases) {
    std::int64_t bytes = 0;
    for (const std::string& name : names) bytes += size(name);
    Bytes& memory = buckets_.emplace_back(static_cast<std::size_t>(bytes));
    for (std::byte& byte : memory) byte = static_cast<std::byte>(next_ = next_ * 1664525 + 1013904223, next_ >> 24);
    std::int64_t offset = 0;
    for (const std::string& name : names) {
      const Resolution found = index_.resolve(name);
      for (const std::int32_t slot : found.slots) {
        const Placement& p = index_.rule(found.rule).placements.at(0);
        CopyJob job{.copy = p.copy, .src = memory.data() + (own_bases ? offset : 0), .dst = single_[p.storage].data(), .constant = 0};
        job.copy.src_offset += own_bases ? 0 : offset;
        job.copy.dst_offset += slot * p.slot_stride;
        execute(job);
        job.dst = joined_[p.storage].data();
        runs_.add(found.rule, job);
        keys_.insert({found.rule, 0}).first->second++;
      }
      offset += size(name);
    }
    std::vector<CopyJob> out;
    runs_.flush(out);
    for (const CopyJob& job : out) execute(job);
    return out;
  }

  bool same() const { return single_ == joined_; }
  const ExpertRuns& runs() const { return runs_; }
  const std::map<std::uint32_t, int>& keys() const { return keys_; }
  std::int32_t local(const std::string& name) const {
    const Resolution found = index_.resolve(name);
    return found.kind == Resolution::Kind::kPlaced ? found.slots[0] : -1;
  }
  std::uint32_t key(const std::string& name) const { return index_.resolve(name).rule; }

 private:
  static ModelLayout layout(std::int32_t rank) {
    ModelRequest request;
    request.parallel.ep = kRanks;
    request.rank = rank;
    request.variant = "padded";
    return build_deepseek_v4(request, testing::json(testing::v41_tiny_config(128, 128, kExperts))).value_or_throw();
  }
  std::int64_t size(const std::string& name) const {
    const TensorRule& rule = index_.rule(index_.resolve(name).rule);
    return byte_count(rule.dtypes.front(), rule.shape).value();
  }

  WeightIndex index_;
  std::vector<Bytes> single_;
  std::vector<Bytes> joined_;
  std::vector<Bytes> buckets_;
  ExpertRuns runs_;
  std::map<std::uint32_t, int> keys_;
  std::uint32_t next_ = 1;
};

/// The fewest runs for the experts that one bucket brings to one key, in the order in which it brings them: experts of each trainer rank
/// advance evenly, so those of one trainer rank are one run. Any two experts are a run as well.
std::size_t ideal_runs(const std::vector<int>& experts, int per_trainer_rank) {
  std::set<int> ranks;
  for (const int expert : experts) ranks.insert(expert / per_trainer_rank);
  return experts.size() == 2 ? 1 : ranks.size();
}

class EmissionOrder : public ::testing::TestWithParam<int> {};

TEST_P(EmissionOrder, JoinsABucketOfAWholeLayerIntoTheFewestRuns) {
  const int trainer_ranks = GetParam();
  for (std::int32_t rank = 0; rank < kRanks; ++rank) {
    for (const bool own_bases : {false, true}) {
      Feed feed(rank);
      const auto runs = feed.bucket(emission(trainer_ranks), own_bases);
      EXPECT_TRUE(feed.same());
      // Six keys; a receiver's experts lie with one trainer rank up to R = 4, with two at R = 8.
      EXPECT_EQ(runs.size(), 6U * (trainer_ranks <= kRanks ? 1 : static_cast<std::size_t>(trainer_ranks / kRanks)));
      EXPECT_EQ(feed.runs().experts(), 6U * kLocal);
      EXPECT_EQ(feed.runs().runs(), runs.size());
    }
  }
}

TEST_P(EmissionOrder, WritesTheSameBytesWhereverBucketsEnd) {
  const int trainer_ranks = GetParam();
  const int per_rank = kExperts / trainer_ranks;
  const std::vector<std::string> names = emission(trainer_ranks);
  EXPECT_TRUE(rc::check([&] {
    Feed feed(*rc::gen::inRange(0, kRanks));
    const bool own_bases = *rc::gen::arbitrary<bool>();
    auto cuts = *rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, names.size()));
    cuts.push_back(0);
    cuts.push_back(names.size());
    std::sort(cuts.begin(), cuts.end());
    std::size_t total = 0;
    for (std::size_t c = 1; c < cuts.size(); ++c) {
      const auto bucket = std::span(names).subspan(cuts[c - 1], cuts[c] - cuts[c - 1]);
      std::map<std::uint32_t, std::vector<int>> brought;
      for (const std::string& name : bucket) {
        if (feed.local(name) < 0) continue;
        brought[feed.key(name)].push_back(std::stoi(name.substr(std::string("layers.0.ffn.experts.").size())));
      }
      std::size_t ideal = 0;
      for (const auto& [key, experts] : brought) ideal += ideal_runs(experts, per_rank);
      const std::size_t runs = feed.bucket(bucket, own_bases).size();
      RC_ASSERT(runs == ideal);
      total += runs;
    }
    RC_ASSERT(feed.same());
    RC_ASSERT(feed.runs().runs() == total);
    RC_ASSERT(feed.runs().experts() == static_cast<std::uint64_t>(6 * kLocal));
  }));
}

INSTANTIATE_TEST_SUITE_P(TrainerRanks, EmissionOrder, ::testing::Values(1, 2, 4, 8));

TEST(ExpertRuns, WritesTheSameBytesForAnyOrderOfTensors) {
  EXPECT_TRUE(rc::check([] {
    Feed feed(*rc::gen::inRange(0, kRanks));
    std::vector<std::string> names = emission(1);
    for (std::size_t i = names.size() - 1; i > 0; --i) std::swap(names[i], names[*rc::gen::inRange<std::size_t>(0, i + 1)]);
    const std::size_t runs = feed.bucket(names, false).size();
    RC_ASSERT(feed.same());
    RC_ASSERT(runs <= feed.runs().experts());
  }));
}

CopyJob flat_job(std::byte* dst, std::int64_t dst_offset, const std::byte* src, std::int64_t src_offset, std::int64_t bytes = 4) {
  return {.copy = StridedCopy::flat(src_offset, dst_offset, bytes), .src = src, .dst = dst, .constant = 0};
}

TEST(ExpertRuns, MakesTheExpertTheOutermostDimension) {
  Bytes memory(256);
  ExpertRuns runs;
  const std::vector<CopyDim> dims{{2, 4, 8}};
  for (int e = 0; e < 3; ++e) {
    runs.add(7, {.copy = StridedCopy::make(10 + 20 * e, 100 + 32 * e, 4, dims), .src = memory.data(), .dst = memory.data(), .constant = 0});
  }
  std::vector<CopyJob> out;
  runs.flush(out);
  ASSERT_EQ(out.size(), 1U);
  EXPECT_EQ(out[0].copy, StridedCopy::make(10, 100, 4, std::vector<CopyDim>{{3, 20, 32}, {2, 4, 8}}));
}

TEST(ExpertRuns, KeepsKeysApartAndForgetsThemAtFlush) {
  Bytes memory(256);
  ExpertRuns runs;
  std::vector<CopyJob> out;
  runs.add(1, flat_job(memory.data(), 0, memory.data(), 100));
  runs.add(2, flat_job(memory.data(), 8, memory.data(), 104));
  runs.flush(out);
  EXPECT_EQ(out.size(), 2U);
  runs.add(1, flat_job(memory.data(), 16, memory.data(), 108));
  runs.flush(out);
  EXPECT_EQ(out.size(), 3U);
  EXPECT_EQ(out[2].copy.dim_count, 0);
  runs.flush(out);
  EXPECT_EQ(out.size(), 3U);
  EXPECT_EQ(runs.runs(), 3U);
  EXPECT_EQ(runs.experts(), 3U);
}

TEST(ExpertRuns, JoinsNoUnequalNests) {
  Bytes memory(256);
  ExpertRuns runs;
  std::vector<CopyJob> out;
  runs.add(1, flat_job(memory.data(), 0, memory.data(), 100, 4));
  runs.add(1, flat_job(memory.data(), 8, memory.data(), 104, 8));
  runs.flush(out);
  EXPECT_EQ(out.size(), 2U);
}

TEST(ExpertRuns, GoesThroughATableWhereDestinationsHaveNoConstantStep) {
  Bytes memory(256);
  ExpertRuns runs;
  std::vector<CopyJob> out;
  runs.add(1, flat_job(memory.data(), 16, memory.data(), 108));
  runs.add(1, flat_job(memory.data(), 0, memory.data(), 100));
  runs.add(1, flat_job(memory.data(), 40, memory.data(), 104));
  runs.flush(out);
  ASSERT_EQ(out.size(), 1U);
  StridedCopy expected = StridedCopy::make(100, 0, 4, std::vector<CopyDim>{{3, 4, 8}});
  expected.indexed_dim = 0;
  expected.slots = std::make_shared<const std::vector<std::int32_t>>(std::vector<std::int32_t>{0, 5, 2});
  EXPECT_EQ(out[0].copy, expected) << out[0].copy.to_string();
}

TEST(ExpertRuns, KeepsFarApartDestinationsThatNoTableCanHoldAsTheyAre) {
  const std::int64_t far = (std::int64_t{1} << 33) + 1;
  ExpertRuns runs;
  std::vector<CopyJob> out;
  for (const std::int64_t offset : {std::int64_t{0}, far, std::int64_t{8}}) {
    runs.add(1, flat_job(nullptr, offset, nullptr, 16 * static_cast<std::int64_t>(runs.experts())));
  }
  runs.flush(out);
  EXPECT_EQ(out.size(), 3U);
  for (const CopyJob& job : out) EXPECT_EQ(job.copy.indexed_dim, -1);
}

/// One layer's experts after a rebalance, in the order in which they lie in a bucket: each in the slots that random maps give it.
TEST(ExpertRuns, WritesEveryReplicaOfRandomMapsAsANaiveCopyDoes) {
  EXPECT_TRUE(rc::check([] {
    constexpr std::int64_t kExpertBytes = 24;
    constexpr std::int64_t kSlotBytes = 64;
    const auto experts = *rc::gen::inRange<std::int64_t>(1, 20);
    const auto slots = *rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(0, experts));
    Bytes source(static_cast<std::size_t>(experts * kExpertBytes));
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 151 + 7);
    Bytes live(slots.size() * kSlotBytes, std::byte{0xAA});
    Bytes naive = live;
    ExpertRuns runs;
    // Rows of 6 bytes of an expert, 16 bytes apart in its slot.
    const std::vector<CopyDim> rows{{4, 6, 16}};
    std::vector<std::size_t> order(slots.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[*rc::gen::inRange<std::size_t>(0, i)]);
    std::map<std::int64_t, int> copies;
    for (const std::size_t s : order) {
      ++copies[slots[s]];
      const auto at = static_cast<std::int64_t>(s) * kSlotBytes;
      runs.add(1,
               {.copy = StridedCopy::make(slots[s] * kExpertBytes, at, 6, rows), .src = source.data(), .dst = live.data(), .constant = 0});
      for (std::int64_t b = 0; b < kExpertBytes; ++b) {
        naive[static_cast<std::size_t>(at + b / 6 * 16 + b % 6)] = source[static_cast<std::size_t>(slots[s] * kExpertBytes + b)];
      }
    }
    std::vector<CopyJob> out;
    runs.flush(out);
    for (const CopyJob& job : out) {
      RC_ASSERT(validate(job.copy, static_cast<std::int64_t>(source.size()), static_cast<std::int64_t>(live.size())).ok());
    }
    WorkerPool pool(1);
    HostExecutor(pool).run(out);
    RC_ASSERT(live == naive);
    const bool every_expert_once = copies.size() == slots.size() && copies.size() == static_cast<std::size_t>(experts);
    if (every_expert_once) RC_ASSERT(out.size() == 1U);
  }));
}

TEST(ExpertRuns, TakesOneRunForEachReplicaOfALayer) {
  Bytes memory(1 << 10);
  ExpertRuns runs;
  std::vector<CopyJob> out;
  // Experts 0 to 7 twice each, in slots that no step leads through.
  const std::vector<int> slots{3, 0, 6, 7, 1, 5, 2, 4, 12, 8, 11, 15, 9, 14, 10, 13};
  for (int s = 0; s < 16; ++s) {
    runs.add(1, flat_job(memory.data(), 16 * slots[static_cast<std::size_t>(s)], memory.data(), 512 + 8 * (s % 8)));
  }
  runs.flush(out);
  EXPECT_EQ(out.size(), 2U);
}

TEST(ExpertRuns, JoinsTheReplicasOfOneExpert) {
  Bytes memory(256);
  ExpertRuns runs;
  std::vector<CopyJob> out;
  runs.add(1, flat_job(memory.data(), 0, memory.data(), 100));
  runs.add(1, flat_job(memory.data(), 32, memory.data(), 100));
  runs.flush(out);
  ASSERT_EQ(out.size(), 1U);
  EXPECT_EQ(out[0].copy, StridedCopy::make(100, 0, 4, std::vector<CopyDim>{{2, 0, 32}}));
}

TEST(ExpertRuns, LeavesANestWithoutRoomForADimensionAlone) {
  Bytes memory(1 << 12);
  const std::vector<CopyDim> full{{2, 128, 128}, {2, 64, 64}, {2, 32, 32}, {2, 16, 16}, {2, 8, 8}, {2, 4, 4}, {2, 2, 2}, {2, 1, 1}};
  ExpertRuns runs;
  std::vector<CopyJob> out;
  for (int e = 0; e < 2; ++e) {
    runs.add(1, {.copy = StridedCopy::make(256 * e, 1024 + 256 * e, 1, full), .src = memory.data(), .dst = memory.data(), .constant = 0});
  }
  runs.flush(out);
  ASSERT_EQ(out.size(), 2U);
  EXPECT_EQ(out[1].copy, StridedCopy::make(256, 1280, 1, full));
}

TEST(ExpertRuns, KeepsAnIndexedDimensionIndexed) {
  Bytes memory(1 << 12);
  const auto slots = std::make_shared<const std::vector<std::int32_t>>(std::vector<std::int32_t>{1, 0});
  ExpertRuns runs;
  std::vector<CopyJob> out;
  for (int e = 0; e < 2; ++e) {
    CopyJob job{
        .copy = StridedCopy::make(32 * e, 1024 + 64 * e, 4, std::vector<CopyDim>{{2, 4, 8}}), .src = memory.data(), .dst = memory.data()};
    job.copy.indexed_dim = 0;
    job.copy.slots = slots;
    runs.add(1, job);
  }
  runs.flush(out);
  ASSERT_EQ(out.size(), 1U);
  EXPECT_EQ(out[0].copy.indexed_dim, 1);
  EXPECT_EQ(out[0].copy.slots, slots);
}

}  // namespace
}  // namespace headrace
