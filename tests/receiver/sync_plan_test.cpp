#include "receiver/sync_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/device/device.h"
#include "core/wire/limits.h"
#include "receiver/coverage.h"
#include "receiver/host_storage.h"
#include "receiver/update_session.h"
#include "tests/receiver/small_model.h"

namespace headrace {
namespace {

class SmallPlan : public testing::Test {
 protected:
  SmallPlan()
      : index_(small_model::layout()),
        storage_(HostStorage::allocate(index_.layout(), *device_).value()),
        geometry_(PlanGeometry::build(index_, storage_.table()).value()) {}

  static wire::ManifestEntry whole(std::string name, Dtype dtype, Shape shape) {
    return {std::move(name), dtype, shape, Box::whole(shape)};
  }
  static SenderPart full(std::string sender) {
    SenderPart part{std::move(sender), {}, {whole("a.weight", Dtype::kBF16, {6, 8}), whole("rows.weight", Dtype::kU8, {6, 4})}};
    for (const char* expert : {"0", "1"}) {
      part.entries.push_back(whole(std::string("layers.0.ffn.experts.") + expert + ".w1.weight", Dtype::kI8, {4, 4}));
    }
    part.digest = digest_of(wire_bytes(part));
    return part;
  }
  static std::vector<std::byte> wire_bytes(const SenderPart& part) {
    std::vector<std::byte> bytes;
    for (const auto& entry : part.entries)
      for (const char c : entry.name) bytes.push_back(static_cast<std::byte>(c));
    return bytes;
  }
  SyncPlan::Outcome compile(std::vector<SenderPart> parts, PlanOptions options = {{"target"}}) {
    return SyncPlan::compile(index_, geometry_, storage_.table().digest(), std::move(parts), options);
  }

