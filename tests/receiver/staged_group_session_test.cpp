#include <stdexcept>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

constexpr std::size_t kBytes = 8;

/// Two groups of two tensors each, whose low halves of bytes an engine interleaves into one byte of its own; beside them a tensor that is
/// copied.
class StagedGroupSession : public ReceiverFixture {
 protected:
  StagedGroupSession() {
    layout_ = ModelLayout{};
    layout_.family = "staged";
    layout_.variant = "plain";
    for (const char* name : {"norm", "packed.0", "packed.1"})
      layout_.storages.push_back({.name = name, .dtype = Dtype::kU8, .shape = {8}, .strides = {}, .bytes = 8});
    TensorRule norm = rule();
    norm.placements.push_back({.storage = 0, .box = Box{{0}, {8}}, .copy = StridedCopy::flat(0, 0, 8)});
    layout_.named.push_back({"norm", norm});
    for (std::uint32_t g = 0; g < 2; ++g) {
      StagedGroup group;
      group.name = "group " + std::to_string(g);
      group.hook = "interleave";
      group.entries = {{"low." + std::to_string(g), rule()}, {"high." + std::to_string(g), rule()}};
      group.outputs = {1 + g};
      group.work_bytes = 3;
      layout_.groups.push_back(group);
    }
    hooks_.staged["interleave"] = [this](const StagedCall& call) -> Status {
      calls_.emplace_back(call.group);
      if (throws_) throw std::runtime_error("no such format");
      if (call.inputs.size() != 2 || call.outputs.size() != 1 || call.work.size() != 3) return Status(Code::kInternal, "other spans");
      for (std::size_t i = 0; i < kBytes; ++i) {
        call.outputs[0][i] = (call.inputs[0][i] & std::byte{15}) | (call.inputs[1][i] << 4);
      }
      return fails_ ? Status(Code::kFailedPrecondition, "out of luck") : ok_status();
    };
  }
  static TensorRule rule() {
    TensorRule row;
    row.dtypes = {Dtype::kU8};
    row.shape = {8};
    return row;
  }
  static wire::ManifestEntry entry(const std::string& name) { return {name, Dtype::kU8, {8}, Box{{0}, {8}}}; }
  /// norm, low.0, high.0, low.1, high.1
  static std::vector<wire::ManifestEntry> all() {
    return {entry("norm"), entry("low.0"), entry("high.0"), entry("low.1"), entry("high.1")};
  }
  std::byte value(std::size_t tensor, std::size_t i) const { return data_[tensor * kBytes + i]; }
  wire::Extent extent(std::uint32_t e, std::size_t tensor, std::optional<Box> box = std::nullopt) const {
    const std::int64_t from = box ? box->lo[0] : 0;
    return {e, MemoryId{1}, static_cast<std::int64_t>(tensor * kBytes) + from, std::move(box), {}};
  }
  wire::EntryFingerprint sum(std::uint32_t e, std::size_t tensor) const {
    return {e, fingerprint(tensor_key(all()[tensor].name, Dtype::kU8, Shape{8}), 0, std::span(data_).subspan(tensor * kBytes, kBytes))};
  }
  std::vector<wire::EntryFingerprint> all_sums() const {
    std::vector<wire::EntryFingerprint> sums;
    for (std::uint32_t e = 0; e < 5; ++e) sums.push_back(sum(e, e));
    return sums;
  }
  void expect_outputs() const {
    for (std::size_t i = 0; i < kBytes; ++i) {
      ASSERT_EQ(live("norm")[i], value(0, i));
      for (std::size_t g = 0; g < 2; ++g) {
        const auto low = std::to_integer<unsigned>(value(1 + 2 * g, i)) % 16;
        const auto high = std::to_integer<unsigned>(value(2 + 2 * g, i)) % 16;
        ASSERT_EQ(std::to_integer<unsigned>(live("packed." + std::to_string(g))[i]), low + 16 * high) << g << " " << i;
      }
    }
  }
  wire::Accept begin(WireSender& sender, const std::vector<wire::ManifestEntry>& entries, std::uint64_t id = 1,
                     const std::string& version = "run/1") {
    sender.open(id, version);
    sender.expect<wire::Opened>();
    sender.manifest(entries);
    const auto accept = sender.expect<wire::Accept>();
    sender.send(wire::Confirm{});
    sender.expect<wire::Begin>();
    return accept;
  }
  /// An update of two senders, up to OPENED.
  std::pair<WireSender, WireSender> opened_by_two() {
    WireSender lead = connect("lead");
    WireSender other = connect("other");
    lead.hello();
    other.hello();
    lead.open(1, "run/1", {"lead", "other"});
    other.session = SessionId{1};
    lead.expect<wire::Opened>();
    other.expect<wire::Opened>();
    return {std::move(lead), std::move(other)};
  }
  WireSender opened() {
    WireSender sender = connect("lead");
    sender.hello();
    begin(sender, all());
    return sender;
  }

