#include "tests/kernels/naive_cast.h"
#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

/// One checkpoint tensor of the cast model as a sender has it.
struct Given {
  std::string name;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  std::vector<std::byte> bytes;

  std::int64_t width() const { return dtype_bytes(dtype); }
  TensorKey key() const { return tensor_key(name, dtype, shape); }
};

/// A model whose storage is BF16 or F32 while checkpoints may come as any of the three types. Rank 0 of 2, as the small model is.
class CastSession : public ReceiverFixture {
 protected:
  CastSession() {
    layout_ = ModelLayout{};
    layout_.family = "cast";
    layout_.variant = "plain";
    layout_.parallel = ParallelLayout{2, 2};
    layout_.experts = {ExpertMap::initial(4, 0, 0, 2).value()};
    storage("norm", Dtype::kF32, {5});
    storage("qk", Dtype::kBF16, {8, 6});
    storage("scale", Dtype::kBF16, {3, 4});
    storage("experts", Dtype::kBF16, {2, 4, 8});
    named("norm.weight", Dtype::kF32, {Dtype::kBF16, Dtype::kF16}, {5}, {0, Box{{0}, {5}}, StridedCopy::flat(0, 0, 20)});
    // Rows of q and k alternate; of both this rank has the columns [0, 6) of 12.
    for (const std::int64_t second : {0, 1}) {
      const CopyDim rows{4, 24, 24};
      named(second == 0 ? "q.weight" : "k.weight", Dtype::kBF16, {Dtype::kF32, Dtype::kF16}, {4, 12},
            {1, Box{{0, 0}, {4, 6}}, StridedCopy::make(0, second * 12, 12, {&rows, 1})});
    }
    // Three copies of four numbers.
    const CopyDim copies{3, 0, 8};
    named("scale", Dtype::kBF16, {Dtype::kF32}, {4}, {2, Box{{0}, {4}}, StridedCopy::make(0, 0, 8, {&copies, 1})});
    // Rows of 4 in slots of rows of 8: the rest is padding.
    const CopyDim rows{4, 8, 16};
    TensorRule rule = rule_of("experts", Dtype::kBF16, {Dtype::kF32}, {4, 4});
    rule.placements.push_back({3, Box{{0, 0}, {4, 4}}, StridedCopy::make(0, 0, 8, {&rows, 1}), 64});
    layout_.expert_rules.push_back({"layers.0.ffn.experts.", "w1.weight", rule});
    const CopyDim pads{8, 0, 16};
    layout_.constants.push_back({3, StridedCopy::make(0, 8, 8, {&pads, 1}), 0xEEEEEEEE});

    given("norm.weight", Dtype::kF16, {5});
    given("q.weight", Dtype::kF32, {4, 12});
    given("k.weight", Dtype::kF16, {4, 12});
    given("scale", Dtype::kF32, {4});
    given("layers.0.ffn.experts.0.w1.weight", Dtype::kF32, {4, 4});
    given("layers.0.ffn.experts.1.w1.weight", Dtype::kF32, {4, 4});
    given("layers.0.ffn.experts.2.w1.weight", Dtype::kF32, {4, 4});
  }

  void storage(std::string name, Dtype dtype, Shape shape) {
    const std::int64_t bytes = *byte_count(dtype, shape);
    layout_.storages.push_back({.name = std::move(name), .dtype = dtype, .shape = std::move(shape), .strides = {}, .bytes = bytes});
  }
  static TensorRule rule_of(std::string param, Dtype kept, std::vector<Dtype> casts, Shape shape) {
    TensorRule rule;
    rule.param = std::move(param);
    rule.dtypes = {kept};
    rule.casts = std::move(casts);
    rule.shape = std::move(shape);
    return rule;
  }
  void named(const std::string& name, Dtype kept, std::vector<Dtype> casts, Shape shape, Placement placement) {
    TensorRule rule = rule_of(name, kept, std::move(casts), std::move(shape));
    rule.placements.push_back(std::move(placement));
    layout_.named.push_back({name, rule});
  }
  void given(std::string name, Dtype dtype, Shape shape) {
    const auto count = static_cast<std::size_t>(*byte_count(dtype, shape));
    tensors_.push_back({std::move(name), dtype, std::move(shape), small_model::bytes(count, static_cast<std::uint32_t>(tensors_.size()))});
  }

