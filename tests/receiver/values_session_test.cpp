// Global scales and launch constants: what an update says of them before its first byte, and what it sends.
#include <array>
#include <cstring>
#include <limits>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

const std::string kPrefix = "layers.0.ffn.experts.";
const std::string kConstant = "experts.activation_scale";

std::vector<std::byte> bytes_of(float number) {
  std::vector<std::byte> bytes(sizeof(number));
  std::memcpy(bytes.data(), &number, sizeof(number));
  return bytes;
}

/// What an update holds: per expert the scales of gate and up, and of its input.
struct Numbers {
  std::array<float, 4> gate{1, 2, 3, 4};
  std::array<float, 4> up{1, 2, 3, 4};
  std::array<float, 4> input{0.5F, 0.125F, 0.75F, 0.25F};  // the greatest is 0.75, of an expert of the other rank

  float at(std::uint32_t entry) const { return (entry % 3 == 0 ? gate : entry % 3 == 1 ? up : input)[entry / 3]; }
};

/// Rank 0 of 2 with four experts: global scales of its own two, and all input scales, from whose greatest the engine makes one number.
class SessionValues : public ReceiverFixture {
 protected:
  SessionValues() {
    const auto rule = [](std::string param, Placement placement) {
      TensorRule made;
      made.param = std::move(param);
      made.dtypes = {Dtype::kF32};
      placement.box = Box::whole({});
      made.placements.push_back(std::move(placement));
      return made;
    };
    layout_.storages = {{.name = "scales", .dtype = Dtype::kF32, .shape = {2, 2}, .strides = {}, .bytes = 16},
                        {.name = "inputs", .dtype = Dtype::kF32, .shape = {4}, .strides = {}, .bytes = 16}};
    layout_.constants.clear();
    layout_.named.clear();
    layout_.expert_rules = {{kPrefix, "w1.weight_scale_2", rule("scales", {0, {}, StridedCopy::flat(0, 0, 4), 8})},
                            {kPrefix, "w3.weight_scale_2", rule("scales", {0, {}, StridedCopy::flat(0, 4, 4), 8})}};
    for (int e = 0; e < 4; ++e) {
      layout_.named.push_back(
          {kPrefix + std::to_string(e) + ".w2.input_scale", rule("inputs", {1, {}, StridedCopy::flat(0, 4 * e, 4), 0})});
    }
    layout_.paired_values = {{0, kPrefix, "w1.weight_scale_2", "w3.weight_scale_2", 1e-5}};
    layout_.launch_constants = {{.name = kConstant, .shape = {}, .map = 0, .prefix = kPrefix, .suffix = "w2.input_scale"}};
  }

  static std::vector<wire::ManifestEntry> entries() {
    std::vector<wire::ManifestEntry> list;
    for (int e = 0; e < 4; ++e) {
      for (const char* leaf : {".w1.weight_scale_2", ".w3.weight_scale_2", ".w2.input_scale"})
        list.push_back({kPrefix + std::to_string(e) + leaf, Dtype::kF32, {}, {}});
    }
    return list;
  }
  static std::vector<wire::EntryValue> values_of(const Numbers& numbers) {
    std::vector<wire::EntryValue> values;
    for (std::uint32_t e = 0; e < 12; ++e) values.push_back({e, bytes_of(numbers.at(e))});
    return values;
  }
  /// Scales of the other rank's experts are not wanted here.
  static bool wanted(std::uint32_t entry) { return entry < 6 || entry % 3 == 2; }

