// Experts that the engine moves between updates: a session works with the map that is in force at its OPEN.
#include <algorithm>
#include <random>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

using Maps = std::vector<std::vector<std::int32_t>>;

constexpr std::int32_t kLayers = 2;
constexpr std::int32_t kExperts = 5;
constexpr std::int32_t kPhysical = 8;
constexpr std::int32_t kLocal = kPhysical / 2;

/// Two MoE layers of five experts and three redundant ones on two ranks; this is rank 0, physical slots 0 to 3.
ModelLayout two_layers() {
  ModelLayout model;
  model.family = "small";
  model.variant = "plain";
  model.parallel = ParallelLayout{1, 2};
  for (std::uint32_t l = 0; l < kLayers; ++l) {
    model.experts.push_back(ExpertMap::initial(kExperts, kPhysical - kExperts, 0, 2).value());
    std::string name = "experts";
    name += std::to_string(l);
    model.storages.push_back({.name = name, .dtype = Dtype::kU8, .shape = {kLocal, 4, 8}, .strides = {}, .bytes = kLocal * 32});
    TensorRule rule;
    rule.param = name;
    rule.dtypes = {Dtype::kI8};
    rule.shape = {4, 4};
    // Row i of an expert's [4, 4] bytes stands at 8i of its slot of 32; the other four bytes of each row are padding.
    const CopyDim rows{4, 4, 8};
    rule.placements.push_back({l, Box{{0, 0}, {4, 4}}, StridedCopy::make(0, 0, 4, {&rows, 1}), 32});
    model.expert_rules.push_back({"layers." + std::to_string(l) + ".ffn.experts.", "w1.weight", rule, l});
    const CopyDim pads{4 * kLocal, 0, 8};
    model.constants.push_back({l, StridedCopy::make(0, 4, 4, {&pads, 1}), small_model::kPad});
  }
  return model;
}

std::string name_of(std::int32_t layer, std::int32_t expert) {
  return "layers." + std::to_string(layer) + ".ffn.experts." + std::to_string(expert) + ".w1.weight";
}
std::vector<std::byte> bytes_of(std::int32_t layer, std::int32_t expert, std::uint32_t seed) {
  return small_model::bytes(16, seed * 100 + static_cast<std::uint32_t>(layer * 10 + expert));
}

class LiveMap : public ReceiverFixture {
 protected:
  void SetUp() override {
    layout_ = two_layers();
    EngineHooks hooks;
    hooks.expert_map = [this] { return maps_; };
    start({}, hooks);
  }
  static Maps at_load() { return Maps(kLayers, {0, 1, 2, 3, 4, 0, 1, 2}); }
  void offer_all(WireSender& sender) {
    std::vector<wire::ManifestEntry> list;
    for (std::int32_t l = 0; l < kLayers; ++l) {
      for (std::int32_t e = 0; e < kExperts; ++e) list.push_back({name_of(l, e), Dtype::kI8, {4, 4}, Box{{0, 0}, {4, 4}}});
    }
    sender.manifest(std::move(list));
  }
  /// Up to CONSUMED; returns what END says.
  wire::End transfer(WireSender& sender, std::uint64_t id, const std::string& version, std::uint32_t seed) {
    sender.open(id, version);
    sender.expect<wire::Opened>();
    offer_all(sender);
    const auto accept = sender.expect<wire::Accept>();
    if (!accept.known) wanted_ = accept.wanted;
    sender.send(wire::Confirm{});
    sender.expect<wire::Begin>();
    wire::Bucket bucket;
    wire::End end{1, {}};
    std::vector<std::byte> data;
    for (std::uint32_t i = 0; i < wanted_.size(); ++i) {
      if (wanted_[i].boxes.empty()) continue;
      const auto tensor = bytes_of(static_cast<std::int32_t>(i) / kExperts, static_cast<std::int32_t>(i) % kExperts, seed);
      bucket.extents.push_back({i, MemoryId{1}, static_cast<std::int64_t>(data.size()), std::nullopt, {}});
      const auto key = tensor_key(sender.entries[i].name, Dtype::kI8, Shape{4, 4});
      end.fingerprints.push_back({i, fingerprint(key, 0, tensor)});
      data.insert(data.end(), tensor.begin(), tensor.end());
    }
    sender.send(bucket, data);
    sender.expect<wire::Consumed>();
    return end;
  }
  wire::Receipt update_all(WireSender& sender, std::uint64_t id, const std::string& version, std::uint32_t seed) {
    sender.send(transfer(sender, id, version, seed));
    sender.expect<wire::Prepared>();
    sender.send(wire::Commit{});
    return sender.expect<wire::Committed>().receipt;
  }
  /// Slot by slot from the engine's map, row by row from the layout's description.
  void expect_experts(std::uint32_t seed) {
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const auto storage = live("experts" + std::to_string(l));
      for (std::size_t slot = 0; slot < kLocal; ++slot) {
        const std::int32_t expert = maps_[static_cast<std::size_t>(l)][slot];
        const auto tensor = bytes_of(l, expert, seed);
        for (std::size_t row = 0; row < 4; ++row) {
          for (std::size_t c = 0; c < 8; ++c) {
            const std::byte expected = c < 4 ? tensor[row * 4 + c] : std::byte{0xEE};
            ASSERT_EQ(storage[slot * 32 + row * 8 + c], expected) << "layer " << l << " slot " << slot << " expert " << expert;
          }
        }
      }
    }
  }
  void notify_rebalance() {
    receiver_->ask<int>([&](auto answer) {
      receiver_->control().on_engine_event(EngineEvent::kExpertRebalance);
      answer(0);
    });
  }

  Maps maps_ = at_load();  // changed between updates only
  std::uint64_t next_id_ = 1;
  std::vector<wire::Wanted> wanted_;
};