  std::vector<wire::ManifestEntry> entries() const {
    std::vector<wire::ManifestEntry> list;
    for (const Given& tensor : tensors_) list.push_back({tensor.name, tensor.dtype, tensor.shape, Box::whole(tensor.shape)});
    return list;
  }
  /// What this rank wants of a tensor: the first six columns of q and k, all of the others, nothing of expert 2.
  static std::int64_t wanted_columns(const Given& tensor) {
    return tensor.name == "q.weight" || tensor.name == "k.weight" ? 6 : tensor.shape.back();
  }
  static std::int64_t rows(const Given& tensor) { return tensor.shape.size() == 2 ? tensor.shape[0] : 1; }
  bool is_here(const Given& tensor) const { return tensor.name != tensors_.back().name; }

  /// All wanted bytes, packed one after the other with `gap` odd bytes between tensors, and their extents; the rows of q stay apart, as in
  /// registered memory.
  void fill_bucket(std::vector<std::byte>& data, std::vector<wire::Extent>& extents) const {
    for (std::uint32_t e = 0; e < tensors_.size(); ++e) {
      const Given& tensor = tensors_[e];
      if (!is_here(tensor)) continue;
      data.push_back(std::byte{0x77});
      wire::Extent extent{e, MemoryId{1}, static_cast<std::int64_t>(data.size()), std::nullopt, {}};
      const bool whole_rows = tensor.name == "q.weight";
      const std::int64_t columns = whole_rows ? tensor.shape.back() : wanted_columns(tensor);
      if (whole_rows) extent.box = Box{{0, 0}, {4, 6}};
      if (whole_rows) extent.strides = {tensor.shape.back() * tensor.width(), tensor.width()};
      for (std::int64_t row = 0; row < rows(tensor); ++row) {
        const std::byte* from = tensor.bytes.data() + row * tensor.shape.back() * tensor.width();
        data.insert(data.end(), from, from + columns * tensor.width());
      }
      extents.push_back(extent);
    }
  }
  /// The sums of END, from the definition: tensor offsets of what is wanted.
  std::vector<wire::EntryFingerprint> sums() const {
    std::vector<wire::EntryFingerprint> list;
    for (std::uint32_t e = 0; e < tensors_.size(); ++e) {
      const Given& tensor = tensors_[e];
      if (!is_here(tensor)) continue;
      wire::EntryFingerprint entry{e, {}};
      for (std::int64_t row = 0; row < rows(tensor); ++row) {
        const auto at = static_cast<std::size_t>(row * tensor.shape.back() * tensor.width());
        const auto count = static_cast<std::size_t>(wanted_columns(tensor) * tensor.width());
        entry.sum += fingerprint(tensor.key(), at, std::span(tensor.bytes).subspan(at, count));
      }
      list.push_back(entry);
    }
    return list;
  }
  void expect_element(const Given& tensor, std::int64_t element, Dtype kept, const std::string& where, std::int64_t place) const {
    std::byte expected[4] = {};
    if (tensor.dtype == kept) {
      std::copy_n(tensor.bytes.data() + element * tensor.width(), tensor.width(), expected);
    } else {
      naive::convert_element(tensor.dtype, kept, tensor.bytes.data() + element * tensor.width(), expected);
    }
    for (std::int64_t b = 0; b < dtype_bytes(kept); ++b) {
      ASSERT_EQ(live(where)[static_cast<std::size_t>(place * dtype_bytes(kept) + b)], expected[b]) << tensor.name << " element " << element;
    }
  }
  /// By loops over elements, written from what the constructor says of the layout.
  void expect_converted() const {
    for (std::int64_t i = 0; i < 5; ++i) expect_element(tensors_[0], i, Dtype::kF32, "norm", i);
    for (std::int64_t row = 0; row < 4; ++row) {
      for (std::int64_t c = 0; c < 6; ++c) {
        expect_element(tensors_[1], row * 12 + c, Dtype::kBF16, "qk", 2 * row * 6 + c);
        expect_element(tensors_[2], row * 12 + c, Dtype::kBF16, "qk", (2 * row + 1) * 6 + c);
      }
    }
    for (std::int64_t copy = 0; copy < 3; ++copy) {
      for (std::int64_t i = 0; i < 4; ++i) expect_element(tensors_[3], i, Dtype::kBF16, "scale", copy * 4 + i);
    }
    for (std::int64_t slot = 0; slot < 2; ++slot) {
      for (std::int64_t row = 0; row < 4; ++row) {
        for (std::int64_t c = 0; c < 4; ++c) {
          expect_element(tensors_[static_cast<std::size_t>(4 + slot)], row * 4 + c, Dtype::kBF16, "experts", (slot * 4 + row) * 8 + c);
        }
        for (std::int64_t b = 8; b < 16; ++b) {
          ASSERT_EQ(live("experts")[static_cast<std::size_t>((slot * 4 + row) * 16 + b)], std::byte{0xEE}) << slot << " " << row;
        }
      }
    }
  }

