#include "core/wire/codec.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>

#include "core/wire/limits.h"

namespace headrace::wire {
namespace {

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

Message message_of(Body body) {
  return Message{SessionId{77}, Incarnation{99}, std::move(body)};
}

TEST(Codec, WritesTheDocumentedBytesOfAPing) {
  const auto bytes = encode(message_of(Ping{5}));
  EXPECT_EQ(bytes, bytes_of({0x96, 0xa2, 'H', 'R', 1, 18, 77, 99, 0x81, 0xa8, 'p', 'r', 'o', 'g', 'r', 'e', 's', 's', 5}));
}

TEST(Codec, BringsBackEveryFieldOfABucket) {
  Bucket bucket;
  bucket.sequence = 3;
  bucket.extents.push_back(Extent{1, MemoryId{9}, 64, std::nullopt, {}});
  bucket.extents.push_back(Extent{2, MemoryId{9}, 128, Box{{0, 4}, {8, 12}}, {}});
  bucket.extents.push_back(Extent{3, MemoryId{1ULL << 63}, 0, Box{{0}, {8}}, {16}});
  const auto decoded = decode(encode(message_of(bucket)));
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  EXPECT_EQ(decoded.value().session.value, 77U);
  EXPECT_EQ(decoded.value().incarnation.value, 99U);
  const auto& got = std::get<Bucket>(decoded.value().body);
  ASSERT_EQ(got.extents.size(), 3U);
  EXPECT_EQ(got.sequence, 3U);
  EXPECT_FALSE(got.extents[0].box.has_value());
  EXPECT_EQ(got.extents[1].box, (Box{{0, 4}, {8, 12}}));
  EXPECT_EQ(got.extents[2].strides, std::vector<std::int64_t>{16});
  EXPECT_EQ(got.extents[2].memory.value, 1ULL << 63);
}

TEST(Codec, BringsBackWantedBoxesAndReceipts) {
  Accept accept;
  accept.wanted.resize(3);
  accept.wanted[1] = Wanted{false, {8, 128}, {Box{{0, 0}, {8, 128}}}};
  const auto decoded = decode(encode(message_of(accept)));
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  const auto& got = std::get<Accept>(decoded.value().body);
  ASSERT_EQ(got.wanted.size(), 3U);
  EXPECT_TRUE(got.wanted[0].boxes.empty());
  EXPECT_EQ(got.wanted[1].granule, (std::vector<std::int64_t>{8, 128}));
  Prepared prepared;
  prepared.receipt.version = {"run", 7};
  prepared.receipt.phases.transfer = 1.5;
  prepared.receipt.proven = true;
  const auto receipt = decode(encode(message_of(prepared)));
  ASSERT_TRUE(receipt.ok()) << receipt.status().to_string();
  EXPECT_EQ(std::get<Prepared>(receipt.value().body).receipt.version.step, 7U);
  EXPECT_EQ(std::get<Prepared>(receipt.value().body).receipt.phases.transfer, 1.5);
  EXPECT_TRUE(std::get<Prepared>(receipt.value().body).receipt.proven);
}

TEST(Codec, BringsBackManifestEntriesAsTheSameBytes) {
  const std::vector<ManifestEntry> entries{
      {"a.weight", Dtype::kBF16, {4, 6}, Box{{0, 0}, {4, 6}}}, {"b", Dtype::kF32, {}, Box{}}, {"c", Dtype::kI8, {10}, Box{{2}, {5}}}};
  const auto bytes = encode_entries(entries);
  const auto decoded = decode_entries(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  EXPECT_EQ(decoded.value(), entries);
  EXPECT_EQ(encode_entries(decoded.value()), bytes);
}

TEST(Codec, BringsBackValuesThatAreAskedForAndTold) {
  Welcome welcome;
  welcome.values = {{"layers.0.ffn.experts.", "w2.input_scale", 384}, {"", "scale", 1}};
  const auto asked = decode(encode(message_of(welcome)));
  ASSERT_TRUE(asked.ok()) << asked.status().to_string();
  EXPECT_EQ(std::get<Welcome>(asked.value().body).values, welcome.values);
  const Manifest manifest{Digest{}, true, {}, {{7, bytes_of({0, 0, 0x80, 0x3f})}, {0, {}}}};
  const auto told = decode(encode(message_of(manifest)));
  ASSERT_TRUE(told.ok()) << told.status().to_string();
  EXPECT_EQ(std::get<Manifest>(told.value().body).values, manifest.values);
}

TEST(Codec, RefusesValuesAndRulesBeyondTheirLimits) {
  const auto refusal = [](Body body) {
    const auto decoded = decode(encode(message_of(std::move(body))));
    return decoded.ok() ? "accepted" : decoded.status().message();
  };
  Manifest manifest;
  manifest.values = {{0, std::vector<std::byte>(limits::kValueBytesMax)}};
  EXPECT_EQ(refusal(manifest), "accepted");
  manifest.values.push_back({1, std::vector<std::byte>(limits::kValueBytesMax + 1)});
  EXPECT_NE(refusal(manifest).find("MANIFEST: values: item 1: 17 bytes, the limit is 16"), std::string::npos) << refusal(manifest);
  manifest.values.assign(limits::kValuesMax + 1, {});
  EXPECT_NE(refusal(manifest).find("the limit is 1048576"), std::string::npos) << refusal(manifest);
  Welcome welcome;
  welcome.values.assign(limits::kValueRulesMax + 1, {});
  EXPECT_NE(refusal(welcome).find("WELCOME: values: 4097 items, the limit is 4096"), std::string::npos) << refusal(welcome);
  welcome.values = {{std::string(limits::kNameBytesMax + 1, 'x'), "", 1}};
  EXPECT_NE(refusal(welcome).find("prefix: text of 4097 bytes"), std::string::npos) << refusal(welcome);
}

TEST(Codec, NamesTheFieldThatIsMissing) {
  // PING without its only field.
  const auto decoded = decode(bytes_of({0x96, 0xa2, 'H', 'R', 1, 18, 0, 0, 0x80}));
  ASSERT_FALSE(decoded.ok());
  EXPECT_EQ(decoded.status().code(), Code::kInvalidArgument);
  EXPECT_NE(decoded.status().message().find("PING: progress: missing"), std::string::npos) << decoded.status().message();
}

TEST(Codec, IgnoresFieldsThatItDoesNotKnow) {
  const auto decoded =
      decode(bytes_of({0x96, 0xa2, 'H', 'R', 1, 18, 0, 0, 0x82, 0xa1, 'x', 0xc0, 0xa8, 'p', 'r', 'o', 'g', 'r', 'e', 's', 's', 4}));
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  EXPECT_EQ(std::get<Ping>(decoded.value().body).progress, 4U);
}

TEST(Codec, RefusesAnotherProtocolVersionByItsNumber) {
  const auto decoded = decode(bytes_of({0x96, 0xa2, 'H', 'R', 2, 18, 0, 0, 0x81, 0xa8, 'p', 'r', 'o', 'g', 'r', 'e', 's', 's', 4}));
  ASSERT_FALSE(decoded.ok());
  EXPECT_EQ(decoded.status().code(), Code::kUnsupported);
}

TEST(Codec, RefusesLengthsBeyondTheBytesThatArrived) {
  // An array that claims 2^32 - 1 items; nested, so that each level would reserve room.
  std::vector<std::byte> bytes;
  for (int i = 0; i < 8; ++i) {
    for (const int value : {0xdd, 0xff, 0xff, 0xff, 0xff}) bytes.push_back(static_cast<std::byte>(value));
  }
  EXPECT_EQ(decode(bytes).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(decode_entries(bytes).status().code(), Code::kInvalidArgument);
}

TEST(Codec, RefusesAListLongerThanAnyMessageHasBeforeItTakesRoomForIt) {
  const std::uint32_t items = limits::kManifestEntriesMax + 1;
  std::vector<std::byte> bytes{std::byte{0xdd}};
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<std::byte>(items >> shift));
  bytes.resize(bytes.size() + items, std::byte{0xc0});
  const Status status = decode_entries(bytes).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("limits"), std::string::npos) << status.message();
}

TEST(Codec, ShortensAFailureThatAReaderWouldRefuseForItsLength) {
  // 256 names of senders, or five names of tensors, make longer texts than a reader takes.
  const std::string euros = [] {
    std::string text = "x";
    while (text.size() < 2 * limits::kTextBytesMax) text += "\u20ac";
    return text;
  }();
  Failure failure = make_failure(Status(Code::kDeadlineExceeded, euros), "manifest");
  failure.name = euros;
  failure.expected = euros;
  failure.actual = "short";
  const auto decoded = decode(encode({SessionId{1}, Incarnation{2}, ErrorReport{failure, 0}}));
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  const Failure& told = std::get<ErrorReport>(decoded.value().body).failure;
  for (const std::string* text : {&told.message, &told.name, &told.expected}) {
    const std::size_t most = text == &told.name ? limits::kNameBytesMax : limits::kTextBytesMax;
    EXPECT_LE(text->size(), most);
    EXPECT_GT(text->size(), most - 3);
    EXPECT_EQ(text->size() % 3, 1U) << "cut inside a character";
    EXPECT_EQ(*text, euros.substr(0, text->size()));
  }
  EXPECT_EQ(told.actual, "short");
  EXPECT_EQ(told.code, static_cast<std::uint32_t>(Code::kDeadlineExceeded));
}

TEST(Codec, RefusesManifestEntriesThatDoNotFit) {
  const std::vector<std::pair<ManifestEntry, std::string>> cases{
      {{"x", Dtype::kBF16, {4}, Box{{2}, {5}}}, "does not lie in shape"},
      {{"x", Dtype::kBF16, {INT64_MAX, 2}, Box{{0, 0}, {1, 1}}}, "no whole number of bytes"},
      {{"x", Dtype::kBF16, {-1}, Box{{0}, {0}}}, "no whole number of bytes"},
      {{"x", Dtype::kF4, {3}, Box{{0}, {1}}}, "no whole number of bytes"},
      {{std::string(limits::kNameBytesMax + 1, 'n'), Dtype::kU8, {1}, Box{{0}, {1}}}, "the limit is"},
      {{"x", Dtype::kU8, Shape(limits::kDimsMax + 1, 1), Box{}}, "the limit is"},
  };
  for (const auto& [entry, reason] : cases) {
    const auto decoded = decode_entries(encode_entries(std::vector{entry}));
    ASSERT_FALSE(decoded.ok()) << reason;
    EXPECT_NE(decoded.status().message().find(reason), std::string::npos) << decoded.status().message();
  }
}

TEST(Codec, SaysWhichManifestEntryIsOfTheWrongKind) {
  const std::vector<std::pair<std::vector<int>, std::string>> cases{
      {{0xa1, 'x'}, "expected an array, got text"},
      {{0x91, 0x05}, "entry 0: expected an array, got a number"},
      {{0x92, 0x93, 0xa1, 'x', 1, 0x90, 0x92, 0xa1, 'y'}, "entry 1: an entry is [name, dtype, shape]"},
      {{0x91, 0x93, 0x01, 1, 0x90}, "entry 0: expected text, got a number"},
      {{0x91, 0x93, 0x90}, "entry 0: expected text, got an array"},
      {{0x91, 0x93, 0xa1, 'x', 0xa1, '1', 0x90}, "entry 0: expected a non-negative number, got text"},
      {{0x91, 0x93, 0xa1, 'x', 0xff, 0x90}, "entry 0: expected a non-negative number, got a negative number"},
      {{0x91, 0x93, 0xa1, 'x', 0xcc, 0xfe, 0x90}, "entry 0: unknown dtype number 254"},
      {{0x91, 0x93, 0xa1, 'x', 1, 0xc0}, "entry 0: expected an array, got nil"},
      {{0x91, 0x93, 0xa1, 'x', 1, 0x91, 0xc3}, "entry 0: expected a number, got a boolean"},
      {{0x91, 0x93, 0xa1, 'x', 1, 0x91, 0x91, 1}, "entry 0: expected a number, got an array"},
      {{0x91, 0x93, 0xa1, 'x', 1, 0x91, 0xcf, 0x80, 0, 0, 0, 0, 0, 0, 0}, "entry 0: number 9223372036854775808 is beyond"},
      {{0x91, 0x95, 0xa1, 'x', 1, 0x91, 4, 0x91, 0, 0x92, 1, 1}, "entry 0: a box with 1 and 2 coordinates"},
      {{0x91, 0x93, 0xa1, 'x', 1, 0x80}, "entry 0: expected an array, got a map"},
      {{0x91, 0x93, 0xa1, 'x', 1}, "cut short"},
      {{0x90, 0x90}, "1 bytes after the end"},
      {{0xc1}, "not msgpack"},
  };
  for (const auto& [values, reason] : cases) {
    std::vector<std::byte> bytes;
    for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
    const Status status = decode_entries(bytes).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << reason;
    EXPECT_NE(status.message().find(reason), std::string::npos) << status.message() << " instead of " << reason;
  }
}

TEST(Codec, SurvivesAThousandSeededMutationsOfEveryMessage) {
  std::mt19937 random(20261129);
  std::vector<Body> bodies{Hello{},  Welcome{}, Open{},     Manifest{},    Accept{},      Reject{},
                           Bucket{}, End{},     Prepared{}, ErrorReport{}, StatusReply{}, FingerprintReply{}};
  std::get<Welcome>(bodies[1]).values = {{"a.", "b", 3}, {"c.", "d", 4}};
  std::get<Manifest>(bodies[3]).values = {{0, bytes_of({1, 2})}, {1, bytes_of({3})}};
  std::get<Accept>(bodies[4]).wanted.resize(4);
  std::get<Bucket>(bodies[6]).extents.resize(4);
  std::get<End>(bodies[7]).fingerprints.resize(4);
  std::size_t refused = 0;
  for (const Body& body : bodies) {
    const auto original = encode(message_of(body));
    for (int i = 0; i < 1000; ++i) {
      auto bytes = original;
      const auto flips = 1 + random() % 3;
      for (std::size_t f = 0; f < flips; ++f) bytes[random() % bytes.size()] ^= static_cast<std::byte>(1U << (random() % 8));
      if (random() % 4 == 0) bytes.resize(random() % bytes.size());
      const auto decoded = decode(bytes);
      if (!decoded.ok()) {
        ++refused;
        EXPECT_FALSE(decoded.status().message().empty());
      }
    }
  }
  EXPECT_GT(refused, 6000U);
}

TEST(Failure, KeepsItsPartsWhereItBecomesAStatus) {
  Failure failure;
  failure.code = static_cast<std::uint32_t>(Code::kCorruption);
  failure.message = "bytes differ";
  failure.engine = "engine-0";
  failure.rank = 3;
  failure.sender = "trainer-0";
  failure.phase = "prepare";
  failure.bucket = 17;
  failure.name = "w1";
  failure.expected = "aa";
  failure.actual = "bb";
  const Status status = to_status(failure);
  ASSERT_NE(status.detail(), nullptr);
  Status copy = ok_status();
  copy = status;
  EXPECT_EQ(copy.code(), Code::kCorruption);
  EXPECT_EQ(copy.detail()->engine, "engine-0");
  EXPECT_EQ(copy.detail()->rank, 3);
  EXPECT_EQ(copy.detail()->sender, "trainer-0");
  EXPECT_EQ(copy.detail()->phase, "prepare");
  EXPECT_EQ(copy.detail()->bucket, 17);
  EXPECT_EQ(copy.detail()->name, "w1");
  EXPECT_EQ(copy.detail()->expected, "aa");
  EXPECT_EQ(copy.detail()->actual, "bb");
  for (const char* part : {"engine-0 rank 3", "trainer-0", "prepare", "bucket 17", "w1", "expected aa", "got bb"})
    EXPECT_NE(copy.message().find(part), std::string::npos) << part;
  EXPECT_EQ(Status(Code::kCancelled, "text").detail(), nullptr);
}

TEST(Codec, GivesEveryMessageANameAndDistinctKeys) {
  std::set<std::string_view> names;
  for (const auto& [type, keys] : all_message_keys()) {
    EXPECT_TRUE(names.insert(message_name(type)).second);
    EXPECT_EQ(std::set<std::string>(keys.begin(), keys.end()).size(), keys.size()) << message_name(type);
  }
  EXPECT_EQ(names.size(), std::variant_size_v<Body>);
}

}  // namespace
}  // namespace headrace::wire