  EngineHooks hooks_;
  std::vector<std::string> calls_;  // apply thread; read once its messages have come
  bool fails_ = false;
  bool throws_ = false;
  std::vector<std::byte> data_ = small_model::bytes(5 * kBytes, 4);
};

TEST_F(StagedGroupSession, RunsTheHookOfEachGroupInOneBucketInOrder) {
  start({}, hooks_);
  WireSender sender = connect("lead");
  sender.hello();
  const wire::Accept accept = begin(sender, all());
  ASSERT_EQ(accept.groups.size(), 2U);
  EXPECT_EQ(accept.groups[0].name, "group 0");
  EXPECT_EQ(accept.groups[0].entries, (std::vector<std::uint32_t>{1, 2}));
  EXPECT_EQ(accept.groups[1].entries, (std::vector<std::uint32_t>{3, 4}));
  sender.send(wire::Bucket{0, {extent(4, 4), extent(3, 3), extent(0, 0), extent(1, 1), extent(2, 2)}}, data_);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, all_sums()});
  const wire::Receipt receipt = sender.expect<wire::Prepared>().receipt;
  expect_outputs();
  EXPECT_EQ(calls_, (std::vector<std::string>{"group 1", "group 0"}));
  EXPECT_TRUE(receipt.proven);
  EXPECT_EQ(receipt.proved_bytes, 1U);
  EXPECT_EQ(receipt.proved_converted, 0U);
  EXPECT_EQ(receipt.proved_inputs, 2U);
  ASSERT_EQ(receipt.outputs.size(), 2U);
  EXPECT_EQ(receipt.outputs[1].name, "packed.1");
  EXPECT_EQ(receipt.outputs[1].proof, "inputs");
}

TEST_F(StagedGroupSession, GathersAGroupOverTwoBucketsWithACopyInBetween) {
  start({}, hooks_);
  WireSender sender = opened();
  sender.send(wire::Bucket{0, {extent(1, 1), extent(2, 2, Box{{0}, {3}})}}, data_);
  sender.expect<wire::Consumed>();
  EXPECT_TRUE(calls_.empty());
  sender.send(wire::Bucket{1, {extent(0, 0), extent(2, 2, Box{{3}, {8}}), extent(3, 3), extent(4, 4)}}, data_);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{2, all_sums()});
  EXPECT_TRUE(sender.expect<wire::Prepared>().receipt.proven);
  expect_outputs();
}

TEST_F(StagedGroupSession, RefusesAnotherGroupBeforeTheFirstIsWhole) {
  start({}, hooks_);
  WireSender sender = opened();
  sender.send(wire::Bucket{0, {extent(1, 1), extent(3, 3)}}, data_);
  const wire::Failure failure = sender.expect<wire::ErrorReport>().failure;
  EXPECT_EQ(failure.name, "low.1");
  EXPECT_NE(failure.message.find("an entry of staged group group 1 before group group 0"), std::string::npos) << failure.message;
  EXPECT_EQ(state(), "idle") << "the bucket was refused before its first byte";
}