  void begin(WireSender& sender, std::uint64_t id, const std::string& version) {
    sender.open(id, version);
    sender.expect<wire::Opened>();
    sender.manifest(entries());
    sender.expect<wire::Accept>();
    sender.send(wire::Confirm{});
    sender.expect<wire::Begin>();
  }
  void send_all(WireSender& sender, const std::vector<std::byte>& data, const std::vector<wire::Extent>& extents) {
    sender.send(wire::Bucket{0, extents}, data);
    sender.expect<wire::Consumed>();
  }
  /// A started receiver, and its sender behind the last CONSUMED of an update to run/1.
  WireSender with_all_bytes() {
    start();
    WireSender sender = connect("lead");
    sender.hello();
    begin(sender, 1, "run/1");
    std::vector<std::byte> data;
    std::vector<wire::Extent> extents;
    fill_bucket(data, extents);
    send_all(sender, data, extents);
    return sender;
  }
  wire::Failure failed_end(WireSender& sender) {
    sender.send(wire::End{1, sums()});
    return sender.expect<wire::ErrorReport>().failure;
  }

  std::vector<Given> tensors_;
};

TEST_F(CastSession, ConvertsWhatComesInAnotherTypeAndProvesItTwice) {
  WireSender sender = with_all_bytes();
  sender.send(wire::End{1, sums()});
  const wire::Receipt receipt = sender.expect<wire::Prepared>().receipt;
  EXPECT_TRUE(receipt.proven);
  EXPECT_EQ(receipt.fingerprints, 8U) << "norm, q, k, three copies of scale, two experts";
  EXPECT_EQ(receipt.runs, 1U) << "experts that are converted are joined like all others";
  EXPECT_EQ(receipt.run_experts, 2U);
  EXPECT_EQ(receipt.wire_bytes, 5U * 2 + 24 * 4 + 24 * 2 + 4 * 4 + 2 * 16 * 4);
  EXPECT_EQ(receipt.applied_bytes, 5U * 4 + 24 * 2 + 24 * 2 + 3 * 4 * 2 + 2 * 16 * 2);
  sender.send(wire::Commit{});
  sender.expect<wire::Committed>();
  expect_converted();
}

/// A sender with credits left says END behind its last bucket, whose conversions may still be under way.
TEST_F(CastSession, ProvesConversionsOfABucketThatIsNotDoneWhenItsSenderEnds) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  std::vector<std::byte> data;
  std::vector<wire::Extent> extents;
  fill_bucket(data, extents);
  for (std::uint64_t update = 1; update <= 20; ++update) {
    begin(sender, update, "run/" + std::to_string(update));
    sender.send(wire::Bucket{0, extents}, data);
    sender.send(wire::End{1, sums()});
    sender.expect<wire::Consumed>();
    EXPECT_TRUE(sender.expect<wire::Prepared>().receipt.proven);
    sender.send(wire::Commit{});
    sender.expect<wire::Committed>();
  }
  expect_converted();
}

TEST_F(CastSession, TakesTheTypeOfStorageAsItIs) {
  for (Given& tensor : tensors_) {
    tensor.dtype = tensor.name == "norm.weight" ? Dtype::kF32 : Dtype::kBF16;
    tensor.bytes = small_model::bytes(static_cast<std::size_t>(*byte_count(tensor.dtype, tensor.shape)), 8);
  }
  WireSender sender = with_all_bytes();
  sender.send(wire::End{1, sums()});
  EXPECT_TRUE(sender.expect<wire::Prepared>().receipt.proven);
  expect_converted();
}

TEST_F(CastSession, SeesAByteThatChangedBetweenStagingAndApply) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  begin(sender, 1, "run/1");
  std::vector<std::byte> data;
  std::vector<wire::Extent> extents;
  fill_bucket(data, extents);
  // The lowest bit of the first single of "scale": the conversion may well round it away, what was sent differs all the same.
  data[static_cast<std::size_t>(extents[3].offset)] ^= std::byte{1};
  send_all(sender, data, extents);
  const wire::Failure failure = failed_end(sender);
  EXPECT_EQ(failure.name, "scale");
  EXPECT_NE(failure.message.find("what was read for the conversion differs from what was sent"), std::string::npos) << failure.message;
  EXPECT_EQ(state(), "torn");
}

