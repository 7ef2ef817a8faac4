#include "sender_sdk/sender.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <numeric>

#include "core/transport/control.h"
#include "tests/sender_sdk/sender_fixture.h"

namespace headrace::test {
namespace {

using wire::MessageType;

std::uint64_t bytes_of(const std::vector<TestTensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const TestTensor& tensor) { return sum + tensor.bytes.size(); });
}

TEST_F(SenderTest, BringsEveryByteToOneReceiverAndCommits) {
  start_engine(1);
  auto sender = connect();
  const auto tensors = some_tensors();
  const auto report = run_update(*sender, tensors);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  for (const TestTensor& tensor : tensors) EXPECT_TRUE(has(*receivers[0], tensor));
  EXPECT_EQ(report.value().wire_bytes, bytes_of(tensors));
  EXPECT_EQ(report.value().data_path, "shm");
  EXPECT_EQ(report.value().version, (WeightVersion{"run", 1}));
  EXPECT_GE(report.value().buckets, 4U) << "200 KB in buckets of 64";
  EXPECT_TRUE(report.value().proven);
  EXPECT_EQ(report.value().receipts.size(), 1U);
  EXPECT_EQ(receivers[0]->attachment_bytes(), 0U);
  EXPECT_EQ(receivers[0]->unreadable_extents(), 0U);
  EXPECT_LE(receivers[0]->unanswered_max(), 2U);
}

TEST_F(SenderTest, SendsTheFingerprintOfExactlyWhatEachReceiverWants) {
  FakeScript script;
  script.ranks = 2;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    script.rank = rank;
    // Rows below 24 for the first, from 16 on for the second: the middle is shared.
    script.wants = [rank](const wire::ManifestEntry&) {
      return wire::Wanted{false, {8, 1}, {rank == 0 ? Box{{0, 0}, {24, 10}} : Box{{16, 0}, {40, 10}}}};
    };
    start_receiver(script);
  }
  auto sender = connect();
  const auto tensor = make_tensor("w", {40, 10}, 9);
  const auto report = run_update(*sender, {tensor});
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().wire_bytes, 400U) << "the shared rows are packed once";
  EXPECT_EQ(report.value().applied_bytes, 20U) << "as the receipts say";
  const TensorKey key = tensor_key("w", Dtype::kU8, tensor.entry.shape);
  for (std::size_t r = 0; r < 2; ++r) {
    const std::size_t first = r == 0 ? 0 : 160;
    const auto arrived = receivers[r]->arrived("w");
    for (std::size_t i = 0; i < 400; ++i) {
      const bool wanted = i >= first && i < first + 240;
      EXPECT_EQ(arrived.writes[i], wanted ? 1 : 0);
      if (wanted) {
        EXPECT_EQ(arrived.bytes[i], tensor.bytes[i]);
      }
    }
    const auto end = std::get<wire::End>(receivers[r]->last(MessageType::kEnd)->body);
    ASSERT_EQ(end.fingerprints.size(), 1U);
    EXPECT_EQ(end.fingerprints[0].sum, fingerprint(key, first, std::span(tensor.bytes).subspan(first, 240)));
    EXPECT_EQ(end.buckets, receivers[r]->count(MessageType::kBucket));
  }
}