  std::unique_ptr<Device> device_ = make_host_device();
  WeightIndex index_;
  HostStorage storage_;
  PlanGeometry geometry_;
};

TEST_F(SmallPlan, WantsExactlyTheBoxesOfThisRank) {
  const auto outcome = compile({full("lead")});
  ASSERT_NE(outcome.plan, nullptr);
  const auto entries = outcome.plan->entries(0);
  EXPECT_EQ(entries[0].wanted, std::vector<Box>{(Box{{0, 0}, {6, 8}})});
  EXPECT_EQ(entries[1].wanted, std::vector<Box>{(Box{{0, 0}, {3, 4}})});
  EXPECT_EQ(outcome.plan->tensors().size(), 4U);
}

TEST_F(SmallPlan, ChangesItsKeyWithEverythingThatItDependsOn) {
  const PlanOptions target{{"target"}};
  const auto key = [&](std::vector<SenderPart> parts, const PlanOptions& options, const Digest& table) {
    return SyncPlan::key_of(index_, table, parts, options);
  };
  const Digest table = storage_.table().digest();
  const Digest base = key({full("lead")}, target, table);
  EXPECT_EQ(base, key({full("lead")}, target, table));
  EXPECT_NE(base, key({full("other")}, target, table));
  auto renamed = full("lead");
  renamed.digest.bytes[3] ^= 1;
  EXPECT_NE(base, key({renamed}, target, table));
  EXPECT_NE(base, key({full("lead")}, PlanOptions{{"target", "draft"}}, table));
  EXPECT_NE(base, key({full("lead")}, PlanOptions{{"target"}, wire::OverlapRule::kFirstSenderOwns}, table));
  EXPECT_NE(base, key({full("lead")}, target, Digest{}));
  ModelLayout rebalanced = small_model::layout();
  rebalanced.experts[0] = ExpertMap::from_physical(4, {1, 0, 2, 3}, {0, 1}).value();
  const WeightIndex other(rebalanced);
  EXPECT_NE(base, SyncPlan::key_of(other, table, std::vector{full("lead")}, target)) << "the expert map is part of the key";
}

TEST_F(SmallPlan, FollowsTheExpertMapToTheSlots) {
  ModelLayout rebalanced = small_model::layout();
  rebalanced.experts[0] = ExpertMap::from_physical(4, {3, 3, 0, 1, 2, 0}, {0, 1}).value();  // expert 3 twice, none of the others
  const WeightIndex index(rebalanced);
  const auto geometry = PlanGeometry::build(index, storage_.table());
  ASSERT_TRUE(geometry.ok());
  SenderPart part = full("lead");
  part.entries.push_back(whole("layers.0.ffn.experts.3.w1.weight", Dtype::kI8, {4, 4}));
  const auto outcome = SyncPlan::compile(index, geometry.value(), storage_.table().digest(), {part}, {{"target"}});
  ASSERT_NE(outcome.plan, nullptr) << wire::to_status(outcome.defects[0]).to_string();
  std::vector<SyncPlan::KeyedJob> jobs;
  const auto bytes = small_model::bytes(16, 1);
  ASSERT_TRUE(outcome.plan->append_jobs(outcome.plan->tensors()[2], Box{{0, 0}, {4, 4}}, bytes.data(), {}, jobs).ok());
  ASSERT_EQ(jobs.size(), 2U) << "every local replica is written";
  EXPECT_EQ(jobs[0].job.copy.dst_offset, 0);
  EXPECT_EQ(jobs[1].job.copy.dst_offset, 32);
}

TEST_F(SmallPlan, TakesATensorByEitherOfItsNamesButNotByBoth) {
  ModelLayout layout = small_model::layout();
  layout.scan = [](std::string_view name) {
    ScanAnswer answer;
    if (name == "base_layer.a.weight") answer = {.kind = ScanAnswer::Kind::kParam, .param = "plain", .shard = ""};
    return answer;
  };
  const WeightIndex index(layout);
  const PlanGeometry geometry = PlanGeometry::build(index, storage_.table()).value();
  const auto compiled = [&](SenderPart part) {
    return SyncPlan::compile(index, geometry, storage_.table().digest(), {std::move(part)}, {{"target"}});
  };
  SenderPart renamed = full("lead");
  renamed.entries[0].name = "base_layer.a.weight";
  EXPECT_NE(compiled(renamed).plan, nullptr) << "what the tensor covers does not depend on its spelling";
  SenderPart both = full("lead");
  both.entries.push_back(whole("base_layer.a.weight", Dtype::kBF16, {6, 8}));
  const auto outcome = compiled(both);
  EXPECT_EQ(outcome.plan, nullptr);
  ASSERT_EQ(outcome.defects.size(), 1U);
  EXPECT_EQ(outcome.defects[0].message, "base_layer.a.weight: the same tensor as a.weight from sender lead");
}

TEST_F(SmallPlan, AnswersASenderThatKeptTheListWithoutIt) {
  const auto outcome = compile({full("lead")});
  ASSERT_NE(outcome.plan, nullptr);
  const wire::Accept whole_answer = outcome.plan->accept_for(0);
  const wire::Accept known = outcome.plan->accept_for(0, true);
  EXPECT_FALSE(whole_answer.known);
  EXPECT_EQ(whole_answer.wanted.size(), 4U);
  EXPECT_TRUE(known.known);
  EXPECT_TRUE(known.wanted.empty());
  EXPECT_EQ(known.digest, whole_answer.digest);
  EXPECT_EQ(known.plan_key, whole_answer.plan_key);
  EXPECT_EQ(known.ignored, whole_answer.ignored);
}

TEST_F(SmallPlan, SeesAReplicaThatDiffersFromTheOthers) {
  ModelLayout replicated = small_model::layout();
  replicated.experts[0] = ExpertMap::from_physical(4, {3, 3, 0, 1, 2, 0}, {0, 1}).value();
  const WeightIndex index(replicated);
  const PlanGeometry geometry = PlanGeometry::build(index, storage_.table()).value();
  const std::string name = "layers.0.ffn.experts.3.w1.weight";
  const Resolution resolution = index.resolve(name);
  const TensorKey key = tensor_key(name, Dtype::kI8, Shape{4, 4});
  const auto live = [&] { return live_fingerprint(index.rule(resolution.rule), geometry, resolution.slots, key, Box{{0, 0}, {4, 4}}); };
  EXPECT_EQ(live().copies, 2U);
  EXPECT_TRUE(live().equal);
  std::byte& last = storage_.table().find("experts")->address[32 + 27];  // the last payload byte of the second slot
  last = std::byte{1};
  EXPECT_FALSE(live().equal);
  last = std::byte{0};
  storage_.table().find("experts")->address[32 + 28] = std::byte{1};  // padding is no part of the tensor
  EXPECT_TRUE(live().equal);
}

TEST_F(SmallPlan, CountsEveryDefectButListsOnlyTheFirst) {
  SenderPart part = full("lead");
  for (int i = 0; i < 3000; ++i) part.entries.push_back(whole("unknown." + std::to_string(i), Dtype::kU8, {1}));
  const auto outcome = compile({part});
  EXPECT_EQ(outcome.plan, nullptr);
  EXPECT_EQ(outcome.defects_total, 3000U);
  EXPECT_EQ(outcome.defects.size(), limits::kDefectsMax);
}

TEST_F(SmallPlan, NamesTheScopeOfAnEntryOutsideIt) {
  const auto outcome = compile({full("lead")}, {{"draft"}});
  ASSERT_FALSE(outcome.defects.empty());
  EXPECT_NE(outcome.defects[0].message.find("scope target, table has draft"), std::string::npos) << outcome.defects[0].message;
}

TEST_F(SmallPlan, LetsOptionalNamesStayAway) {
  SenderPart part = full("lead");
  part.entries.erase(part.entries.begin());
  EXPECT_EQ(compile({part}).plan, nullptr);
  PlanOptions options{{"target"}};
  options.optional_names = {"a.*"};
  EXPECT_NE(compile({part}, options).plan, nullptr);
}

TEST_F(SmallPlan, RefusesATensorWhoseRowsAreNotAllThere) {
  SenderPart part = full("lead");
  part.entries[1].box = Box{{0, 0}, {2, 4}};
  const auto outcome = compile({part});
  ASSERT_EQ(outcome.defects_total, 1U);
  EXPECT_NE(outcome.defects[0].message.find("rows.weight: the senders bring 8 of 12 elements"), std::string::npos)
      << outcome.defects[0].message;
}

TEST_F(SmallPlan, RefusesALayoutThatDoesNotFitItsStorage) {
  ModelLayout broken = small_model::layout();
  broken.expert_rules[0].rule.placements[0].slot_stride = 40;
  const WeightIndex index(broken);
  EXPECT_FALSE(PlanGeometry::build(index, storage_.table()).ok());
}

TEST_F(SmallPlan, CoverageTakesEachByteOnce) {
  const auto plan = compile({full("lead")}).plan;
  Coverage coverage(*plan);
  EXPECT_TRUE(coverage.add(0, 0, Box{{0, 0}, {3, 8}}).ok());
  EXPECT_FALSE(coverage.add(0, 0, Box{{2, 0}, {4, 8}}).ok());
  EXPECT_FALSE(coverage.add(0, 0, Box{{0, 0}, {6, 8}}).ok());
  EXPECT_TRUE(coverage.add(0, 0, Box{{3, 0}, {6, 8}}).ok());
  EXPECT_FALSE(coverage.add(0, 0, Box{{3, 0}, {6, 8}}).ok());
  EXPECT_EQ(coverage.missing(9),
            (std::vector<std::string>{"rows.weight", "layers.0.ffn.experts.0.w1.weight", "layers.0.ffn.experts.1.w1.weight"}));
  EXPECT_TRUE(coverage.add(0, 1, Box{{0, 0}, {3, 4}}).ok());
  EXPECT_TRUE(coverage.add(0, 2, Box{{0, 0}, {4, 4}}).ok());
  EXPECT_FALSE(coverage.complete());
  EXPECT_TRUE(coverage.add(0, 3, Box{{0, 0}, {4, 4}}).ok());
  EXPECT_TRUE(coverage.complete());
}

/// A plan of one tensor of bytes.
class OneTensor {
 public:
  explicit OneTensor(Shape shape) : index_(layout(shape)), storage_(HostStorage::allocate(index_.layout(), *device_).value()) {
    geometry_ = PlanGeometry::build(index_, storage_.table()).value();
    SenderPart part{"lead", {}, {{"t", Dtype::kU8, shape, Box::whole(shape)}}};
    plan_ = SyncPlan::compile(index_, geometry_, storage_.table().digest(), {part}, PlanOptions{{"target"}}).plan;
  }
  const SyncPlan& plan() const { return *plan_; }