TEST_F(LiveMap, SendsThePlainCallsOfTheUpdateBeforeToWhereExpertsLiveNow) {
  std::mt19937 random(11);
  for (std::uint32_t round = 1; round <= 6; ++round) {
    SCOPED_TRACE(round);
    std::vector<std::string> names;
    std::vector<std::vector<std::byte>> tensors;
    for (std::int32_t l = 0; l < kLayers; ++l) {
      for (std::int32_t e = 0; e < kExperts; ++e) {
        names.push_back(name_of(l, e));
        tensors.push_back(bytes_of(l, e, round));
      }
    }
    const Shape shape{4, 4};
    std::vector<NamedView> views;
    for (std::size_t i = 0; i < names.size(); ++i) views.push_back({names[i], Dtype::kI8, shape, tensors[i]});
    SessionControl& control = receiver_->control();
    const WeightVersion version{"run", round};
    ASSERT_TRUE(receiver_->ask<Status>([&](auto answer) { control.begin_plain(version, answer); }).ok());
    ASSERT_TRUE(receiver_->ask<Status>([&](auto answer) { control.load_plain(views, answer); }).ok());
    const auto receipt = receiver_->ask<Result<wire::Receipt>>([&](auto answer) { control.finish_plain(answer); });
    ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
    EXPECT_EQ(receipt.value().plan_cached, round % 2 == 0) << "the map changes after every second update";
    expect_experts(round);
    if (round % 2 == 1) continue;
    for (auto& layer : maps_) std::shuffle(layer.begin(), layer.end(), random);
  }
}

TEST_F(LiveMap, WritesEveryReplicaWhereTheEngineHoldsItAtOpen) {
  WireSender sender = connect("lead");
  sender.hello();
  std::mt19937 random(7);
  std::uint64_t id = 1;
  for (std::uint32_t round = 1; round <= 12; ++round, ++id) {
    update_all(sender, id, "run/" + std::to_string(round), round);
    expect_experts(round);
    // Any map in which every expert is somewhere, another one in each layer.
    for (std::vector<std::int32_t>& layer : maps_) {
      layer = {0, 1, 2, 3, 4};
      while (layer.size() < kPhysical) layer.push_back(static_cast<std::int32_t>(random() % kExperts));
      std::shuffle(layer.begin(), layer.end(), random);
    }
    notify_rebalance();
  }
}

TEST_F(LiveMap, NeverUsesAPlanThatWasMadeForAnotherMap) {
  WireSender sender = connect("lead");
  sender.hello();
  update_all(sender, 1, "run/1", 1);
  EXPECT_TRUE(update_all(sender, 2, "run/2", 2).plan_cached);
  maps_ = Maps(kLayers, {4, 3, 3, 4, 0, 1, 2, 0});
  EXPECT_FALSE(update_all(sender, 3, "run/3", 3).plan_cached);
  expect_experts(3);
  EXPECT_TRUE(update_all(sender, 4, "run/4", 4).plan_cached);
  expect_experts(4);
}