  void open_for(WireSender& sender, const std::string& version) {
    sender.open(++session_, version);
    sender.expect<wire::Opened>();
  }
  void offer(WireSender& sender, const std::string& version, const Numbers& numbers) {
    open_for(sender, version);
    sender.manifest(entries(), values_of(numbers));
  }
  /// From ACCEPT to END.
  void bring(WireSender& sender, const Numbers& numbers) {
    sender.expect<wire::Accept>();
    sender.send(wire::Confirm{});
    sender.expect<wire::Begin>();
    wire::Bucket bucket;
    wire::End end{1, {}};
    std::vector<std::byte> attachment;
    for (std::uint32_t e = 0; e < 12; ++e) {
      if (!wanted(e)) continue;
      bucket.extents.push_back({e, MemoryId{1}, static_cast<std::int64_t>(attachment.size()), std::nullopt, {}});
      const auto bytes = bytes_of(numbers.at(e));
      attachment.insert(attachment.end(), bytes.begin(), bytes.end());
      const wire::ManifestEntry entry = entries()[e];
      end.fingerprints.push_back({e, fingerprint(tensor_key(entry.name, entry.dtype, entry.shape), 0, bytes)});
    }
    sender.send(bucket, attachment);
    sender.expect<wire::Consumed>();
    sender.send(end);
  }
  void update(WireSender& sender, const std::string& version, const Numbers& numbers) {
    offer(sender, version, numbers);
    bring(sender, numbers);
    sender.expect<wire::Prepared>();
    sender.send(wire::Commit{});
    sender.expect<wire::Committed>();
  }
  std::vector<wire::Failure> refusal(WireSender& sender) {
    const auto reject = sender.expect<wire::Reject>();
    EXPECT_EQ(reject.defects_total, reject.defects.size());
    return reject.defects;
  }
  /// One defect: another constant than graphs have.
  void expect_changed(WireSender& sender, const std::string& expected, const std::string& actual) {
    const std::vector<wire::Failure> defects = refusal(sender);
    ASSERT_EQ(defects.size(), 1U);
    EXPECT_EQ(defects[0].name, kConstant);
    EXPECT_EQ(defects[0].expected, expected);
    EXPECT_EQ(defects[0].actual, actual);
    EXPECT_EQ(defects[0].code, static_cast<std::uint32_t>(Code::kFailedPrecondition));
    EXPECT_EQ(defects[0].message,
              "launch constant experts.activation_scale: captured graphs have another value than the greatest of "
              "layers.0.ffn.experts.*.w2.input_scale; an update that changes it is taken after the engine said that it captures its graphs "
              "again (EngineEvent::kRecapture)");
  }
  std::array<float, 4> live_inputs() const {
    std::array<float, 4> inputs{};
    std::memcpy(inputs.data(), live("inputs").data(), sizeof(inputs));
    return inputs;
  }
  void notify(EngineEvent event) {
    receiver_->ask<int>([&, event](auto answer) {
      receiver_->control().on_engine_event(event);
      answer(0);
    });
  }
  static Numbers with_input(float greatest) {
    Numbers numbers;
    numbers.input[2] = greatest;
    return numbers;
  }

  std::uint64_t session_ = 0;
};

TEST_F(SessionValues, AreAskedForInWelcomeByRulesOfNames) {
  start();
  WireSender sender = connect("lead");
  const auto welcome = sender.hello();
  const std::vector<wire::ValueRule> rules{
      {kPrefix, "w1.weight_scale_2", 4}, {kPrefix, "w3.weight_scale_2", 4}, {kPrefix, "w2.input_scale", 4}};
  EXPECT_EQ(welcome.values, rules);
}

TEST_F(SessionValues, ThatMakeTheSameConstantAreTakenWhateverElseChanges) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, "run/1", {});
  Numbers other{{7, 8, 9, 10}, {7, 8, 9, 10}, {0.75F, 0.5F, 0.25F, 0.125F}};
  update(sender, "run/2", other);
  EXPECT_EQ(status().version, "run/2");
  EXPECT_EQ(live_inputs(), other.input);
}

TEST_F(SessionValues, ThatChangeAConstantAreRefusedBeforeTheFirstByteUntilGraphsAreCapturedAgain) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, "run/1", {});
  for (const float greatest : {1.0F, 0.625F}) {
    offer(sender, "run/2", with_input(greatest));
    expect_changed(sender, "0.75", greatest == 1.0F ? "1" : "0.625");
  }
  EXPECT_EQ(status().version, "run/1");
  EXPECT_EQ(guard().slots[0].state, SlotState::kCommitted) << "what was committed is still served";
  EXPECT_EQ(live_inputs(), Numbers{}.input);
  notify(EngineEvent::kRecapture);
  update(sender, "run/2", with_input(1.0F));
  offer(sender, "run/3", {});
  expect_changed(sender, "1", "0.75");
}

