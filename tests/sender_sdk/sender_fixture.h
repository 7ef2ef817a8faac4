#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/transport/in_memory_control.h"
#include "kernels/fingerprint.h"
#include "sender_sdk/sender_impl.h"
#include "tests/sender_sdk/fake_receiver.h"

namespace headrace::test {

/// A tensor of random bytes that stays alive for a whole test.
struct TestTensor {
  SenderEntry entry;
  std::vector<std::byte> bytes;  // packed

  TensorView view() const { return {bytes.data(), {}}; }
};

inline TestTensor make_tensor(std::string name, Shape shape, std::uint64_t seed, Dtype dtype = Dtype::kU8) {
  TestTensor tensor{{std::move(name), dtype, shape, std::nullopt}, {}};
  tensor.bytes.resize(static_cast<std::size_t>(*byte_count(dtype, shape)));
  std::mt19937_64 random(seed);
  for (std::byte& byte : tensor.bytes) byte = static_cast<std::byte>(random());
  return tensor;
}

/// Of several shapes and dtypes: one larger than a small bucket, one without elements.
inline std::vector<TestTensor> some_tensors() {
  return {make_tensor("embed", {40, 64}, 1, Dtype::kBF16), make_tensor("norm", {77}, 2), make_tensor("scale", {}, 3, Dtype::kF32),
          make_tensor("big", {50, 4'096}, 4), make_tensor("none", {0, 3}, 5)};
}

/// Fake receivers and senders in one process, over memory.
class SenderTest : public ::testing::Test {
 protected:
  FakeReceiver& start_receiver(FakeScript script = {}, FakeReceiver::Intercept intercept = {}, bool descriptors = true) {
    const std::string name = script.engine + "-" + std::to_string(script.rank);
    auto listener = hub.listen(name, descriptors);
    EXPECT_TRUE(listener.ok()) << listener.status().to_string();
    receivers.push_back(std::make_unique<FakeReceiver>(std::move(listener).value(), std::move(script), std::move(intercept)));
    return *receivers.back();
  }

  /// All receivers of one engine, each wanting every entry as a whole.
  void start_engine(std::uint32_t ranks, FakeScript script = {}) {
    script.ranks = ranks;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      script.rank = rank;
      start_receiver(script);
    }
  }

  SenderEnvironment environment() {
    SenderEnvironment made;
    made.connect = [this](const std::string& endpoint, const ControlOptions&) {
      return hub.connect(endpoint.substr(endpoint.find("//") + 2));
    };
    made.clock = clock;
    made.device = make_host_device();
    return made;
  }

  SenderOptions options(std::string sender = "trainer-0") const {
    SenderOptions made;
    made.job = "job";
    made.sender = std::move(sender);
    for (const auto& receiver : receivers) made.endpoints.push_back(receiver->endpoint());
    made.bucket_bytes = 64 << 10;
    made.connect_timeout_ms = 5'000;
    made.deadline_ms = 30'000;
    return made;
  }

  std::unique_ptr<SenderImpl> connect(const SenderOptions& with) {
    auto sender = SenderImpl::connect(with, environment());
    EXPECT_TRUE(sender.ok()) << sender.status().to_string();
    return sender.ok() ? std::move(sender).value() : nullptr;
  }
  std::unique_ptr<SenderImpl> connect() { return connect(options()); }

  static UpdateOptions update_of(const std::vector<TestTensor>& tensors, std::uint64_t step = 1) {
    UpdateOptions update;
    update.version = {"run", step};
    for (const TestTensor& tensor : tensors) update.entries.push_back(tensor.entry);
    return update;
  }

  static Status add_all(SenderImpl& sender, const std::vector<TestTensor>& tensors) {
    for (const TestTensor& tensor : tensors) HEADRACE_RETURN_IF_ERROR(sender.add(tensor.entry.name, tensor.view()));
    return ok_status();
  }

  static Result<UpdateReport> run_update(SenderImpl& sender, const std::vector<TestTensor>& tensors, std::uint64_t step = 1) {
    HEADRACE_RETURN_IF_ERROR(sender.open(update_of(tensors, step)));
    HEADRACE_RETURN_IF_ERROR(add_all(sender, tensors));
    return sender.finish();
  }

  /// Whether a receiver has every byte of a tensor, each written once.
  static ::testing::AssertionResult has(const FakeReceiver& receiver, const TestTensor& tensor) {
    const Arrived arrived = receiver.arrived(tensor.entry.name);
    if (arrived.bytes != tensor.bytes) return ::testing::AssertionFailure() << tensor.entry.name << " differs";
    for (const std::uint8_t writes : arrived.writes) {
      if (writes != 1) return ::testing::AssertionFailure() << tensor.entry.name << " has a byte written " << int{writes} << " times";
    }
    return ::testing::AssertionSuccess();
  }

  InMemoryHub hub;
  std::shared_ptr<Clock> clock = std::make_shared<SteadyClock>();
  std::vector<std::unique_ptr<FakeReceiver>> receivers;  // outlive the senders of a test
};

}  // namespace headrace::test