 private:
  static ModelLayout layout(const Shape& shape) {
    ModelLayout model;
    model.family = "one";
    model.variant = "plain";
    const std::int64_t bytes = *byte_count(Dtype::kU8, shape);
    model.storages.push_back({.name = "t", .dtype = Dtype::kU8, .shape = shape, .strides = {}, .bytes = bytes});
    TensorRule rule;
    rule.param = "t";
    rule.dtypes = {Dtype::kU8};
    rule.shape = shape;
    rule.placements.push_back({.storage = 0, .box = Box::whole(shape), .copy = StridedCopy::flat(0, 0, bytes)});
    model.named.push_back({"t", rule});
    return model;
  }

  std::unique_ptr<Device> device_ = make_host_device();
  WeightIndex index_;
  HostStorage storage_;
  PlanGeometry geometry_;
  std::shared_ptr<const SyncPlan> plan_;
};

TEST(ManyPieces, AreTakenWithoutEndWhileTheyAdjoin) {
  const std::int64_t count = 50'000;
  static_assert(count > std::int64_t{limits::kBoxesMax});
  const OneTensor tensor({count});
  Coverage coverage(tensor.plan());
  for (std::int64_t i = 0; i < count / 2; ++i) ASSERT_TRUE(coverage.add(0, 0, Box{{i}, {i + 1}}).ok()) << i;
  EXPECT_FALSE(coverage.add(0, 0, Box{{0}, {1}}).ok()) << "it came first of all";
  for (std::int64_t i = count; i > count / 2; --i) ASSERT_TRUE(coverage.add(0, 0, Box{{i - 1}, {i}}).ok()) << i;
  EXPECT_TRUE(coverage.complete());
}

TEST(ManyPieces, AreTakenOnceWhateverTheirShapesAndOrder) {
  const OneTensor tensor({6, 5, 7});
  std::mt19937 random(11);
  const auto below = [&](std::int64_t end) { return std::uniform_int_distribution<std::int64_t>(0, end - 1)(random); };
  for (int round = 0; round < 200; ++round) {
    Coverage coverage(tensor.plan());
    std::vector<bool> came(6 * 5 * 7, false);
    for (int i = 0; i < 60; ++i) {
      Box box;
      for (const std::int64_t dimension : {6, 5, 7}) {
        box.lo.push_back(below(dimension));
        box.hi.push_back(box.lo.back() + 1 + below(std::min<std::int64_t>(3, dimension - box.lo.back())));
      }
      std::vector<std::size_t> bytes;
      for (std::int64_t x = box.lo[0]; x < box.hi[0]; ++x)
        for (std::int64_t y = box.lo[1]; y < box.hi[1]; ++y)
          for (std::int64_t z = box.lo[2]; z < box.hi[2]; ++z) bytes.push_back(static_cast<std::size_t>((x * 5 + y) * 7 + z));
      const bool fresh = std::none_of(bytes.begin(), bytes.end(), [&](std::size_t byte) { return came[byte]; });
      ASSERT_EQ(coverage.add(0, 0, box).ok(), fresh) << "round " << round << ", box " << to_string(box);
      if (fresh)
        for (const std::size_t byte : bytes) came[byte] = true;
      ASSERT_EQ(coverage.complete(), std::find(came.begin(), came.end(), false) == came.end());
    }
  }
}

TEST_F(SmallPlan, RefusesMoreBucketsOnTheWayThanWereGranted) {
  const SteadyClock clock;
  UpdateSession session(SessionId{1}, {"run", 1}, clock, 1'000);
  SessionSender lead;
  lead.name = "lead";
  session.senders.push_back(lead);
  session.adopt(compile({full("lead")}).plan);
  const auto memory = small_model::bytes(140, 1);
  const auto resolve = [&](MemoryId) -> Result<std::span<const std::byte>> { return std::span<const std::byte>(memory); };
  ApplyWork work;
  wire::Failure failure;
  SessionSender& sender = session.senders[0];
  EXPECT_TRUE(session.check_bucket(sender, {0, {{0, MemoryId{1}, 0, std::nullopt, {}}}}, 1, resolve, work, failure).ok());
  EXPECT_FALSE(session.check_bucket(sender, {1, {{1, MemoryId{1}, 96, std::nullopt, {}}}}, 1, resolve, work, failure).ok());
  ++sender.consumed;
  EXPECT_TRUE(session.check_bucket(sender, {1, {{1, MemoryId{1}, 96, std::nullopt, {}}}}, 1, resolve, work, failure).ok());
}

}  // namespace
}  // namespace headrace