TEST_F(SessionValues, AreCheckedAlsoWithAManifestThatIsKnown) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, "run/1", {});
  const Digest digest = digest_of(wire::encode_entries(entries()));
  open_for(sender, "run/2");
  sender.send(wire::Manifest{digest, true, {}, values_of(with_input(2.0F))});
  expect_changed(sender, "0.75", "2");
  open_for(sender, "run/2");
  sender.send(wire::Manifest{digest, true, {}, {}});
  EXPECT_EQ(refusal(sender).size(), 12U);
  open_for(sender, "run/2");
  sender.send(wire::Manifest{digest, true, {}, values_of({})});
  EXPECT_TRUE(sender.expect<wire::Accept>().known);
}

TEST_F(SessionValues, OfAPairMustBeEqualAlsoWhereAnotherRankHasTheExpert) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  Numbers numbers;
  numbers.up[0] = 1.5F;
  numbers.up[3] = 4.25F;
  offer(sender, "run/1", numbers);
  const std::vector<wire::Failure> defects = refusal(sender);
  ASSERT_EQ(defects.size(), 2U);
  EXPECT_EQ(defects[0].name, kPrefix + "0.w3.weight_scale_2");
  EXPECT_EQ(defects[1].name, kPrefix + "3.w3.weight_scale_2");
  EXPECT_EQ(defects[1].expected, "4");
  EXPECT_EQ(defects[1].actual, "4.25");
  EXPECT_EQ(defects[1].message,
            "layers.0.ffn.experts.3.w3.weight_scale_2: not the value of layers.0.ffn.experts.3.w1.weight_scale_2; the engine keeps one "
            "number for both, they may differ by 1e-05 of the greater");
  numbers = {};
  numbers.up[3] = 4.00003F;
  update(sender, "run/1", numbers);
}

TEST_F(SessionValues, ThatAreMissingAreNamedTogetherWithAllOtherDefects) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_for(sender, "run/1");
  std::vector<wire::ManifestEntry> list = entries();
  list[0].dtype = Dtype::kBF16;
  auto values = values_of({});
  values[0].bytes.resize(2);
  values.erase(values.begin() + 4);
  sender.manifest(list, values);
  const std::vector<wire::Failure> defects = refusal(sender);
  ASSERT_EQ(defects.size(), 3U);
  EXPECT_EQ(defects[0].message, kPrefix + "0.w1.weight_scale_2: dtype BF16, table has F32");
  EXPECT_EQ(defects[1].message, kPrefix + "1.w3.weight_scale_2: WELCOME asks for its value, MANIFEST of sender lead has none");
  EXPECT_EQ(defects[2].name, kPrefix + "0.w3.weight_scale_2") << "of the bytes of a BF16 0 and an F32 1";
}

TEST_F(SessionValues, ThatNoTensorCanHaveAreRefused) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_for(sender, "run/1");
  auto values = values_of({});
  values[3].bytes.push_back(std::byte{0});
  values[4].bytes = bytes_of(std::numeric_limits<float>::infinity());
  values.push_back(values[8]);
  values.push_back({12, bytes_of(1)});
  sender.manifest(entries(), values);
  std::vector<std::string> messages;
  for (const wire::Failure& defect : refusal(sender)) messages.push_back(defect.message);
  EXPECT_EQ(messages,
            (std::vector<std::string>{kPrefix + "1.w1.weight_scale_2: a value of 5 bytes, F32 of shape [] has 4",
                                      kPrefix + "2.w2.input_scale: a second value", "a value of entry 12 of a manifest of 12 (sender lead)",
                                      kPrefix + "1.w3.weight_scale_2: its value: inf is no finite number"}));
}