TEST_F(StagedGroupSession, GathersTheGroupsOfTwoSendersAtATime) {
  start({}, hooks_);
  auto [lead, other] = opened_by_two();
  lead.manifest({entry("norm"), entry("low.0"), entry("high.0")});
  other.manifest({entry("low.1"), entry("high.1")});
  for (WireSender* each : {&lead, &other}) {
    each->expect<wire::Accept>();
    each->send(wire::Confirm{});
  }
  for (WireSender* each : {&lead, &other}) each->expect<wire::Begin>();
  lead.send(wire::Bucket{0, {extent(0, 0), extent(1, 1)}}, data_);
  lead.expect<wire::Consumed>();
  other.send(wire::Bucket{0, {extent(0, 3)}}, data_);
  other.expect<wire::Consumed>();
  lead.send(wire::Bucket{1, {extent(2, 2)}}, data_);
  lead.expect<wire::Consumed>();
  other.send(wire::Bucket{1, {extent(1, 4)}}, data_);
  other.expect<wire::Consumed>();
  lead.send(wire::End{2, {sum(0, 0), sum(1, 1), sum(2, 2)}});
  other.send(wire::End{2, {sum(0, 3), sum(1, 4)}});
  EXPECT_TRUE(lead.expect<wire::Prepared>().receipt.proven);
  expect_outputs();
}

TEST_F(StagedGroupSession, RefusesAGroupFromTwoSenders) {
  start({}, hooks_);
  auto [lead, other] = opened_by_two();
  lead.manifest({entry("norm"), entry("low.0"), entry("high.0"), entry("low.1")});
  other.manifest({entry("high.1")});
  const wire::Reject reject = lead.expect<wire::Reject>();
  ASSERT_EQ(reject.defects_total, 1U);
  EXPECT_NE(reject.defects[0].message.find("group 1 comes from senders lead and other"), std::string::npos) << reject.defects[0].message;
}

class FailingGroup : public StagedGroupSession, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(FailsOrThrows, FailingGroup, testing::Bool());

TEST_P(FailingGroup, TearsTheRankByName) {
  (GetParam() ? throws_ : fails_) = true;
  start({}, hooks_);
  WireSender sender = opened();
  sender.send(wire::Bucket{0, {extent(1, 1), extent(2, 2), extent(3, 3), extent(4, 4)}}, data_);
  const wire::Failure failure = sender.expect<wire::ErrorReport>().failure;
  EXPECT_NE(failure.message.find("hook interleave of staged group group 0"), std::string::npos) << failure.message;
  EXPECT_NE(failure.message.find(GetParam() ? "no such format" : "out of luck"), std::string::npos) << failure.message;
  EXPECT_EQ(state(), "torn");
  EXPECT_EQ(calls_.size(), 1U) << "nothing runs after the first failure";
}

TEST_F(StagedGroupSession, SeesThatTheHookWasGivenOtherBytesThanWereSent) {
  start({}, hooks_);
  WireSender sender = opened();
  std::vector<std::byte> flipped = data_;
  flipped[2 * kBytes + 5] ^= std::byte{0x10};  // the upper half of a byte of "high.0", which the hook does not even look at
  sender.send(wire::Bucket{0, {extent(0, 0), extent(1, 1), extent(2, 2), extent(3, 3), extent(4, 4)}}, flipped);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, all_sums()});
  const wire::Failure failure = sender.expect<wire::ErrorReport>().failure;
  EXPECT_EQ(failure.name, "high.0");
  EXPECT_NE(failure.message.find("hook was given differs from what was sent"), std::string::npos) << failure.message;
  EXPECT_EQ(state(), "torn");
}