TEST_F(SenderTest, ServesThreeReceiversWithDifferentShares) {
  FakeScript script;
  script.ranks = 3;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    script.rank = rank;
    script.wants = [rank](const wire::ManifestEntry& entry) {
      wire::Wanted wanted{false, std::vector<std::int64_t>(entry.shape.size(), 1), {}};
      const bool expert = entry.name.starts_with("experts.");
      if (!expert || entry.name == "experts." + std::to_string(rank)) wanted.boxes = {entry.box};
      return wanted;
    };
    start_receiver(script);
  }
  auto sender = connect();
  std::vector<TestTensor> tensors{make_tensor("dense", {30, 1'000}, 1)};
  for (int e = 0; e < 3; ++e)
    tensors.push_back(make_tensor("experts." + std::to_string(e), {50, 1'000}, 10 + static_cast<std::uint64_t>(e)));
  const auto report = run_update(*sender, tensors);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().wire_bytes, 180'000U);
  EXPECT_EQ(report.value().receipts.size(), 3U);
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_TRUE(has(*receivers[r], tensors[0]));
    EXPECT_TRUE(has(*receivers[r], tensors[1 + r]));
    const auto other = receivers[r]->arrived("experts." + std::to_string((r + 1) % 3));
    EXPECT_EQ(std::accumulate(other.writes.begin(), other.writes.end(), 0), 0);
    EXPECT_EQ(std::get<wire::End>(receivers[r]->last(MessageType::kEnd)->body).fingerprints.size(), 2U);
  }
}

TEST_F(SenderTest, TellsAReceiverThatWantsNothingOfTheEnd) {
  FakeScript script;
  script.ranks = 2;
  start_receiver(script);
  script.rank = 1;
  script.wants = [](const wire::ManifestEntry& entry) { return wire::Wanted{false, std::vector<std::int64_t>(entry.shape.size(), 1), {}}; };
  start_receiver(script);
  auto sender = connect();
  const auto report = run_update(*sender, {make_tensor("w", {100}, 1)});
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  const auto end = std::get<wire::End>(receivers[1]->last(MessageType::kEnd)->body);
  EXPECT_EQ(end.buckets, 0U);
  EXPECT_TRUE(end.fingerprints.empty());
  EXPECT_EQ(receivers[1]->count(MessageType::kBucket), 0U);
}

TEST_F(SenderTest, CarriesBytesInlineToEachReceiverOnlyWhatItWants) {
  FakeScript script;
  script.ranks = 2;
  script.data_paths = {"inline"};
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    script.rank = rank;
    script.wants = [rank](const wire::ManifestEntry& entry) {
      const std::int64_t half = entry.shape[0] / 2;
      return wire::Wanted{false, {1}, {rank == 0 ? Box{{0}, {half}} : Box{{half}, {2 * half}}}};
    };
    start_receiver(script);
  }
  auto sender = connect();
  const std::vector<TestTensor> tensors{make_tensor("a", {1'280}, 1), make_tensor("b", {12'800}, 2)};
  const auto report = run_update(*sender, tensors);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().data_path, "inline");
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(receivers[r]->attachment_bytes(), 640U + 6'400U);
    EXPECT_EQ(receivers[r]->unreadable_extents(), 0U);
    for (const TestTensor& tensor : tensors) {
      const auto half = static_cast<std::ptrdiff_t>(tensor.bytes.size() / 2);
      const auto arrived = receivers[r]->arrived(tensor.entry.name);
      EXPECT_TRUE(std::equal(arrived.bytes.begin() + (r == 0 ? 0 : half), arrived.bytes.begin() + (r == 0 ? half : 2 * half),
                             tensor.bytes.begin() + (r == 0 ? 0 : half)));
    }
  }
}

TEST_F(SenderTest, SaysWhyNoDataPathIsLeft) {
  FakeScript script;
  script.data_paths = {"inline"};
  start_receiver(script);
  SenderOptions with = options();
  with.data_path = "shm";
  const auto sender = SenderImpl::connect(with, environment());
  ASSERT_FALSE(sender.ok());
  EXPECT_EQ(sender.status().code(), Code::kUnsupported);
  EXPECT_NE(sender.status().message().find("engine-0 rank 0: offers inline, not shm"), std::string::npos) << sender.status().message();
}

TEST_F(SenderTest, FallsBackToInlineWithoutADescriptorSocket) {
  start_receiver({}, {}, false);
  auto sender = connect();
  const auto report = run_update(*sender, some_tensors());
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().data_path, "inline");
  for (const TestTensor& tensor : some_tensors()) EXPECT_TRUE(has(*receivers[0], tensor));
}

TEST_F(SenderTest, PacksViewsWithStrides) {
  start_engine(1);
  auto sender = connect();
  const auto memory = make_tensor("memory", {64, 96}, 1, Dtype::kBF16);
  auto transposed = make_tensor("transposed", {96, 64}, 2, Dtype::kBF16);
  auto column = make_tensor("column", {64, 5}, 3, Dtype::kBF16);
  for (std::size_t i = 0; i < 96 * 64; ++i) {
    for (std::size_t b = 0; b < 2; ++b) transposed.bytes[i * 2 + b] = memory.bytes[((i % 64) * 96 + i / 64) * 2 + b];
  }
  for (std::size_t i = 0; i < 64 * 5; ++i) {
    for (std::size_t b = 0; b < 2; ++b) column.bytes[i * 2 + b] = memory.bytes[((i / 5) * 96 + 7 + i % 5) * 2 + b];
  }
  ASSERT_TRUE(sender->open(update_of({transposed, column})).ok());
  ASSERT_TRUE(sender->add("transposed", {memory.bytes.data(), {2, 192}}).ok());
  ASSERT_TRUE(sender->add("column", {memory.bytes.data() + 14, {192, 2}}).ok());
  ASSERT_TRUE(sender->finish().ok());
  EXPECT_TRUE(has(*receivers[0], transposed));
  EXPECT_TRUE(has(*receivers[0], column));
}

TEST_F(SenderTest, BringsOnlyItsBoxOfATensor) {
  start_engine(1);
  auto sender = connect();
  auto half = make_tensor("w", {10, 8}, 1);
  half.entry.box = Box{{4, 0}, {10, 8}};
  ASSERT_TRUE(sender->open(update_of({half})).ok());
  ASSERT_TRUE(sender->add("w", {half.bytes.data() + 32, {8, 1}}).ok());
  ASSERT_TRUE(sender->finish().ok());
  const auto arrived = receivers[0]->arrived("w");
  for (std::size_t i = 0; i < 80; ++i) {
    EXPECT_EQ(arrived.writes[i], i >= 32 ? 1 : 0);
    if (i >= 32) {
      EXPECT_EQ(arrived.bytes[i], half.bytes[i]);
    }
  }
}

TEST_F(SenderTest, TwoSendersShareOneSession) {
  start_engine(2);
  auto lead = connect(options("trainer-0"));
  auto second = connect(options("trainer-1"));
  const std::vector<TestTensor> first_half{make_tensor("a", {100'000}, 1)};
  const std::vector<TestTensor> second_half{make_tensor("b", {70'000}, 2)};
  for (std::uint64_t step = 1; step <= 3; ++step) {
    Result<UpdateReport> second_report = Status(Code::kInternal, "not run");
    std::thread other([&] {
      auto update = update_of(second_half, step);
      update.senders = {"trainer-0", "trainer-1"};
      Status status = second->open(update);
      if (status.ok()) status = add_all(*second, second_half);
      second_report = status.ok() ? second->finish() : Result<UpdateReport>(status);
    });
    auto update = update_of(first_half, step);
    update.senders = {"trainer-0", "trainer-1"};
    const Status opened = lead->open(update);
    const Status added = opened.ok() ? add_all(*lead, first_half) : opened;
    const auto report = added.ok() ? lead->finish() : Result<UpdateReport>(added);
    other.join();
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    ASSERT_TRUE(second_report.ok()) << second_report.status().to_string();
    EXPECT_EQ(report.value().session, second_report.value().session);
    EXPECT_EQ(second_report.value().wire_bytes, 70'000U);
    for (const auto& receiver : receivers) {
      EXPECT_TRUE(has(*receiver, first_half[0]));
      EXPECT_TRUE(has(*receiver, second_half[0]));
      EXPECT_EQ(receiver->count(MessageType::kOpen), step);
      EXPECT_EQ(receiver->count(MessageType::kCommit), step) << "the lead alone commits";
    }
  }
}

TEST_F(SenderTest, SendsAKnownManifestByItsDigestTheSecondTime) {
  start_engine(2);
  auto sender = connect();
  auto tensors = some_tensors();
  ASSERT_TRUE(run_update(*sender, tensors, 1).ok());
  tensors[0] = make_tensor("embed", {40, 64}, 99, Dtype::kBF16);
  ASSERT_TRUE(run_update(*sender, tensors, 2).ok());
  for (const auto& receiver : receivers) {
    const auto manifests = receiver->all(MessageType::kManifest);
    ASSERT_EQ(manifests.size(), 2U);
    EXPECT_FALSE(std::get<wire::Manifest>(manifests[0].body).known);
    EXPECT_TRUE(std::get<wire::Manifest>(manifests[1].body).known);
    EXPECT_TRUE(std::get<wire::Manifest>(manifests[1].body).entries.empty());
    EXPECT_TRUE(has(*receiver, tensors[0])) << "bytes of the second update";
  }
  tensors.push_back(make_tensor("new", {10}, 7));
  ASSERT_TRUE(run_update(*sender, tensors, 3).ok());
  EXPECT_FALSE(std::get<wire::Manifest>(receivers[0]->last(MessageType::kManifest)->body).known);
}

TEST_F(SenderTest, AnnouncesStagingOnceForAllUpdates) {
  start_engine(1);
  auto sender = connect();
  ASSERT_TRUE(run_update(*sender, some_tensors(), 1).ok());
  const std::uint64_t attached = receivers[0]->attached_bytes();
  EXPECT_EQ(attached, 2U * (64U << 10));
  ASSERT_TRUE(run_update(*sender, some_tensors(), 2).ok());
  EXPECT_EQ(receivers[0]->attached_bytes(), attached);
}

TEST_F(SenderTest, FillsNoMoreBuffersThanItHasUntilAllReceiversConsumed) {
  start_engine(2);
  for (const auto& receiver : receivers) receiver->hold_consumed(true);
  auto sender = connect();
  const auto tensor = make_tensor("w", {5, 60'000}, 1);
  ASSERT_TRUE(sender->open(update_of({tensor})).ok());
  Status added;
  std::thread adding([&] { added = sender->add("w", tensor.view()); });
  const auto both_sent = [](const FakeReceiver& fake) { return fake.count(MessageType::kBucket) == 2; };
  ASSERT_TRUE(receivers[0]->await(both_sent));
  ASSERT_TRUE(receivers[1]->await(both_sent));
  // One receiver alone does not free them.
  receivers[0]->post([](FakeReceiver& fake) { fake.consume_held(); });
  ASSERT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kPing) > 2; }));
  EXPECT_EQ(receivers[0]->count(MessageType::kBucket), 2U);
  for (const auto& receiver : receivers) {
    receiver->hold_consumed(false);
    receiver->post([](FakeReceiver& fake) { fake.consume_held(); });
  }
  adding.join();
  ASSERT_TRUE(added.ok()) << added.to_string();
  ASSERT_TRUE(sender->finish().ok());
  // The held buckets were read only when they were consumed: had a buffer been filled again, these bytes would be wrong.
  for (const auto& receiver : receivers) {
    EXPECT_TRUE(has(*receiver, tensor));
    EXPECT_LE(receiver->unanswered_max(), 2U);
  }
}

/// A receiver that keeps BEGIN to itself until it is told otherwise.
FakeReceiver::Intercept without_begin() {
  return [](FakeReceiver&, const PeerId&, const wire::Message& message) { return std::holds_alternative<wire::Confirm>(message.body); };
}

TEST_F(SenderTest, AloneSendsOneBucketBehindItsConfirmAndNoneMoreBeforeBegin) {
  start_receiver({}, without_begin());
  receivers[0]->hold_consumed(true);
  SenderOptions with = options();
  with.staging_buffers = 4;
  auto sender = connect(with);
  const auto tensor = make_tensor("w", {2, 60'000}, 1);
  ASSERT_TRUE(sender->open(update_of({tensor})).ok());
  ASSERT_TRUE(sender->add("w", tensor.view()).ok());
  Result<UpdateReport> report = Status(Code::kInternal, "not run");
  std::thread finishing([&] { report = sender->finish(); });
  EXPECT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kPing) >= 2; }));
  EXPECT_EQ(receivers[0]->count(MessageType::kBucket), 1U) << "not answered with BEGIN for two pings";
  receivers[0]->post([](FakeReceiver& fake) { fake.send(fake.peers().front(), wire::Begin{2}); });
  EXPECT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kEnd) == 1; }));
  receivers[0]->post([](FakeReceiver& fake) { fake.consume_held(); });
  finishing.join();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(receivers[0]->count(MessageType::kBucket), 2U);
  EXPECT_TRUE(has(*receivers[0], tensor));
}

