#include <gtest/gtest.h>

#include "sender_sdk/sender.h"
#include "tests/sender_sdk/sender_fixture.h"

namespace headrace::test {
namespace {

using wire::MessageType;

TEST_F(SenderTest, DividesSmallUpdatesAmongBucketsSoThatReceiversWriteMeanwhile) {
  const auto sent = [this](std::size_t tensors, std::int64_t bucket_bytes) {
    receivers.clear();
    start_receiver({}, [](FakeReceiver& fake, const PeerId& peer, const wire::Message& message) {
      const auto* bucket = std::get_if<wire::Bucket>(&message.body);
      if (bucket != nullptr) fake.send(peer, wire::Consumed{bucket->sequence});  // as if it had been written
      return bucket != nullptr;
    });
    SenderOptions with = options();
    with.bucket_bytes = bucket_bytes;
    auto sender = connect(with);
    const TestTensor tensor = make_tensor("t", {1 << 20}, 1);
    UpdateOptions update;
    update.version = {"run", 1};
    for (std::size_t i = 0; i < tensors; ++i) {
      update.entries.push_back(tensor.entry);
      update.entries.back().name += std::to_string(i);
    }
    EXPECT_TRUE(sender->open(update).ok());
    for (const SenderEntry& entry : update.entries) EXPECT_TRUE(sender->add(entry.name, tensor.view()).ok());
    EXPECT_TRUE(sender->finish().ok());
    std::vector<std::size_t> mib;
    for (const wire::Message& message : receivers[0]->all(MessageType::kBucket))
      mib.push_back(std::get<wire::Bucket>(message.body).extents.size());
    return mib;
  };
  using Sizes = std::vector<std::size_t>;
  EXPECT_EQ(sent(64, 0), Sizes(16, 4));
  EXPECT_EQ(sent(96, 0), Sizes(16, 6));
  EXPECT_EQ(sent(1, 0), Sizes{1});
  EXPECT_EQ(sent(9, 0), (Sizes{4, 4, 1})) << "buckets of less cost more than they bring";
  EXPECT_EQ(sent(6, 1 << 20), Sizes(6, 1)) << "no bucket has more than it may";
  EXPECT_EQ(sent(96, 5 << 20).front(), 5U);
}

}  // namespace
}  // namespace headrace::test