TEST_F(SessionValues, ThatAreNotWhatIsSentFailTheUpdateByName) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  Numbers sent;
  sent.input[1] = 0.375F;
  offer(sender, "run/1", {});
  bring(sender, sent);
  const auto error = sender.expect<wire::ErrorReport>();
  EXPECT_EQ(error.failure.code, static_cast<std::uint32_t>(Code::kCorruption));
  EXPECT_EQ(error.failure.name, kPrefix + "1.w2.input_scale");
  EXPECT_EQ(error.failure.message, kPrefix + "1.w2.input_scale: MANIFEST said that it holds the bytes 0000003e, others were sent");
  EXPECT_NE(error.failure.expected, error.failure.actual);
  EXPECT_EQ(state(), "torn");
  update(sender, "run/1", sent);
}

TEST_F(SessionValues, OfAnUpdateThatFailedAreNotWhatGraphsHave) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, "run/1", {});
  notify(EngineEvent::kRecapture);
  offer(sender, "run/2", with_input(1.0F));
  bring(sender, with_input(2.0F));
  sender.expect<wire::ErrorReport>();
  update(sender, "run/2", with_input(4.0F));
  offer(sender, "run/3", with_input(1.0F));
  expect_changed(sender, "4", "1");
}

TEST_F(SessionValues, ThatGraphsHaveOutliveTheContentOfStorage) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, "run/1", {});
  for (const EngineEvent event :
       {EngineEvent::kSleep, EngineEvent::kDiscard, EngineEvent::kExpertRebalance, EngineEvent::kLoraLoad, EngineEvent::kForeignReload}) {
    notify(event);
    offer(sender, "run/2", with_input(1.0F));
    expect_changed(sender, "0.75", "1");
  }
}

TEST_F(SessionValues, AreComparedWithWhatTheEngineSaysThatItsGraphsHave) {
  std::map<std::string, double> said{{kConstant, 1.0}};
  EngineHooks hooks;
  hooks.launch_constants = [&] { return said; };
  start({}, hooks);
  WireSender sender = connect("lead");
  sender.hello();
  offer(sender, "run/1", {});
  expect_changed(sender, "1", "0.75");
  update(sender, "run/1", with_input(1.0F));
  said.clear();  // no graph has it any more
  update(sender, "run/2", {});
  said[kConstant] = 2;
  offer(sender, "run/3", {});
  expect_changed(sender, "2", "0.75");
  said["experts.other"] = 2;
  sender.open(++session_, "run/3");
  const std::string refused = wire::to_status(sender.expect<wire::ErrorReport>().failure).message();
  EXPECT_NE(refused.find("the engine's launch_constants hook: experts.other is none of the 1 launch constants of the layout"),
            std::string::npos)
      << refused;
}

TEST_F(SessionValues, OfAnotherScopeAreNotAskedFor) {
  for (NamedRule& named : layout_.named) named.rule.scope = "draft";
  layout_.launch_constants[0].scope = "draft";
  layout_.storages[1].optional = true;
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_for(sender, "run/1");
  std::vector<wire::ManifestEntry> list;
  std::vector<wire::EntryValue> values;
  for (std::uint32_t e = 0; e < 12; ++e) {
    if (e % 3 == 2) continue;
    values.push_back({static_cast<std::uint32_t>(list.size()), bytes_of(1)});
    list.push_back(entries()[e]);
  }
  sender.manifest(list, values);
  sender.expect<wire::Accept>();
}

TEST_F(SessionValues, ComeFromAllSendersTogether) {
  start();
  WireSender lead = connect("lead");
  lead.hello();
  WireSender other = connect("other");
  other.hello();
  lead.open(++session_, "run/1", {"lead", "other"});
  lead.expect<wire::Opened>();
  other.session = lead.session;
  other.expect<wire::Opened>();
  // Gate and up of an expert come from two senders.
  std::array<std::vector<wire::ManifestEntry>, 2> lists;
  std::array<std::vector<wire::EntryValue>, 2> values;
  Numbers numbers;
  numbers.up[2] = 5;
  for (std::uint32_t e = 0; e < 12; ++e) {
    const std::size_t who = e % 2;
    values[who].push_back({static_cast<std::uint32_t>(lists[who].size()), bytes_of(numbers.at(e))});
    lists[who].push_back(entries()[e]);
  }
  lead.manifest(lists[0], values[0]);
  other.manifest(lists[1], values[1]);
  for (WireSender* sender : {&lead, &other}) {
    const std::vector<wire::Failure> defects = refusal(*sender);
    ASSERT_EQ(defects.size(), 1U);
    EXPECT_EQ(defects[0].name, kPrefix + "2.w3.weight_scale_2");
  }
}

