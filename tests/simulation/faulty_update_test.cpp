// A real sender, two real receivers of one engine, and channels between them that lose, repeat, damage and delay messages or die. Every
// case follows from its seed. Whatever happens: no rank ever calls bytes committed that are not the version's, nobody hangs, and a full
// update recovers.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <ostream>
#include <vector>

#include "core/transport/in_memory_control.h"
#include "core/wire/limits.h"
#include "receiver/host_storage.h"
#include "receiver/receiver_impl.h"
#include "sender_sdk/sender_impl.h"
#include "tests/faults/faulty_control.h"
#include "tests/receiver/small_model.h"

namespace headrace {
namespace {

constexpr std::int64_t kDeadlineMs = 300;

/// One rank over memory; its listener may be faulty while `plan` says so.
struct Rank {
  std::unique_ptr<Device> device = make_host_device();
  std::unique_ptr<HostStorage> storage;
  std::unique_ptr<Receiver::Impl> receiver;

  wire::StatusReply status() const {
    return receiver->ask<wire::StatusReply>([this](auto answer) { answer(receiver->status_on_loop()); });
  }
};

/// Rank r of the small model: experts 2r and 2r+1, rows [3r, 3r+3).
ModelLayout layout_of(std::uint32_t rank) {
  ModelLayout layout = small_model::layout();
  layout.experts = {ExpertMap::initial(4, 0, static_cast<std::int32_t>(rank), 2).value()};
  Placement& rows = layout.named[1].rule.placements[0];
  const std::int64_t first = 3 * rank;
  rows.box = Box{{first, 0}, {first + 3, 4}};
  rows.copy = StridedCopy::flat(first * 4, 0, 12);
  return layout;
}

class FaultyUpdate : public testing::Test {
 protected:
  void SetUp() override {
    guard_path_ = std::filesystem::temp_directory_path() / ("headrace-sim-" + std::to_string(random_u64()));
    for (std::uint32_t r = 0; r < 2; ++r) {
      auto rank = std::make_unique<Rank>();
      rank->storage = std::make_unique<HostStorage>(HostStorage::allocate(layout_of(r), *rank->device).value());
      ReceiverOptions options;
      options.job = "job";
      options.rank = r;
      options.ranks = 2;
      options.deadline_ms = kDeadlineMs;
      options.bucket_bytes_max = limits::kBucketBytesDefault;
      ReceiverParts parts;
      parts.listener = hub_.listen("rank-" + std::to_string(r)).value();
      parts.guard_path = guard_path_;
      auto impl = Receiver::Impl::create(options, layout_of(r), rank->storage->table(), *rank->device, {}, std::move(parts));
      ASSERT_TRUE(impl.ok()) << impl.status().to_string();
      rank->receiver = std::move(impl).value();
      ranks_.push_back(std::move(rank));
    }
  }
  void TearDown() override {
    ranks_.clear();
    std::filesystem::remove(guard_path_);
  }

  static std::vector<SenderEntry> entries() {
    std::vector<SenderEntry> list{{"a.weight", Dtype::kBF16, {6, 8}, std::nullopt}, {"rows.weight", Dtype::kU8, {6, 4}, std::nullopt}};
    for (int e = 0; e < 4; ++e)
      list.push_back({"layers.0.ffn.experts." + std::to_string(e) + ".w1.weight", Dtype::kI8, {4, 4}, std::nullopt});
    return list;
  }
  static std::vector<std::byte> content(std::size_t entry, std::uint64_t step) {
    const SenderEntry row = entries()[entry];
    return small_model::bytes(static_cast<std::size_t>(*byte_count(row.dtype, row.shape)), static_cast<std::uint32_t>(step * 16 + entry));
  }
  /// What storage of a rank holds at a step, from the description of the model.
  static std::vector<std::byte> expected(std::uint32_t rank, std::uint64_t step) {
    std::vector<std::byte> all = content(0, step);
    const auto rows = content(1, step);
    all.insert(all.end(), rows.begin() + 12 * rank, rows.begin() + 12 * rank + 12);
    for (std::size_t slot = 0; slot < 2; ++slot) {
      const auto expert = content(2 + 2 * rank + slot, step);
      for (std::size_t i = 0; i < 4; ++i) {
        all.insert(all.end(), expert.begin() + static_cast<long>(4 * i), expert.begin() + static_cast<long>(4 * i + 4));
        all.insert(all.end(), 4, std::byte{0xEE});
      }
    }
    return all;
  }
  std::vector<std::byte> live(std::uint32_t rank) const {
    std::vector<std::byte> all;
    for (const Storage& storage : ranks_[rank]->storage->table().all())
      all.insert(all.end(), storage.address, storage.address + storage.bytes);
    return all;
  }

