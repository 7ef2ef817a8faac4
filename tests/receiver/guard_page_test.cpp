#include "receiver/guard_page.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <thread>

#include "core/base/ids.h"
#include "core/base/unique_fd.h"

namespace headrace {
namespace {

class Guard : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  std::filesystem::path path_ = std::filesystem::temp_directory_path() / ("headrace-guard-" + std::to_string(random_u64()));
};

TEST_F(Guard, IsOpenOnlyWhenEveryRankCommittedTheSameVersion) {
  GuardPage first = GuardPage::create(path_, "e", 2, 0).value();
  GuardPage second = GuardPage::create(path_, "e", 2, 1).value();
  EXPECT_FALSE(first.view().open()) << "nothing was ever committed";
  first.publish(SlotState::kCommitted, 1, {"run", 4});
  EXPECT_FALSE(first.view().open());
  second.publish(SlotState::kCommitted, 1, {"run", 5});
  EXPECT_FALSE(first.view().open()) << "another step";
  second.publish(SlotState::kCommitted, 1, {"other", 4});
  EXPECT_FALSE(first.view().open()) << "another run";
  second.publish(SlotState::kCommitted, 1, {"run", 4});
  EXPECT_TRUE(first.view().open());
  for (const SlotState closed : {SlotState::kApplying, SlotState::kPrepared, SlotState::kTorn, SlotState::kInDoubt, SlotState::kNone}) {
    second.publish(closed, 2, {"run", 4});
    EXPECT_FALSE(GuardPage::read(path_).value().open()) << slot_state_name(closed);
    second.publish(SlotState::kCommitted, 2, {"run", 4});
    EXPECT_TRUE(GuardPage::read(path_).value().open());
  }
}

TEST_F(Guard, ResetsOnlyTheSlotOfARankThatStartsAnew) {
  GuardPage first = GuardPage::create(path_, "e", 2, 0).value();
  {
    GuardPage second = GuardPage::create(path_, "e", 2, 1).value();
    first.publish(SlotState::kCommitted, 1, {"run", 4});
    second.publish(SlotState::kCommitted, 1, {"run", 4});
  }
  GuardPage again = GuardPage::create(path_, "e", 2, 1).value();
  const GuardView view = again.view();
  EXPECT_EQ(view.slots[0].state, SlotState::kCommitted);
  EXPECT_EQ(view.slots[1].state, SlotState::kNone);
  EXPECT_FALSE(view.open());
}

TEST_F(Guard, HasTheBytesThatTheDocumentDescribes) {
  GuardPage page = GuardPage::create(path_, "engine-7", 3, 2).value();
  page.publish(SlotState::kCommitted, 0x1122334455667788, {"run", 9});
  std::vector<unsigned char> raw(4096);
  std::ifstream file(path_, std::ios::binary);
  file.read(reinterpret_cast<char*>(raw.data()), 4096);
  ASSERT_EQ(file.gcount(), 4096);
  const auto u64 = [&](std::size_t at) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < 8; ++i) value |= std::uint64_t{raw[at + i]} << (8 * i);
    return value;
  };
  EXPECT_EQ(std::memcmp(raw.data(), "HARGARD1", 8), 0);
  EXPECT_EQ(u64(8), 1U | std::uint64_t{3} << 32) << "layout 1, 3 ranks";
  EXPECT_STREQ(reinterpret_cast<char*>(raw.data() + 16), "engine-7");
  const std::size_t slot = 128 + 2 * 64;
  EXPECT_EQ(raw[slot], 1) << "committed";
  const std::size_t bank = slot + 8 + 24 * raw[slot + 1];
  EXPECT_EQ(u64(bank), 0x1122334455667788U);
  EXPECT_EQ(u64(bank + 8), run_number("run"));
  EXPECT_EQ(u64(bank + 16), 9U);
}

TEST_F(Guard, RefusesAnotherNumberOfRanksAndForeignFiles) {
  const GuardPage page = GuardPage::create(path_, "e", 2, 0).value();
  EXPECT_EQ(GuardPage::create(path_, "e", 3, 0).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(GuardPage::create(path_, "e", 200, 0).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(GuardPage::create(path_, "e", 2, 2).status().code(), Code::kInvalidArgument);
  const auto other = path_.string() + ".other";
  std::ofstream(other) << std::string(4096, 'x');
  EXPECT_EQ(GuardPage::create(other, "e", 2, 0).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(GuardPage::read(other).status().code(), Code::kFailedPrecondition);
  std::filesystem::remove(other);
  EXPECT_FALSE(GuardPage::read(other).ok());
}

TEST_F(Guard, AFileSizeLimitIsAnErrorAndNotASignal) {
  const pid_t child = ::fork();
  if (child == 0) {
    const struct rlimit limit = {100, 100};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(1);
    ::_exit(GuardPage::create(path_, "e", 2, 0).status().code() == Code::kResourceExhausted ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(Guard, DoesNotWaitForEverForAProcessThatHoldsItsLock) {
  const UniqueFd holder(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::flock(holder.get(), LOCK_EX), 0);
  const auto page = GuardPage::create(path_, "e", 2, 0);
  EXPECT_EQ(page.status().code(), Code::kDeadlineExceeded);
}

TEST_F(Guard, NeverShowsAVersionThatWasNotPublishedWhole) {
  GuardPage page = GuardPage::create(path_, "e", 1, 0).value();
  GuardPage reader = GuardPage::create(path_, "e", 1, 0).value();
  page.publish(SlotState::kCommitted, 0, {"run", 0});
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (std::uint64_t i = 1; i < 200'000; ++i) page.publish(SlotState::kCommitted, i, {"run", i});
    stop.store(true);
  });
  std::uint64_t last = 0;
  while (!stop.load()) {
    const GuardSlot slot = reader.view().slots[0];
    EXPECT_EQ(slot.session, slot.step);
    EXPECT_GE(slot.step, last);
    last = slot.step;
  }
  writer.join();
}

}  // namespace
}  // namespace headrace