TEST_F(CastSession, SeesAByteThatChangedInLiveStorage) {
  WireSender sender = with_all_bytes();
  storage_->table().find("qk")->address[13] ^= std::byte{1};  // in the first row of k
  const wire::Failure failure = failed_end(sender);
  EXPECT_EQ(failure.name, "k.weight");
  EXPECT_NE(failure.message.find("differs from that of the conversion"), std::string::npos) << failure.message;
  EXPECT_NE(failure.expected, failure.actual);
  EXPECT_EQ(state(), "torn");
}

TEST_F(CastSession, RefusesATypeThatTheRuleDoesNotConvert) {
  tensors_[3].dtype = Dtype::kF16;  // "scale" takes F32 only
  start();
  WireSender sender = connect("lead");
  sender.hello();
  sender.open(1, "run/1");
  sender.expect<wire::Opened>();
  sender.manifest(entries());
  const wire::Reject reject = sender.expect<wire::Reject>();
  ASSERT_EQ(reject.defects_total, 1U);
  EXPECT_EQ(reject.defects[0].name, "scale");
  EXPECT_EQ(reject.defects[0].actual, "F16");
  EXPECT_EQ(state(), "idle");
}

TEST_F(CastSession, RefusesStridesThatCutElements) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  begin(sender, 1, "run/1");
  const std::vector<std::byte> data(400);
  sender.send(wire::Bucket{0, {{1, MemoryId{1}, 0, Box{{0, 0}, {4, 6}}, {49, 4}}}}, data);
  const wire::Failure failure = sender.expect<wire::ErrorReport>().failure;
  EXPECT_NE(failure.message.find("multiples of its 4 bytes an element"), std::string::npos) << failure.message;
  EXPECT_EQ(state(), "idle") << "nothing was written";
}

TEST_F(CastSession, RefusesALayoutWhoseNestCutsElements) {
  layout_.named[0].rule.placements[0].copy.dst_offset = 1;
  layout_.named[0].rule.placements[0].copy.run_bytes = 19;
  auto storage = HostStorage::allocate(layout_, *device_);
  ASSERT_TRUE(storage.ok());
  const WeightIndex index(layout_);
  EXPECT_FALSE(PlanGeometry::build(index, storage.value().table()).ok());
  layout_ = small_model::layout();
  layout_.named[1].rule.casts = {Dtype::kF32};  // its storage is U8
  auto bytes = HostStorage::allocate(layout_, *device_);
  ASSERT_TRUE(bytes.ok());
  const WeightIndex other(layout_);
  const auto refused = PlanGeometry::build(other, bytes.value().table());
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("no conversion from F32 to U8"), std::string::npos) << refused.status().message();
}

TEST_F(CastSession, ConvertsInThePlainCallToo) {
  start();
  std::vector<NamedView> views;
  for (const Given& tensor : tensors_) views.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes});
  const auto ask = [&](auto question) { return receiver_->ask<Status>(question); };
  ASSERT_TRUE(ask([&](auto answer) { receiver_->control().begin_plain({"run", 1}, answer); }).ok());
  ASSERT_TRUE(ask([&](auto answer) { receiver_->control().load_plain(std::span(views).first(3), answer); }).ok());
  ASSERT_TRUE(ask([&](auto answer) { receiver_->control().load_plain(std::span(views).subspan(3), answer); }).ok());
  const auto receipt = receiver_->ask<Result<wire::Receipt>>([&](auto answer) { receiver_->control().finish_plain(answer); });
  ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
  EXPECT_TRUE(receipt.value().proven);
  expect_converted();
}

TEST_F(CastSession, ShowsToolsWhatStorageHolds) {
  WireSender sender = with_all_bytes();
  sender.send(wire::End{1, sums()});
  sender.expect<wire::Prepared>();
  sender.send(wire::Commit{});
  sender.expect<wire::Committed>();
  WireSender tool = connect("");
  tool.hello();
  tool.send(wire::FingerprintRequest{0, 1});
  const auto reply = tool.expect<wire::FingerprintReply>();
  ASSERT_EQ(reply.tensors.size(), 1U);
  EXPECT_EQ(reply.tensors[0].dtype, Dtype::kF32);
  EXPECT_EQ(reply.tensors[0].sum, fingerprint(tensor_key("norm.weight", Dtype::kF32, Shape{5}), 0, live("norm")));
}

}  // namespace
}  // namespace headrace
