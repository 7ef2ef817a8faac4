#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/device/device.h"
#include "core/transport/in_memory_control.h"
#include "core/wire/codec.h"
#include "core/wire/limits.h"
#include "kernels/fingerprint.h"
#include "receiver/host_storage.h"
#include "receiver/receiver_impl.h"
#include "tests/receiver/small_model.h"

namespace headrace {

/// A sender that speaks the wire word by word, inline bytes only, so that tests can say anything at any time.
class WireSender {
 public:
  explicit WireSender(std::unique_ptr<ControlConnection> connection, std::string name)
      : connection_(std::move(connection)), name_(std::move(name)) {}

  void send(wire::Body body, std::span<const std::byte> attachment = {}) {
    ASSERT_TRUE(connection_->send(wire::encode({session, incarnation, std::move(body)}), attachment).ok());
  }
  void send_raw(std::span<const std::byte> bytes) { ASSERT_TRUE(connection_->send(bytes).ok()); }

  /// The next message; fails the test after five seconds.
  wire::Message receive() {
    for (;;) {
      auto event = connection_->poll(5'000);
      if (!event.ok() || !event.value()) {
        ADD_FAILURE() << name_ << ": no message within five seconds";
        return {};
      }
      if (event.value()->kind != ControlEventKind::kMessage) continue;
      auto message = wire::decode(event.value()->message);
      EXPECT_TRUE(message.ok()) << message.status().to_string();
      return std::move(message).value();
    }
  }
  /// The next message, which must be a T.
  template <class T>
  T expect() {
    wire::Message message = receive();
    if (T* body = std::get_if<T>(&message.body)) {
      last_session = message.session;
      return std::move(*body);
    }
    std::string what(wire::message_name(wire::type_of(message.body)));
    if (const auto* error = std::get_if<wire::ErrorReport>(&message.body)) what += " " + wire::to_status(error->failure).to_string();
    if (const auto* reject = std::get_if<wire::Reject>(&message.body)) what += " " + wire::to_status(reject->defects.front()).to_string();
    ADD_FAILURE() << name_ << ": expected another message, got " << what;
    return T{};
  }

  wire::Welcome hello(const std::string& job = "job") {
    wire::Hello hello;
    hello.protocol_min = hello.protocol_max = limits::kProtocolVersion;
    hello.job = job;
    hello.sender = name_;
    hello.data_paths = {"inline"};
    send(hello);
    auto message = receive();
    incarnation = message.incarnation;
    const auto* welcome = std::get_if<wire::Welcome>(&message.body);
    EXPECT_NE(welcome, nullptr) << wire::message_name(wire::type_of(message.body));
    return welcome != nullptr ? *welcome : wire::Welcome{};
  }
  void open(std::uint64_t id, const std::string& version, std::vector<std::string> senders = {},
            wire::OverlapRule overlap = wire::OverlapRule::kRefuse) {
    session = SessionId{id};
    if (senders.empty()) senders = {name_};
    send(wire::Open{version, {"target"}, std::move(senders), static_cast<std::uint32_t>(overlap)});
  }
  void manifest(std::vector<wire::ManifestEntry> list, std::vector<wire::EntryValue> values = {}) {
    entries = std::move(list);
    const auto bytes = wire::encode_entries(entries);
    send(wire::Manifest{digest_of(bytes), false, bytes, std::move(values)});
  }

  SessionId session;
  SessionId last_session;
  Incarnation incarnation;
  std::vector<wire::ManifestEntry> entries;

 private:
  std::unique_ptr<ControlConnection> connection_;
  std::string name_;
};

/// A receiver of the small model over an in-memory channel and a clock that stands still.
class ReceiverFixture : public testing::Test {
 protected:
  void start(ReceiverOptions options = {}, EngineHooks hooks = {}) {
    options.job = "job";
    options.ranks = 2;
    if (options.deadline_ms == 0) options.deadline_ms = 10'000;
    if (options.bucket_bytes_max == 0) options.bucket_bytes_max = limits::kBucketBytesDefault;
    auto storage = HostStorage::allocate(layout_, *device_);
    ASSERT_TRUE(storage.ok()) << storage.status().to_string();
    storage_ = std::make_unique<HostStorage>(std::move(storage).value());
    start_on_storage(std::move(options), std::move(hooks));
  }
  void start_on_storage(ReceiverOptions options, EngineHooks hooks) {
    ReceiverParts parts;
    auto listener = hub_.listen("rank");
    ASSERT_TRUE(listener.ok()) << listener.status().to_string();
    parts.listener = std::move(listener).value();
    guard_path_ = std::filesystem::temp_directory_path() / ("headrace-guard-" + std::to_string(random_u64()));
    parts.guard_path = guard_path_;
    parts.clock = &clock_;
    auto impl = Receiver::Impl::create(std::move(options), layout_, storage_->table(), *device_, std::move(hooks), std::move(parts));
    ASSERT_TRUE(impl.ok()) << impl.status().to_string();
    receiver_ = std::move(impl).value();
  }
  void TearDown() override {
    receiver_.reset();
    std::filesystem::remove(guard_path_);
  }

