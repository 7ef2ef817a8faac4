#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "receiver/host_storage.h"
#include "receiver/receiver.h"
#include "sender_sdk/sender.h"
#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

constexpr std::size_t kBytes = 100'000;

/// An engine in this process that keeps nibbles of two tensors in one byte, three times, and senders of all kinds. The checkpoint's order
/// tears every group apart: all lower halves come before all upper ones.
class StagedGroups : public ::testing::Test {
 protected:
  void SetUp() override {
    ModelLayout layout;
    layout.family = "staged";
    layout.variant = "plain";
    for (std::uint32_t g = 0; g < 3; ++g) {
      const std::string number = std::to_string(g);
      layout.storages.push_back(
          {.name = "packed." + number, .dtype = Dtype::kU8, .shape = {kBytes}, .strides = {}, .bytes = static_cast<std::int64_t>(kBytes)});
      TensorRule rule;
      rule.dtypes = {Dtype::kU8};
      rule.shape = {static_cast<std::int64_t>(kBytes)};
      layout.groups.push_back({.name = "group " + number,
                               .hook = "interleave",
                               .entries = {{"a.low." + number, rule}, {"b.high." + number, rule}},
                               .outputs = {g},
                               .work_bytes = 0});
    }
    storage_ = HostStorage::allocate(layout, *device_).value_or_throw();
    EngineHooks hooks;
    hooks.staged["interleave"] = [](const StagedCall& call) -> Status {
      for (std::size_t i = 0; i < call.outputs[0].size(); ++i) {
        call.outputs[0][i] = (call.inputs[0][i] & std::byte{15}) | (call.inputs[1][i] << 4);
      }
      return ok_status();
    };
    ReceiverOptions options;
    options.job = "job";
    receiver_ = Receiver::start(options, layout, storage_->table(), *device_, hooks).value_or_throw();
    std::vector<MadeTensor> tensors;
    for (const char* half : {"a.low.", "b.high."}) {
      for (int g = 0; g < 3; ++g) tensors.push_back({half + std::to_string(g), Dtype::kU8, {static_cast<std::int64_t>(kBytes)}});
    }
    write_checkpoint(weights(), tensors, 11);
  }
  std::string weights() const { return (files_.path() / "weights").string(); }

  /// Asks the receiver first: what another process says of an update orders nothing in this one.
  void expect_outputs(const std::string& version) const {
    ASSERT_EQ(receiver_->status().version, version);
    const Checkpoint checkpoint = Checkpoint::open(weights()).value_or_throw();
    std::map<std::string, std::span<const std::byte>> sent;
    for (const CheckpointTensor& tensor : checkpoint.tensors()) sent[tensor.name] = checkpoint.bytes(tensor).value_or_throw();
    for (std::uint32_t g = 0; g < 3; ++g) {
      const auto low = sent.at("a.low." + std::to_string(g));
      const auto high = sent.at("b.high." + std::to_string(g));
      const std::byte* live = storage_->table().at(StorageId{g}).address;
      for (std::size_t i = 0; i < kBytes; ++i) {
        const unsigned expected = std::to_integer<unsigned>(low[i]) % 16 + std::to_integer<unsigned>(high[i]) % 16 * 16;
        ASSERT_EQ(std::to_integer<unsigned>(live[i]), expected) << "group " << g << " byte " << i;
      }
    }
  }

  PrivateRunDirectory run_directory_;
  ScratchDir files_;
  std::unique_ptr<Device> device_ = make_host_device();
  std::optional<HostStorage> storage_;
  std::unique_ptr<Receiver> receiver_;
};

TEST_F(StagedGroups, ArriveWholeFromPushThoughTheCheckpointScattersThem) {
  const JsonValue document = run_json({"push", weights(), "--to", "job", "--version", "run/1", "--bucket-bytes", "65536"}, 0);
  expect_outputs("run/1");
  const JsonValue& receipt = member(member(document, "report"), "receipts").as_array()->at(0);
  EXPECT_EQ(member(receipt, "proved_inputs").as_int64(), 3);
  EXPECT_EQ(member(receipt, "proved_bytes").as_int64(), 0);
  EXPECT_EQ(text(member(receipt, "outputs").as_array()->at(2), "name"), "packed.2");
  EXPECT_EQ(text(member(receipt, "outputs").as_array()->at(2), "proof"), "inputs");
}

TEST_F(StagedGroups, ArriveWholeFromTheSenderInPython) {
  const std::vector<std::string> python{"/usr/bin/python3", "-B"};
  if (!std::filesystem::exists(python[0]) || run_program({python[0], python[1], "-c", "import zmq, msgpack"}).code != 0) {
    GTEST_SKIP() << "python3-zmq and python3-msgpack are not installed";
  }
  const Outcome sent = run_program({python[0], python[1], std::string(HEADRACE_SOURCE_DIR) + "/examples/python_sender.py", weights(),
                                    "--job", "job", "--bucket-bytes", "65536"});
  EXPECT_EQ(sent.code, 0) << sent.err;
  expect_outputs("python/1");
}

TEST_F(StagedGroups, AreKeptTogetherByTheSdkWhichRefusesAnotherOrderAndGoesOn) {
  SenderOptions options;
  options.job = "job";
  const auto sender = Sender::connect(options).value_or_throw();
  const Checkpoint checkpoint = Checkpoint::open(weights()).value_or_throw();
  UpdateOptions update;
  update.version = {"run", 1};
  const auto tensors = natural_order(checkpoint);
  for (const CheckpointTensor* tensor : tensors) update.entries.push_back({tensor->name, tensor->dtype, tensor->shape, std::nullopt});
  ASSERT_TRUE(sender->open(update).ok());
  const auto add = [&](std::size_t t) {
    return sender->add(tensors[t]->name, {checkpoint.bytes(*tensors[t]).value_or_throw().data(), {}});
  };
  ASSERT_TRUE(add(0).ok());
  const Status refused = add(1);
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
  EXPECT_NE(refused.message().find("a.low.1: it belongs to staged group group 1, and 1 more of group group 0 come first"),
            std::string::npos)
      << refused.message();
  const std::vector<std::uint32_t> order = sender->order();
  ASSERT_EQ(order, (std::vector<std::uint32_t>{0, 3, 1, 4, 2, 5}));
  for (std::size_t i = 1; i < order.size(); ++i) ASSERT_TRUE(add(order[i]).ok());
  const auto report = sender->finish();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_TRUE(report.value().proven);
  expect_outputs("run/1");
}

}  // namespace
}  // namespace headrace::system_test