TEST_F(SenderTest, AloneNeedsNoBeginForAnUpdateOfOneBucket) {
  start_receiver({}, without_begin());
  auto sender = connect();
  const auto tensor = make_tensor("w", {77}, 1);
  const auto report = run_update(*sender, {tensor});
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_TRUE(has(*receivers[0], tensor));
}

TEST_F(SenderTest, OffersItsManifestBehindOpenAsLead) {
  std::optional<PeerId> lead;
  start_receiver({}, [&](FakeReceiver& fake, const PeerId& peer, const wire::Message& message) {
    if (!std::holds_alternative<wire::Open>(message.body) || lead) return false;
    lead = peer;  // not opened: only what does not wait for OPENED can still come
    return fake.count(MessageType::kOpen) == 1;
  });
  auto sender = connect();
  const auto tensor = make_tensor("w", {77}, 1);
  Status opened;
  std::thread opening([&] { opened = sender->open(update_of({tensor})); });
  EXPECT_TRUE(receivers[0]->await([](const FakeReceiver& fake) { return fake.count(MessageType::kManifest) == 1; }));
  receivers[0]->post([&](FakeReceiver& fake) {
    fake.send_in(fake.last(MessageType::kOpen)->session, *lead,
                 wire::ErrorReport{fake.failure(Code::kFailedPrecondition, "two requests are running"), 0});
  });
  opening.join();
  EXPECT_EQ(opened.code(), Code::kFailedPrecondition);
  ASSERT_TRUE(run_update(*sender, {tensor}, 2).ok());
}

