#include <algorithm>
#include <future>
#include <vector>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

class PlainCall : public ReceiverFixture {
 protected:
  Status begin(const WeightVersion& version) {
    return receiver_->ask<Status>([&](auto answer) { receiver_->control().begin_plain(version, answer); });
  }
  Status load(std::span<const NamedView> views) {
    return receiver_->ask<Status>([&, views](auto answer) { receiver_->control().load_plain(views, answer); });
  }
  Result<wire::Receipt> finish() {
    return receiver_->ask<Result<wire::Receipt>>([&](auto answer) { receiver_->control().finish_plain(answer); });
  }
  /// The tensors of full_manifest() with the bytes of payload(seed); rows that another rank owns are filled with 0x5A.
  void make(std::uint32_t seed) {
    const auto data = payload(seed);
    const std::size_t offsets[] = {0, 96, 108, 124, 140};
    list_ = full_manifest();
    bytes_.clear();
    views_.clear();
    for (std::size_t e = 0; e < list_.size(); ++e) {
      std::vector<std::byte> tensor(static_cast<std::size_t>(*byte_count(list_[e].dtype, list_[e].shape)), std::byte{0x5A});
      if (e < 4) std::copy(data.begin() + static_cast<long>(offsets[e]), data.begin() + static_cast<long>(offsets[e + 1]), tensor.begin());
      bytes_.push_back(std::move(tensor));
    }
    for (std::size_t e = 0; e < list_.size(); ++e) views_.push_back({list_[e].name, list_[e].dtype, list_[e].shape, bytes_[e]});
  }
  std::vector<wire::ManifestEntry> list_;
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<NamedView> views_;
};

TEST_F(PlainCall, WritesNamedTensorsInSeveralCallsAndProvesThem) {
  start();
  make(3);
  ASSERT_TRUE(begin({"run", 1}).ok());
  ASSERT_TRUE(load({views_.data(), 2}).ok());
  ASSERT_TRUE(load({views_.data() + 2, 3}).ok());
  const auto receipt = finish();
  ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
  expect_live(3);
  EXPECT_TRUE(receipt.value().proven);
  EXPECT_EQ(receipt.value().fingerprints, 4U);
  EXPECT_EQ(status().version, "run/1");
}

TEST_F(PlainCall, ResolvesTheSameTensorsOnceAndWritesWhatComesNow) {
  start();
  for (std::uint32_t step = 1; step <= 3; ++step) {
    make(step);
    ASSERT_TRUE(begin({"run", step}).ok());
    ASSERT_TRUE(load({views_.data(), 2}).ok());
    ASSERT_TRUE(load({views_.data() + 2, 3}).ok());
    const auto receipt = finish();
    ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
    EXPECT_EQ(receipt.value().plan_cached, step > 1);
    EXPECT_EQ(receipt.value().fingerprints, 4U);
    expect_live(step);
  }
}

TEST_F(PlainCall, SumsWhatItIsGivenOnSeveralThreadsAsOnOne) {
  ReceiverOptions options;
  for (options.threads = 0; options.threads <= 5; ++options.threads) {
    SCOPED_TRACE(options.threads);
    receiver_.reset();
    start(options);
    make(7);
    ASSERT_TRUE(begin({"run", 1}).ok());
    ASSERT_TRUE(load({views_.data(), 4}).ok());
    ASSERT_TRUE(load({views_.data() + 4, 1}).ok());
    const auto receipt = finish();
    ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
    expect_live(7);
    EXPECT_TRUE(receipt.value().proven);
    EXPECT_EQ(receipt.value().fingerprints, 4U);
  }
}

TEST_F(PlainCall, ResolvesAnewWhatIsDividedOrOrderedInAnotherWay) {
  start();
  // Calls end behind these tensors; every division follows every other one.
  const std::vector<std::vector<std::size_t>> divisions = {{5}, {2, 5}, {2, 4, 5}, {1, 5}, {5}, {2, 5}, {2, 5}};
  std::vector<bool> cached;
  for (std::uint32_t step = 1; step <= divisions.size() + 1; ++step) {
    make(step);
    if (step > divisions.size()) std::swap(views_[0], views_[4]);
    ASSERT_TRUE(begin({"run", step}).ok());
    std::size_t from = 0;
    for (const std::size_t to : divisions[std::min<std::size_t>(step, divisions.size()) - 1]) {
      ASSERT_TRUE(load({views_.data() + from, to - from}).ok());
      from = to;
    }
    const auto receipt = finish();
    ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
    cached.push_back(receipt.value().plan_cached);
    expect_live(step);
  }
  EXPECT_EQ(cached, (std::vector<bool>{false, false, false, false, false, false, true, false}));
}

TEST_F(PlainCall, FindsWhatIsMissingAlsoWhenAllOfItIsKnown) {
  start();
  make(1);
  ASSERT_TRUE(begin({"run", 1}).ok());
  for (const NamedView& view : views_) ASSERT_TRUE(load({&view, 1}).ok());
  ASSERT_TRUE(finish().ok());
  ASSERT_TRUE(begin({"run", 2}).ok());
  for (std::size_t i = 0; i < 3; ++i) ASSERT_TRUE(load({&views_[i], 1}).ok());
  EXPECT_FALSE(finish().ok());
  EXPECT_EQ(state(), "torn");
  make(3);
  ASSERT_TRUE(begin({"run", 3}).ok());
  for (const NamedView& view : views_) ASSERT_TRUE(load({&view, 1}).ok());
  EXPECT_TRUE(finish().ok());
  expect_live(3);
}