  Result<std::unique_ptr<SenderImpl>> connect(const std::string& name, const FaultPlan* plan) {
    SenderEnvironment environment;
    environment.connect = [this, plan](const std::string& endpoint, const ControlOptions&) -> Result<std::unique_ptr<ControlConnection>> {
      auto connection = hub_.connect(endpoint.substr(endpoint.find("//") + 2));
      if (!connection.ok() || plan == nullptr) return connection;
      FaultPlan mine = *plan;
      mine.seed = plan->seed * 31 + std::hash<std::string>{}(endpoint);
      return std::unique_ptr<ControlConnection>(std::make_unique<FaultyConnection>(std::move(connection).value(), mine));
    };
    environment.clock = std::make_shared<SteadyClock>();
    environment.device = make_host_device();
    SenderOptions options;
    options.job = "job";
    options.sender = name;
    options.endpoints = {"memory://rank-0", "memory://rank-1"};
    options.bucket_bytes = limits::kBucketBytesMin;
    options.connect_timeout_ms = kDeadlineMs;
    options.deadline_ms = kDeadlineMs;
    return SenderImpl::connect(options, std::move(environment));
  }
  /// One whole update; its outcome.
  static Status update(SenderImpl& sender, std::uint64_t step) {
    UpdateOptions options;
    options.version = {"run", step};
    options.entries = entries();
    HEADRACE_RETURN_IF_ERROR(sender.open(options));
    for (std::size_t e = 0; e < options.entries.size(); ++e) {
      const auto bytes = content(e, step);
      HEADRACE_RETURN_IF_ERROR(sender.add(options.entries[e].name, TensorView{bytes.data(), {}}));
    }
    return sender.finish().status();
  }
  /// The status of a rank that has seen the last of its sender: messages that were on their way may still be written by a session that is
  /// open.
  wire::StatusReply settled(std::uint32_t rank) {
    const SteadyClock clock;
    const ProgressDeadline patience(clock, 20 * kDeadlineMs);
    while (true) {
      wire::StatusReply status = ranks_[rank]->status();
      const auto state = static_cast<wire::SessionState>(status.state);
      if (state == wire::SessionState::kIdle || state == wire::SessionState::kTorn || state == wire::SessionState::kInDoubt) return status;
      if (patience.expired()) {
        ADD_FAILURE() << "rank " << rank << " stays " << wire::session_state_name(state);
        return status;
      }
    }
  }
  /// What must hold for a rank at any time between updates.
  void expect_honest(std::uint32_t rank) {
    const wire::StatusReply status = settled(rank);
    const GuardSlot slot = GuardPage::read(guard_path_).value().slots[rank];
    EXPECT_EQ(slot.state == SlotState::kCommitted, !status.version.empty());
    if (status.version.empty()) return;
    const auto version = parse_weight_version(status.version);
    ASSERT_TRUE(version.has_value());
    EXPECT_EQ(slot.step, version->step);
    EXPECT_EQ(live(rank), expected(rank, version->step)) << "rank " << rank << " calls " << status.version << " whole";
  }
  /// A healthy sender under a new name finishes what is in doubt or sends everything anew.
  void recover(std::uint64_t step) {
    // The receivers may still be waiting for the one that went silent: an open session ends by its deadline.
    Status status(Code::kInternal, "never tried");
    const SteadyClock clock;
    const ProgressDeadline patience(clock, 20 * kDeadlineMs);
    while (!status.ok() && !patience.expired()) {
      auto sender = connect("healthy", nullptr);
      if (!sender.ok()) {
        status = sender.status();
        continue;
      }
      status = update(*sender.value(), step);
    }
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (std::uint32_t r = 0; r < 2; ++r) EXPECT_EQ(live(r), expected(r, step));
    EXPECT_TRUE(GuardPage::read(guard_path_).value().open());
  }

  InMemoryHub hub_;
  std::filesystem::path guard_path_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

struct Kind {
  const char* name;
  FaultPlan plan;
};
void PrintTo(const Kind& kind, std::ostream* out) {  // NOLINT(readability-identifier-naming): the test library's name
  *out << kind.name;
}

class EverySeed : public FaultyUpdate, public testing::WithParamInterface<Kind> {};

TEST_P(EverySeed, LeavesEveryRankHonestAndAFullUpdateRecovers) {
#ifdef HEADRACE_SANITIZED
  constexpr std::uint64_t kSeeds = 4;
#else
  constexpr std::uint64_t kSeeds = 12;
#endif
  std::uint64_t step = 1;
  recover(step);
  std::uint64_t failed = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    FaultPlan plan = GetParam().plan;
    plan.seed = seed;
    if (plan.die_at_step) plan.die_at_step = seed % 12;
    SCOPED_TRACE(plan.describe());
    {
      auto sender = connect("trainer-0", &plan);
      const Status status = sender.ok() ? update(*sender.value(), ++step) : sender.status();
      if (!status.ok()) {
        ++failed;
        EXPECT_FALSE(status.message().empty());
      }
    }
    for (std::uint32_t r = 0; r < 2; ++r) expect_honest(r);
    recover(++step);
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(failed, 0U) << "no fault was ever felt";
}

INSTANTIATE_TEST_SUITE_P(Faults, EverySeed,
                         testing::Values(Kind{"Drop", {.drop = 0.1}}, Kind{"Duplicate", {.duplicate = 0.2}},
                                         Kind{"Corrupt", {.corrupt = 0.1}}, Kind{"Fail", {.fail = 0.1}}, Kind{"Die", {.die_at_step = 0}},
                                         Kind{"Everything",
                                              {.drop = 0.03, .duplicate = 0.03, .corrupt = 0.03, .delay = 0.1, .fail = 0.03}}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace headrace