TEST_F(SenderTest, KeepsToASingleCredit) {
  FakeScript script;
  script.credits = 1;
  start_receiver(script);
  receivers[0]->hold_consumed(true);
  SenderOptions with = options();
  with.staging_buffers = 4;
  auto sender = connect(with);
  const auto tensor = make_tensor("w", {4, 60'000}, 1);
  ASSERT_TRUE(sender->open(update_of({tensor})).ok());
  ASSERT_TRUE(sender->add("w", tensor.view()).ok()) << "four buffers hold all of it";
  Result<UpdateReport> report = Status(Code::kInternal, "not run");
  std::thread finishing([&] { report = sender->finish(); });
  for (std::size_t sent = 1; sent <= 4; ++sent) {
    ASSERT_TRUE(receivers[0]->await([&](const FakeReceiver& fake) { return fake.count(MessageType::kBucket) == sent; }));
    receivers[0]->post([](FakeReceiver& fake) { fake.consume_held(); });
  }
  finishing.join();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(receivers[0]->unanswered_max(), 1U);
  EXPECT_TRUE(has(*receivers[0], tensor));
}

TEST_F(SenderTest, LetsReceiversReadRegisteredMemoryInPlace) {
  start_engine(2);
  auto sender = connect();
  const auto memory = sender->allocate(100'000);
  ASSERT_TRUE(memory.ok()) << memory.status().to_string();
  const auto packed = make_tensor("packed", {90, 500}, 1);
  const auto pitched = make_tensor("pitched", {20, 100}, 2);
  std::copy(packed.bytes.begin(), packed.bytes.end(), memory.value().begin() + 64);
  for (std::size_t row = 0; row < 20; ++row) {
    std::copy_n(pitched.bytes.begin() + static_cast<std::ptrdiff_t>(row) * 100, 100,
                memory.value().begin() + 50'000 + static_cast<std::ptrdiff_t>(row) * 128);
  }
  ASSERT_TRUE(sender->open(update_of({packed, pitched})).ok());
  ASSERT_TRUE(sender->add("packed", {memory.value().data() + 64, {}}).ok());
  ASSERT_TRUE(sender->add("pitched", {memory.value().data() + 50'000, {128, 1}}).ok());
  const auto report = sender->finish();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().registered_bytes, 47'000U);
  EXPECT_EQ(report.value().wire_bytes, 47'000U);
  for (const auto& receiver : receivers) {
    EXPECT_TRUE(has(*receiver, packed));
    EXPECT_TRUE(has(*receiver, pitched));
    EXPECT_EQ(receiver->attached_bytes(), 100'000U) << "no staging buffer was needed";
    const auto end = std::get<wire::End>(receiver->last(MessageType::kEnd)->body);
    ASSERT_EQ(end.fingerprints.size(), 2U);
    EXPECT_EQ(end.fingerprints[1].sum, fingerprint(tensor_key("pitched", Dtype::kU8, Shape{20, 100}), 0, pitched.bytes));
  }
  EXPECT_TRUE(sender->release(memory.value()).ok());
  EXPECT_EQ(sender->release(memory.value()).code(), Code::kInvalidArgument);
}

TEST_F(SenderTest, PacksWhatCannotBeReadInPlaceOutOfRegisteredMemory) {
  start_engine(1);
  auto sender = connect();
  const auto memory = sender->allocate(10'000);
  ASSERT_TRUE(memory.ok());
  auto transposed = make_tensor("t", {50, 40}, 1);
  for (std::size_t i = 0; i < 2'000; ++i) memory.value()[(i % 40) * 50 + i / 40] = transposed.bytes[i];
  ASSERT_TRUE(sender->open(update_of({transposed})).ok());
  ASSERT_TRUE(sender->add("t", {memory.value().data(), {1, 50}}).ok());
  const auto report = sender->finish();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().registered_bytes, 0U);
  EXPECT_TRUE(has(*receivers[0], transposed));
}

TEST_F(SenderTest, AdoptsAMemfdOfTheCaller) {
  start_engine(1);
  auto sender = connect();
  UniqueFd descriptor(::memfd_create("caller", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(descriptor.valid());
  const auto tensor = make_tensor("w", {8'192}, 1);
  ASSERT_EQ(::write(descriptor.get(), tensor.bytes.data(), tensor.bytes.size()), 8'192);
  const auto memory = sender->adopt(std::move(descriptor), 8'192);
  ASSERT_TRUE(memory.ok()) << memory.status().to_string();
  ASSERT_TRUE(sender->open(update_of({tensor})).ok());
  ASSERT_TRUE(sender->add("w", {memory.value().data(), {}}).ok());
  const auto report = sender->finish();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().registered_bytes, 8'192U);
  EXPECT_TRUE(has(*receivers[0], tensor));
}

TEST_F(SenderTest, ReleasesEveryAsynchronousTensorOnce) {
  start_engine(1);
  auto sender = connect();
  const auto memory = sender->allocate(4'096);
  ASSERT_TRUE(memory.ok());
  std::vector<TestTensor> tensors;
  for (std::uint64_t i = 0; i < 40; ++i) tensors.push_back(make_tensor("w" + std::to_string(i), {9'000}, i));
  tensors.push_back(make_tensor("in place", {4'096}, 99));
  std::copy(tensors.back().bytes.begin(), tensors.back().bytes.end(), memory.value().begin());
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  std::vector<std::atomic<int>> released(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorView view = i + 1 == tensors.size() ? TensorView{memory.value().data(), {}} : tensors[i].view();
    const Status status = sender->add_async(tensors[i].entry.name, view, [&released, i](const Status& outcome) {
      if (outcome.ok()) ++released[i];
    });
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  ASSERT_TRUE(sender->finish().ok());
  sender.reset();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(released[i].load(), 1) << tensors[i].entry.name;
    EXPECT_TRUE(has(*receivers[0], tensors[i]));
  }
}

TEST_F(SenderTest, RefusesMistakesWithoutEndingTheUpdate) {
  start_engine(1);
  auto sender = connect();
  const auto tensors = some_tensors();
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  const auto expect_refused = [](const Status& status, std::string_view text) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  expect_refused(sender->add("embedd", tensors[0].view()), "embedd");
  expect_refused(sender->add("embed", {nullptr, {}}), "embed");
  expect_refused(sender->add("embed", {tensors[0].bytes.data(), {2}}), "1 strides");
  expect_refused(sender->add("embed", {tensors[0].bytes.data(), {-128, 2}}), "negative");
  ASSERT_TRUE(sender->add("embed", tensors[0].view()).ok());
  expect_refused(sender->add("embed", tensors[0].view()), "embed has been added already");
  expect_refused(sender->finish().status(), "4 of 5 entries were not added: norm, scale, big, none");
  for (std::size_t i = 1; i < tensors.size(); ++i) ASSERT_TRUE(sender->add(tensors[i].entry.name, tensors[i].view()).ok());
  EXPECT_TRUE(sender->finish().ok());
  EXPECT_EQ(sender->finish().status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(sender->add("embed", tensors[0].view()).code(), Code::kFailedPrecondition);
}

TEST_F(SenderTest, ListsAtMostTenMissingEntries) {
  start_engine(1);
  auto sender = connect();
  std::vector<TestTensor> tensors;
  for (std::uint64_t i = 0; i < 12; ++i) tensors.push_back(make_tensor("w" + std::to_string(i), {4}, i));
  ASSERT_TRUE(sender->open(update_of(tensors)).ok());
  const std::string text = sender->finish().status().message();
  EXPECT_NE(text.find("12 of 12"), std::string::npos);
  EXPECT_NE(text.find("w9, ..."), std::string::npos) << text;
  EXPECT_EQ(text.find("w10"), std::string::npos);
}

TEST_F(SenderTest, RefusesEntriesThatCannotBeSent) {
  start_engine(1);
  auto sender = connect();
  const auto refused = [&](SenderEntry entry, std::string_view text) {
    UpdateOptions update;
    update.version = {"run", 1};
    update.entries = {std::move(entry)};
    const Status status = sender->open(update);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  refused({"", Dtype::kU8, {4}, {}}, "no name");
  refused({"w", Dtype::kF4, {4}, {}}, "less than a byte");
  refused({"w", Dtype::kU8, {4, -1}, {}}, "counted");
  refused({"w", Dtype::kU8, {4}, Box{{2}, {5}}}, "box [2:5]");
  UpdateOptions update = update_of({make_tensor("w", {4}, 1), make_tensor("w", {4}, 2)});
  EXPECT_NE(sender->open(update).message().find("twice"), std::string::npos);
  update = update_of({make_tensor("w", {4}, 1)});
  update.senders = {"trainer-7"};
  EXPECT_EQ(sender->open(update).code(), Code::kInvalidArgument);
  update.senders.clear();
  update.version.run = "a b";
  EXPECT_EQ(sender->open(update).code(), Code::kInvalidArgument);
  EXPECT_EQ(receivers[0]->count(MessageType::kOpen), 0U);
}

TEST(SenderOverSockets, LeavesNoDescriptorBehind) {
  const auto count_descriptors = [] {
    const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
    return std::distance(std::filesystem::begin(entries), std::filesystem::end(entries));
  };
  const auto once = [&] {
    char folder[] = "/tmp/headrace-sender-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    {
      auto listener = listen_zmq("ipc://" + std::string(folder) + "/r.ipc", std::string(folder) + "/r.fds");
      ASSERT_TRUE(listener.ok()) << listener.status().to_string();
      FakeReceiver receiver(std::move(listener).value(), {});
      SenderOptions options;
      options.job = "job";
      options.endpoints = {receiver.endpoint()};
      options.bucket_bytes = 64 << 10;
      auto sender = Sender::connect(options);
      ASSERT_TRUE(sender.ok()) << sender.status().to_string();
      const auto tensor = make_tensor("w", {200'000}, 1);
      UpdateOptions update;
      update.version = {"run", 1};
      update.entries = {tensor.entry};
      ASSERT_TRUE(sender.value()->open(update).ok());
      ASSERT_TRUE(sender.value()->add("w", tensor.view()).ok());
      const auto report = sender.value()->finish();
      ASSERT_TRUE(report.ok()) << report.status().to_string();
      EXPECT_EQ(report.value().data_path, "shm");
      EXPECT_EQ(receiver.arrived("w").bytes, tensor.bytes);
    }
    std::filesystem::remove_all(folder);
  };
  once();
  const auto before = count_descriptors();
  once();
  EXPECT_EQ(count_descriptors(), before);
}

}  // namespace
}  // namespace headrace::test