  WireSender connect(const std::string& name) {
    auto connection = hub_.connect("rank");
    EXPECT_TRUE(connection.ok()) << connection.status().to_string();
    return WireSender(std::move(connection).value(), name);
  }
  std::span<const std::byte> live(const std::string& name) const {
    const Storage* storage = storage_->table().find(name);
    return {storage->address, static_cast<std::size_t>(storage->bytes)};
  }
  wire::StatusReply status() {
    return receiver_->ask<wire::StatusReply>([this](auto answer) { answer(receiver_->status_on_loop()); });
  }
  /// Asks until the state is the one that an event on the way leads to.
  bool becomes(const std::string& expected) {
    int tries = 0;
    while (state() != expected && ++tries < 1000) {
    }
    return state() == expected;
  }
  std::string state() { return std::string(wire::session_state_name(static_cast<SessionState>(status().state))); }
  GuardView guard() { return GuardPage::read(guard_path_).value(); }

  /// All that rank 0 needs, and an expert of the other rank.
  static std::vector<wire::ManifestEntry> full_manifest() {
    const auto whole = [](std::string name, Dtype dtype, Shape shape) {
      return wire::ManifestEntry{std::move(name), dtype, shape, Box::whole(shape)};
    };
    return {whole("a.weight", Dtype::kBF16, {6, 8}), whole("rows.weight", Dtype::kU8, {6, 4}),
            whole("layers.0.ffn.experts.0.w1.weight", Dtype::kI8, {4, 4}), whole("layers.0.ffn.experts.1.w1.weight", Dtype::kI8, {4, 4}),
            whole("layers.0.ffn.experts.2.w1.weight", Dtype::kI8, {4, 4})};
  }
  /// The bytes of the whole tensors of full_manifest() that rank 0 wants: 96 + 12 + 16 + 16, one after the other.
  static std::vector<std::byte> payload(std::uint32_t seed) { return small_model::bytes(140, seed); }
  static std::vector<wire::Extent> payload_extents() {
    return {{0, MemoryId{1}, 0, std::nullopt, {}},
            {1, MemoryId{1}, 96, std::nullopt, {}},
            {2, MemoryId{1}, 108, std::nullopt, {}},
            {3, MemoryId{1}, 124, std::nullopt, {}}};
  }
  static std::vector<wire::EntryFingerprint> payload_sums(const std::vector<std::byte>& data) {
    const auto list = full_manifest();
    const std::size_t offsets[] = {0, 96, 108, 124, 140};
    std::vector<wire::EntryFingerprint> sums;
    for (std::uint32_t e = 0; e < 4; ++e) {
      const auto key = tensor_key(list[e].name, list[e].dtype, list[e].shape);
      sums.push_back({e, fingerprint(key, 0, std::span(data).subspan(offsets[e], offsets[e + 1] - offsets[e]))});
    }
    return sums;
  }
  /// What live storage must hold, by loops written from the layout's description.
  void expect_live(std::uint32_t seed) {
    const auto data = payload(seed);
    for (std::size_t i = 0; i < 96; ++i) ASSERT_EQ(live("plain")[i], data[i]) << i;
    for (std::size_t i = 0; i < 12; ++i) ASSERT_EQ(live("rows")[i], data[96 + i]) << i;
    for (std::size_t slot = 0; slot < 2; ++slot) {
      for (std::size_t row = 0; row < 4; ++row) {
        for (std::size_t c = 0; c < 8; ++c) {
          const std::byte expected = c < 4 ? data[108 + slot * 16 + row * 4 + c] : std::byte{0xEE};
          ASSERT_EQ(live("experts")[slot * 32 + row * 8 + c], expected) << slot << " " << row << " " << c;
        }
      }
    }
  }

  /// Up to BEGIN.
  void open_update(WireSender& sender, std::uint64_t id, const std::string& version) {
    sender.open(id, version);
    sender.expect<wire::Opened>();
    sender.manifest(full_manifest());
    sender.expect<wire::Accept>();
    sender.send(wire::Confirm{});
    sender.expect<wire::Begin>();
  }
  /// Up to PREPARED.
  wire::Receipt prepare_update(WireSender& sender, std::uint64_t id, const std::string& version, std::uint32_t seed) {
    open_update(sender, id, version);
    const auto data = payload(seed);
    sender.send(wire::Bucket{0, payload_extents()}, data);
    sender.expect<wire::Consumed>();
    sender.send(wire::End{1, payload_sums(data)});
    return sender.expect<wire::Prepared>().receipt;
  }
  wire::Receipt update(WireSender& sender, std::uint64_t id, const std::string& version, std::uint32_t seed) {
    prepare_update(sender, id, version, seed);
    sender.send(wire::Commit{});
    return sender.expect<wire::Committed>().receipt;
  }

  ModelLayout layout_ = small_model::layout();  // a test may change it before start()
  InMemoryHub hub_;
  std::unique_ptr<Device> device_ = make_host_device();
  ManualClock clock_;
  std::unique_ptr<HostStorage> storage_;
  std::filesystem::path guard_path_;
  std::unique_ptr<Receiver::Impl> receiver_;
};

}  // namespace headrace
