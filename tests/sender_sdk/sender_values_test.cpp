// What a sender says beforehand of tensors whose values receivers ask for.
#include <cstring>
#include <future>

#include "tests/sender_sdk/sender_fixture.h"

namespace headrace::test {
namespace {

using wire::MessageType;

class SenderValues : public SenderTest {
 protected:
  static FakeScript asking(std::vector<wire::ValueRule> rules) {
    FakeScript script;
    script.values = std::move(rules);
    return script;
  }
  static std::vector<TestTensor> experts() {
    std::vector<TestTensor> tensors{make_tensor("embed", {40, 64}, 1)};
    for (int e = 0; e < 3; ++e) {
      tensors.push_back(make_tensor("experts." + std::to_string(e) + ".weight", {8, 8}, 10 + static_cast<std::uint64_t>(e)));
      tensors.push_back(make_tensor("experts." + std::to_string(e) + ".scale", {}, 20 + static_cast<std::uint64_t>(e), Dtype::kF32));
    }
    return tensors;
  }
  static UpdateOptions with_values(const std::vector<TestTensor>& tensors, std::uint64_t step = 1) {
    UpdateOptions update = update_of(tensors, step);
    for (std::size_t t = 0; t < tensors.size(); ++t) update.entries[t].value = tensors[t].view();
    return update;
  }
  static wire::Manifest manifest_of(const FakeReceiver& receiver) {
    return std::get<wire::Manifest>(receiver.last(MessageType::kManifest)->body);
  }
};

TEST_F(SenderValues, AreToldOfTheEntriesThatAnyReceiverAsksFor) {
  start_receiver(asking({{"experts.", "scale", 2}}));
  FakeScript other = asking({{"experts.", "scale", 3}});
  other.engine = "engine-1";
  start_receiver(other);
  const auto sender = connect();
  const auto tensors = experts();
  EXPECT_TRUE(sender->wants_value("experts.2.scale"));
  EXPECT_FALSE(sender->wants_value("experts.3.scale"));
  EXPECT_FALSE(sender->wants_value("experts.2.weight"));
  ASSERT_TRUE(sender->open(with_values(tensors)).ok());
  const std::vector<wire::EntryValue> told{{2, tensors[2].bytes}, {4, tensors[4].bytes}, {6, tensors[6].bytes}};
  for (const auto& receiver : receivers) EXPECT_EQ(manifest_of(*receiver).values, told);
  ASSERT_TRUE(add_all(*sender, tensors).ok());
  EXPECT_TRUE(sender->finish().ok());
}

TEST_F(SenderValues, AreToldAnewWithAKnownManifest) {
  start_receiver(asking({{"experts.", "scale", 3}}));
  const auto sender = connect();
  auto tensors = experts();
  for (std::uint64_t step = 1; step <= 2; ++step) {
    tensors[4].bytes[0] = static_cast<std::byte>(step);
    ASSERT_TRUE(sender->open(with_values(tensors, step)).ok());
    const wire::Manifest manifest = manifest_of(*receivers[0]);
    EXPECT_EQ(manifest.known, step == 2);
    ASSERT_EQ(manifest.values.size(), 3U);
    EXPECT_EQ(manifest.values[1].bytes, tensors[4].bytes);
    ASSERT_TRUE(add_all(*sender, tensors).ok());
    ASSERT_TRUE(sender->finish().ok());
  }
}

TEST_F(SenderValues, ThatAreMissingAreRefusedByNameBeforeAnythingIsSent) {
  start_receiver(asking({{"experts.", "scale", 3}}));
  const auto sender = connect();
  const auto tensors = experts();
  UpdateOptions update = with_values(tensors);
  update.entries[2].value.reset();
  update.entries[6].value.reset();
  const Status refused = sender->open(update);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_EQ(refused.message(),
            "open: receivers must know beforehand what 2 entries hold, whose value was not given: experts.0.scale, experts.2.scale");
  EXPECT_EQ(receivers[0]->count(MessageType::kOpen), 0U);
  ASSERT_TRUE(sender->open(with_values(tensors)).ok());
  ASSERT_TRUE(add_all(*sender, tensors).ok());
  EXPECT_TRUE(sender->finish().ok());
}

TEST_F(SenderValues, ThatCannotBeToldAreRefusedByName) {
  start_receiver(asking({{"experts.", "weight", 3}, {"experts.", "scale", 3}}));
  const auto sender = connect();
  const auto tensors = experts();
  const auto refusal = [&](std::size_t t, const std::function<void(SenderEntry&)>& change) {
    UpdateOptions update = with_values({tensors[t]});
    change(update.entries[0]);
    return sender->open(update).message();
  };
  const auto as_it_is = [](SenderEntry&) {};
  EXPECT_EQ(refusal(1, as_it_is), "open: the value of experts.0.weight: 64 bytes are wanted, the limit is 16");
  EXPECT_EQ(refusal(1, [](SenderEntry& entry) { entry.box = Box{{0, 0}, {1, 8}}; }),
            "open: the value of experts.0.weight: it is wanted of the whole tensor, this sender has a part");
  EXPECT_EQ(refusal(2, [](SenderEntry& entry) { entry.value->data = nullptr; }), "open: the value of experts.0.scale: no data");
  EXPECT_EQ(refusal(2, [](SenderEntry& entry) { entry.value->strides = {4}; }),
            "open: the value of experts.0.scale: 1 strides for shape []");
  EXPECT_EQ(receivers[0]->count(MessageType::kOpen), 0U);
}

TEST_F(SenderValues, AreReadThroughTheStridesOfTheirView) {
  start_receiver(asking({{"experts.", "scale", 1}}));
  const auto sender = connect();
  TestTensor tensor = make_tensor("experts.0.scale", {2, 3}, 7, Dtype::kI16);
  std::vector<std::int16_t> memory(60);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::int16_t>(100 + i);
  UpdateOptions update = update_of({tensor});
  update.entries[0].value = TensorView{memory.data(), {2, 20}};  // element (i, j) at 1 i + 10 j
  ASSERT_TRUE(sender->open(update).ok());
  const std::vector<std::int16_t> packed{100, 110, 120, 101, 111, 121};
  const wire::Manifest manifest = manifest_of(*receivers[0]);
  ASSERT_EQ(manifest.values.size(), 1U);
  ASSERT_EQ(manifest.values[0].bytes.size(), 12U);
  EXPECT_EQ(0, std::memcmp(manifest.values[0].bytes.data(), packed.data(), 12));
  sender->abort("enough");
}

TEST_F(SenderValues, OfAPartOfATensorWithOneOfItsNamesAreNotToldToBeCompared) {
  start_receiver(asking({{"embed", "embed", 0}, {"embed", "head", 0}}));
  const std::vector<std::string> names{"trainer-0", "trainer-1"};
  std::vector<std::unique_ptr<SenderImpl>> senders;
  for (const std::string& name : names) senders.push_back(connect(options(name)));
  const TestTensor whole = make_tensor("embed", {4, 8}, 1);
  const auto open_part = [&](std::size_t s) {
    UpdateOptions update = update_of({whole});
    const auto from = static_cast<std::int64_t>(2 * s);
    update.entries[0].box = Box{{from, 0}, {from + 2, 8}};
    update.entries[0].value = TensorView{whole.bytes.data() + 16 * s, {}};
    update.senders = names;
    return senders[s]->open(update);
  };
  std::future<Status> second = std::async(std::launch::async, open_part, 1);
  const Status first = open_part(0);
  EXPECT_TRUE(first.ok()) << first.to_string();
  if (!first.ok()) senders[1]->abort("the lead did not open");
  EXPECT_TRUE(second.get().ok());
  EXPECT_TRUE(manifest_of(*receivers[0]).values.empty());
  for (auto& sender : senders) sender->abort("enough");
}

TEST_F(SenderValues, AreNotReadWhereNobodyAsks) {
  start_receiver();
  const auto sender = connect();
  const auto tensors = experts();
  UpdateOptions update = update_of(tensors);
  for (SenderEntry& entry : update.entries) entry.value = TensorView{};
  ASSERT_TRUE(sender->open(update).ok());
  EXPECT_TRUE(manifest_of(*receivers[0]).values.empty());
  sender->abort("enough");
}

}  // namespace
}  // namespace headrace::test