TEST_F(PlainCall, RefusesAKnownTensorOfAnotherShapeOrType) {
  start();
  make(1);
  ASSERT_TRUE(begin({"run", 1}).ok());
  ASSERT_TRUE(load(views_).ok());
  ASSERT_TRUE(finish().ok());
  make(2);
  const Shape turned(views_[0].shape.rbegin(), views_[0].shape.rend());
  ASSERT_NE(turned, Shape(views_[0].shape.begin(), views_[0].shape.end()));
  auto wrong = views_;
  wrong[0].shape = turned;
  ASSERT_TRUE(begin({"run", 2}).ok());
  EXPECT_EQ(load(wrong).code(), Code::kInvalidArgument);
  EXPECT_EQ(state(), "open");
  ASSERT_TRUE(load(views_).ok());
  EXPECT_TRUE(finish().ok());
  expect_live(2);
}

TEST_F(PlainCall, ChecksEachCallBeforeItsFirstByte) {
  start();
  make(3);
  ASSERT_TRUE(begin({"run", 1}).ok());
  auto wrong = views_;
  wrong[1].bytes = wrong[1].bytes.subspan(1);
  EXPECT_FALSE(load(wrong).ok());
  wrong = views_;
  wrong[0].name = "a.wait";
  const Status unknown = load(wrong);
  EXPECT_NE(unknown.message().find("a.wait"), std::string::npos) << unknown.message();
  for (const std::byte byte : live("plain")) ASSERT_EQ(byte, std::byte{0});
  EXPECT_EQ(state(), "open");
  ASSERT_TRUE(load(views_).ok());
  EXPECT_TRUE(finish().ok());
  expect_live(3);
}

TEST_F(PlainCall, IsTornWhenALaterCallIsWrong) {
  start();
  make(3);
  ASSERT_TRUE(begin({"run", 1}).ok());
  ASSERT_TRUE(load({views_.data(), 2}).ok());
  views_[2].name = "unknown";
  EXPECT_EQ(load({views_.data() + 2, 3}).code(), Code::kInvalidArgument);
  EXPECT_EQ(state(), "torn");
  EXPECT_EQ(load({views_.data() + 3, 2}).code(), Code::kFailedPrecondition);
}

TEST_F(PlainCall, IsTornWhenFinishFindsTensorsMissing) {
  start();
  make(3);
  ASSERT_TRUE(begin({"run", 1}).ok());
  ASSERT_TRUE(load({views_.data(), 3}).ok());
  const auto receipt = finish();
  ASSERT_FALSE(receipt.ok());
  EXPECT_NE(receipt.status().message().find("layers.0.ffn.experts.1.w1.weight"), std::string::npos) << receipt.status().message();
  EXPECT_EQ(state(), "torn");
  EXPECT_FALSE(finish().ok()) << "finish after an error is refused";
}

TEST_F(PlainCall, RefusesATensorThatCameTwice) {
  start();
  make(3);
  ASSERT_TRUE(begin({"run", 1}).ok());
  ASSERT_TRUE(load(views_).ok());
  ASSERT_TRUE(load({views_.data(), 1}).ok());
  EXPECT_FALSE(finish().ok());
  EXPECT_EQ(state(), "torn");
}

TEST_F(PlainCall, BeginsNoLongerOnceItIsGivenUpWhileTheEngineTakesItsTimeToGrowQuiet) {
  std::promise<void> asked;
  std::promise<void> quiet;
  EngineHooks hooks;
  hooks.quiescent = [&, first = true]() mutable {
    if (!std::exchange(first, false)) return ok_status();
    asked.set_value();
    quiet.get_future().wait();
    return ok_status();
  };
  start({}, hooks);
  std::future<Status> begun = std::async(std::launch::async, [&] { return begin({"run", 1}); });
  asked.get_future().wait();
  const Status aborted = receiver_->ask<Status>([&](auto answer) { answer(receiver_->control().abort_plain("no more patience")); });
  EXPECT_TRUE(aborted.ok()) << aborted.to_string();
  const Status given_up = begun.get();
  EXPECT_EQ(given_up.code(), Code::kCancelled);
  EXPECT_NE(given_up.message().find("no more patience"), std::string::npos) << given_up.message();
  EXPECT_EQ(state(), "idle");
  quiet.set_value();
  EXPECT_TRUE(begin({"run", 2}).ok());
}

TEST_F(PlainCall, IsRefusedOutsideBeginAndWhileAnotherUpdateIsOpen) {
  start();
  make(3);
  EXPECT_EQ(load(views_).code(), Code::kFailedPrecondition);
  EXPECT_EQ(finish().status().code(), Code::kFailedPrecondition);
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 8, "run/1");
  EXPECT_EQ(begin({"run", 2}).code(), Code::kFailedPrecondition);
  EXPECT_EQ(load(views_).code(), Code::kFailedPrecondition);
  EXPECT_EQ(state(), "open");
}

}  // namespace
}  // namespace headrace