TEST_F(LiveMap, TellsTheDigestOfAllRanksInOpenedAndWelcome) {
  WireSender sender = connect("lead");
  const Digest first = sender.hello().expert_map;
  maps_[1] = {4, 3, 2, 1, 0, 0, 0, 0};
  sender.open(1, "run/1");
  const Digest moved = sender.expect<wire::Opened>().expert_map;
  EXPECT_NE(moved, first);
  EXPECT_EQ(connect("other").hello().expert_map, moved);
  std::vector<ExpertMap> of_rank_1;
  for (const auto& layer : maps_) of_rank_1.push_back(ExpertMap::from_physical(kExperts, layer, {4, 5, 6, 7}).value());
  EXPECT_EQ(moved, ExpertMaps(of_rank_1).digest());
}

TEST_F(LiveMap, RefusesAMapThatDoesNotFitByLayerAndNumbers) {
  WireSender sender = connect("lead");
  sender.hello();
  update_all(sender, 1, "run/1", 1);
  const auto refusal = [&](Maps maps) {
    maps_ = std::move(maps);
    sender.open(++next_id_, "run/2");
    const wire::ErrorReport error = sender.expect<wire::ErrorReport>();
    EXPECT_EQ(error.state, static_cast<std::uint32_t>(SessionState::kIdle));
    return error.failure.message;
  };
  const auto good = at_load()[0];
  EXPECT_NE(refusal({good}).find("1 MoE layers, the model has 2"), std::string::npos);
  EXPECT_NE(refusal({good, {0, 1, 2, 3, 4, 0, 1}}).find("MoE layer 1 (layers.1.ffn.experts.): expert map: 7 physical slots, there are 8"),
            std::string::npos);
  EXPECT_NE(refusal({good, {0, 1, 2, 3, 3, 0, 1, 2}}).find("none of 8 physical slots holds expert 4"), std::string::npos);
  EXPECT_NE(refusal({{0, 1, 2, 3, 5, 0, 1, 2}, good}).find("physical slot 4 holds expert 5, the model has 5"), std::string::npos);
  maps_ = at_load();
  EXPECT_EQ(status().version, "run/1") << "nothing was written";
  update_all(sender, 90, "run/2", 2);
}

TEST_F(LiveMap, FindsARebalanceThatNobodyAnnouncedBeforePrepared) {
  WireSender sender = connect("lead");
  sender.hello();
  const wire::End end = transfer(sender, 1, "run/1", 1);
  maps_[0] = {4, 3, 2, 1, 0, 0, 0, 0};
  sender.send(end);
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("rebalanced during the update"), std::string::npos);
  EXPECT_EQ(state(), "torn");
  update_all(sender, 2, "run/1", 2);
  expect_experts(2);
}

TEST_F(LiveMap, ReadsBackFromTheSlotsOfTheMapInForce) {
  WireSender sender = connect("lead");
  sender.hello();
  update_all(sender, 1, "run/1", 1);
  // The engine swaps the experts of slots 0 and 1 of layer 0.
  std::byte* slots = storage_->table().find("experts0")->address;
  std::swap_ranges(slots, slots + 32, slots + 32);
  maps_[0] = {1, 0, 2, 3, 4, 0, 1, 2};
  notify_rebalance();
  WireSender tool = connect("");
  tool.hello();
  tool.send(wire::ReadRequest{name_of(0, 0), Box{{0, 0}, {4, 4}}});
  EXPECT_EQ(tool.expect<wire::ReadReply>().bytes, bytes_of(0, 0, 1));
  tool.send(wire::FingerprintRequest{0, 100});
  for (const wire::TensorFingerprint& tensor : tool.expect<wire::FingerprintReply>().tensors) {
    if (tensor.name != name_of(0, 1)) continue;
    EXPECT_EQ(tensor.sum, fingerprint(tensor_key(tensor.name, Dtype::kI8, Shape{4, 4}), 0, bytes_of(0, 1, 1)));
  }
}

}  // namespace
}  // namespace headrace