// ---- the plain call ---------------------------------------------------------------------------------------------------------------

class PlainValues : public SessionValues {
 protected:
  Status begin(std::uint64_t step) {
    return receiver_->ask<Status>([&](auto answer) { receiver_->control().begin_plain({"run", step}, answer); });
  }
  Status load(const Numbers& numbers, std::uint32_t from, std::uint32_t to) {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<NamedView> views;
    const auto list = entries();
    bytes.reserve(to - from);
    for (std::uint32_t e = from; e < to; ++e) {
      bytes.push_back(bytes_of(numbers.at(e)));
      views.push_back({list[e].name, Dtype::kF32, list[e].shape, bytes.back()});
    }
    return receiver_->ask<Status>([&](auto answer) { receiver_->control().load_plain(views, answer); });
  }
  Result<wire::Receipt> finish() {
    return receiver_->ask<Result<wire::Receipt>>([&](auto answer) { receiver_->control().finish_plain(answer); });
  }
  void load_all(const Numbers& numbers, std::uint64_t step) {
    ASSERT_TRUE(begin(step).ok());
    const Status loaded = load(numbers, 0, 12);
    ASSERT_TRUE(loaded.ok()) << loaded.to_string();
    const auto receipt = finish();
    ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
  }
};

TEST_F(PlainValues, ThatChangeAConstantAreRefusedBeforeTheFirstByteOfTheirCall) {
  start();
  load_all({}, 1);
  ASSERT_TRUE(begin(2).ok());
  const Status refused = load(with_input(1.0F), 6, 9);
  EXPECT_NE(refused.message().find("launch constant experts.activation_scale"), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find("(expected 0.75, got 1)"), std::string::npos) << refused.message();
  EXPECT_EQ(state(), "open") << "nothing was written";
  EXPECT_TRUE(load({}, 0, 12).ok()) << "what was refused is forgotten";
  EXPECT_TRUE(finish().ok());
  EXPECT_EQ(status().version, "run/2");
}

TEST_F(PlainValues, ThatMakeASmallerConstantAreFoundAtTheEnd) {
  start();
  load_all({}, 1);
  ASSERT_TRUE(begin(2).ok());
  const Numbers smaller = with_input(0.5F);
  for (std::uint32_t e = 0; e < 9; e += 3) ASSERT_TRUE(load(smaller, e, e + 3).ok()) << "a greater one may still come";
  const Status refused = load(smaller, 9, 12);
  EXPECT_NE(refused.message().find("(expected 0.75, got 0.5)"), std::string::npos) << refused.message();
  EXPECT_EQ(state(), "torn");
}

TEST_F(PlainValues, OfAPairAreComparedWhenTheSecondComes) {
  start();
  ASSERT_TRUE(begin(1).ok());
  Numbers numbers;
  numbers.up[1] = 2.5F;
  ASSERT_TRUE(load(numbers, 0, 4).ok());
  const Status refused = load(numbers, 4, 5);
  EXPECT_NE(refused.message().find(kPrefix + "1.w3.weight_scale_2: not the value of"), std::string::npos) << refused.message();
}

TEST_F(PlainValues, AreWhatTheNextUpdateMustNotChange) {
  start();
  load_all({}, 1);
  WireSender sender = connect("lead");
  sender.hello();
  offer(sender, "run/2", with_input(3.0F));
  expect_changed(sender, "0.75", "3");
}

}  // namespace
}  // namespace headrace