TEST_F(StagedGroupSession, RunsAgainInTheNextUpdate) {
  start({}, hooks_);
  WireSender sender = connect("lead");
  sender.hello();
  for (std::uint64_t step = 1; step <= 2; ++step) {
    data_ = small_model::bytes(5 * kBytes, static_cast<std::uint32_t>(step));
    if (step == 1) begin(sender, all(), step, "run/1");
    if (step == 2) {
      sender.open(step, "run/2");
      sender.expect<wire::Opened>();
      sender.send(wire::Manifest{digest_of(wire::encode_entries(all())), true, {}});
      const auto accept = sender.expect<wire::Accept>();
      EXPECT_TRUE(accept.known);
      EXPECT_EQ(accept.groups.size(), 2U) << "groups are told also where nothing else is";
      sender.send(wire::Confirm{});
      sender.expect<wire::Begin>();
    }
    sender.send(wire::Bucket{0, {extent(0, 0), extent(1, 1), extent(2, 2), extent(3, 3), extent(4, 4)}}, data_);
    sender.expect<wire::Consumed>();
    sender.send(wire::End{1, all_sums()});
    sender.expect<wire::Prepared>();
    sender.send(wire::Commit{});
    EXPECT_EQ(sender.expect<wire::Committed>().receipt.proved_inputs, 2U);
    expect_outputs();
  }
}

TEST_F(StagedGroupSession, TakesWholeGroupsInThePlainCall) {
  start({}, hooks_);
  const Shape shape{8};
  const auto entries = all();
  std::vector<NamedView> views;
  for (std::size_t t = 0; t < 5; ++t) views.push_back({entries[t].name, Dtype::kU8, shape, std::span(data_).subspan(t * kBytes, kBytes)});
  const auto load = [&](std::span<const NamedView> part) {
    return receiver_->ask<Status>([&, part](auto answer) { receiver_->control().load_plain(part, answer); });
  };
  ASSERT_TRUE(receiver_->ask<Status>([&](auto answer) { receiver_->control().begin_plain({"run", 1}, answer); }).ok());
  const Status half = load(std::span(views).first(2));
  EXPECT_NE(half.message().find("group 0 needs 2 entries, 1 come"), std::string::npos) << half.message();
  ASSERT_TRUE(load(std::span(views).first(3)).ok());
  ASSERT_TRUE(load(std::span(views).subspan(3)).ok());
  const auto receipt = receiver_->ask<Result<wire::Receipt>>([&](auto answer) { receiver_->control().finish_plain(answer); });
  ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
  EXPECT_TRUE(receipt.value().proven);
  EXPECT_EQ(receipt.value().proved_inputs, 2U);
  expect_outputs();
}

TEST_F(StagedGroupSession, RefusesGroupsThatCannotBeBound) {
  const auto refused = [&](const ModelLayout& layout) {
    ModelLayout copy = layout;
    return place_groups(copy).message();
  };
  ModelLayout odd = layout_;
  odd.groups[0].outputs = {9};
  EXPECT_NE(refused(odd).find("output 9 of 3 storages"), std::string::npos);
  odd = layout_;
  odd.groups[1].entries[0].name = "low.0";
  EXPECT_NE(refused(odd).find("low.0 has a rule already"), std::string::npos);
  odd = layout_;
  odd.groups[0].hook.clear();
  EXPECT_NE(refused(odd).find("a hook"), std::string::npos);
  auto storage = HostStorage::allocate(layout_, *device_);
  ASSERT_TRUE(storage.ok());
  ReceiverParts parts;
  parts.listener = std::move(hub_.listen("rank")).value();
  parts.guard_path = std::filesystem::temp_directory_path() / ("headrace-guard-" + std::to_string(random_u64()));
  ReceiverOptions options;
  options.job = "job";
  const auto none = Receiver::Impl::create(options, layout_, storage.value().table(), *device_, {}, std::move(parts));
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.status().message().find("no hook interleave"), std::string::npos) << none.status().message();
}

}  // namespace
}  // namespace headrace
