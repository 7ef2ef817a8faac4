#include "core/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/core/checkpoint/temp_folder.h"

namespace headrace {
namespace {

using testing::safetensors_text;
using testing::TempFolder;
using std::string_literals::operator""s;

struct Case {
  const char* what;
  std::string json;
  std::size_t data_bytes;
};

Result<ParsedHeader> parse(const Case& c, ParseMode mode) {
  return parse_header(std::as_bytes(std::span(c.json)), static_cast<std::int64_t>(8 + c.json.size() + c.data_bytes), mode);
}

const std::string kPlain = R"("a":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]})";

/// An extra field whose value is `levels` arrays in each other; the header and the tensor are two levels more.
std::string nested(int levels) {
  return R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":)" + std::string(static_cast<std::size_t>(levels), '[') +
         std::string(static_cast<std::size_t>(levels), ']') + "}}";
}

std::vector<Case> accepted_by_both() {
  return {
      {"plain", "{" + kPlain + "}", 16},
      {"metadata null", R"({"__metadata__":null,)" + kPlain + "}", 16},
      {"metadata only", R"({"__metadata__":{"k":"v"}})", 0},
      {"metadata in the middle", "{" + kPlain + R"(,"__metadata__":{"k":"v"},"b":{"dtype":"U8","shape":[1],"data_offsets":[16,17]}})", 17},
      {"no tensors", "{}", 0},
      {"scalar", R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4},
      {"zero-size", R"({"a":{"dtype":"F32","shape":[2,0],"data_offsets":[0,0]}})", 0},
      {"zero-size before", R"({"z":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)" + kPlain + "}", 16},
      {"zero-size after", "{" + kPlain + R"(,"z":{"dtype":"U8","shape":[0],"data_offsets":[16,16]}})", 16},
      {"two zero-size at one offset",
       R"({"y":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"z":{"dtype":"F64","shape":[0,3],"data_offsets":[0,0]}})", 0},
      {"out of offset order",
       R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 3},
      {"trailing whitespace", "{" + kPlain + "} \t\r\n ", 16},
      {"unicode name", R"({"żółć.层":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"escaped name", R"({"\u0061\/b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"surrogate pair", R"({"\ud83d\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"empty name", R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"F4 even", R"({"a":{"dtype":"F4","shape":[2048],"data_offsets":[0,1024]}})", 1024},
      {"F6 in fours", R"({"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})", 3},
      {"C64", R"({"a":{"dtype":"C64","shape":[2],"data_offsets":[0,16]}})", 16},
      {"FNUZ", R"({"a":{"dtype":"F8_E4M3FNUZ","shape":[2],"data_offsets":[0,2]}})", 2},
      {"E8M0", R"({"a":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[0,2]}})", 2},
      {"misaligned data",
       R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},"c":{"dtype":"F64","shape":[1],"data_offsets":[5,13]}})",
       13},
  };
}

std::vector<Case> accepted_by_reference_only() {
  return {
      {"tensor twice, equal", "{" + kPlain + "," + kPlain + "}", 16},
      {"tensor twice, last one valid", R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},)" + kPlain + "}", 16},
      {"metadata key twice", R"({"__metadata__":{"k":"v","k":"w"},)" + kPlain + "}", 16},
      {"extra field", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":[1,-2.5e3,{"y":null,"z":[true,false,""]}]}})", 1},
      {"extra field 127 levels down", nested(125), 1},
      {"tensor as array", R"({"a":["I32",[2,2],[0,16]]})", 16},
      {"dtype as the only key of an object", R"({"a":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}})", 1},
      {"zero before an enormous dimension", R"({"a":{"dtype":"U8","shape":[0,18446744073709551615,2],"data_offsets":[0,0]}})", 0},
      {"leading whitespace", " \n\t\r{" + kPlain + "}", 16},
      {"NUL in a name", R"({"\u0000":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
  };
}

std::string u8(const char* shape, const char* offsets) {
  return R"({"a":{"dtype":"U8","shape":)"s + shape + R"(,"data_offsets":)" + offsets + "}}";
}

std::vector<Case> rejected_json() {
  return {
      {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0},
      {"dtype twice", R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"metadata with a number", R"({"__metadata__":{"k":1}})", 0},
      {"metadata with an object", R"({"__metadata__":{"k":{}}})", 0},
      {"metadata an array", R"({"__metadata__":[]})", 0},
      {"metadata like a tensor", R"({"__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"no dtype", R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1},
      {"no shape", R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1},
      {"no offsets", R"({"a":{"dtype":"U8","shape":[1]}})", 1},
      {"one offset", u8("[1]", "[0]"), 1},
      {"three offsets", u8("[1]", "[0,1,1]"), 1},
      {"float offset", u8("[1]", "[0.0,1]"), 1},
      {"exponent", u8("[16]", "[0,1.6e1]"), 16},
      {"minus zero", u8("[1]", "[-0,1]"), 1},
      {"leading zero", u8("[1]", "[00,1]"), 1},
      {"string offset", u8("[1]", R"(["0",1])"), 1},
      {"negative offset", u8("[1]", "[-1,0]"), 1},
      {"offset over u64", u8("[1]", "[0,18446744073709551616]"), 1},
      {"shape null", u8("null", "[0,1]"), 1},
      {"negative dimension", u8("[-1]", "[0,1]"), 1},
      {"boolean dimension", u8("[true]", "[0,1]"), 1},
      {"array of four parts", R"({"a":["I32",[2,2],[0,16],0]})", 16},
      {"array of two parts", R"({"a":["I32",[2,2]]})", 16},
      {"tensor a number", R"({"a":5})", 0},
      {"NUL padding", "{" + kPlain + "}\0\0"s, 16},
      {"byte order mark", "\xEF\xBB\xBF{" + kPlain + "}", 16},
      {"comment", "{" + kPlain + "/* x */}", 16},
      {"trailing comma", "{" + kPlain + ",}", 16},
      {"NaN in an extra field", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":NaN}})", 1},
      {"bad word in an extra field", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":nulx}})", 1},
      {"two documents", "{" + kPlain + "}{}", 16},
      {"array at the top", "[]", 0},
      {"empty header", "", 0},
      {"eight zero bytes", std::string(8, '\0'), 0},
      {"extra field 128 levels down", nested(126), 1},
      {"extra field 202 levels down", nested(200), 1},
      {"lone high surrogate", R"({"\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"lone low surrogate", R"({"\udc00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"lone surrogate in metadata", R"({"__metadata__":{"k":"\udfff"}})", 0},
      {"raw control character in a name", "{\"a\x01\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1},
      {"raw surrogate bytes", "{\"\xED\xA0\x80\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1},
      {"lower-case dtype", R"({"a":{"dtype":"i32","shape":[1],"data_offsets":[0,4]}})", 4},
      {"F128", R"({"a":{"dtype":"F128","shape":[1],"data_offsets":[0,16]}})", 16},
      {"C128", R"({"a":{"dtype":"C128","shape":[1],"data_offsets":[0,16]}})", 16},
      {"dtype an object of two keys", R"({"a":{"dtype":{"U8":null,"I8":null},"shape":[1],"data_offsets":[0,1]}})", 1},
      {"dtype an object without null", R"({"a":{"dtype":{"U8":1},"shape":[1],"data_offsets":[0,1]}})", 1},
      {"dtype an empty object", R"({"a":{"dtype":{},"shape":[1],"data_offsets":[0,1]}})", 1},
      {"not closed", "{" + kPlain, 16},
  };
}

std::vector<Case> rejected_layout() {
  return {
      {"tensor twice, last one wrong", "{" + kPlain + R"(,"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})", 16},
      {"equal after unescaping",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2},
      {"size over u64", u8("[18446744073709551615,2]", "[0,18446744073709551615]"), 16},
      {"bits over u64", u8("[18446744073709551615]", "[0,18446744073709551615]"), 16},
      {"overflow before the zero", u8("[18446744073709551615,2,0]", "[0,0]"), 0},
      {"zero-size inside another", "{" + kPlain + R"(,"z":{"dtype":"U8","shape":[0],"data_offsets":[8,8]}})", 16},
      {"hole", "{" + kPlain + R"(,"b":{"dtype":"U8","shape":[1],"data_offsets":[17,18]}})", 18},
      {"hole at the start", u8("[1]", "[1,2]"), 2},
      {"overlap", "{" + kPlain + R"(,"b":{"dtype":"U8","shape":[8],"data_offsets":[12,20]}})", 20},
      {"alias", "{" + kPlain + R"(,"b":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}})", 16},
      {"begin after end", u8("[1]", "[1,0]"), 1},
      {"one byte too many", "{" + kPlain + "}", 17},
      {"one byte too few", "{" + kPlain + "}", 15},
      {"odd F4", R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2},
      {"three F6", R"({"a":{"dtype":"F6_E3M2","shape":[3],"data_offsets":[0,3]}})", 3},
      {"shape says less than the offsets", R"({"a":{"dtype":"I32","shape":[3],"data_offsets":[0,16]}})", 16},
  };
}

TEST(SafetensorsHeader, TakesInBothModesWhatTheFormatAllows) {
  for (const Case& c : accepted_by_both()) {
    for (const ParseMode mode : {ParseMode::kReference, ParseMode::kStrict}) {
      const auto header = parse(c, mode);
      EXPECT_TRUE(header.ok()) << c.what << ": " << header.status().message();
    }
  }
}

TEST(SafetensorsHeader, TakesInReferenceModeOnlyWhatTheReferenceLetsPass) {
  for (const Case& c : accepted_by_reference_only()) {
    const auto header = parse(c, ParseMode::kReference);
    EXPECT_TRUE(header.ok()) << c.what << ": " << header.status().message();
    EXPECT_FALSE(parse(c, ParseMode::kStrict).ok()) << c.what;
  }
}

TEST(SafetensorsHeader, RefusesInBothModesWhatTheReferenceRefuses) {
  for (const auto& cases : {rejected_json(), rejected_layout()}) {
    for (const Case& c : cases) {
      for (const ParseMode mode : {ParseMode::kReference, ParseMode::kStrict}) {
        const auto header = parse(c, mode);
        EXPECT_FALSE(header.ok()) << c.what;
        EXPECT_EQ(header.status().code(), Code::kInvalidArgument) << c.what;
      }
    }
  }
}

TEST(SafetensorsHeader, GivesOffsetsOfTheFileInOffsetOrder) {
  const Case c{"", R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})", 3};
  const auto header = parse(c, ParseMode::kStrict);
  ASSERT_TRUE(header.ok());
  const std::vector<TensorInfo>& tensors = header.value().tensors;
  ASSERT_EQ(tensors.size(), 2u);
  const auto data = static_cast<std::int64_t>(8 + c.json.size());
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].dtype, Dtype::kBool);
  EXPECT_EQ(tensors[1].name, "b");
  EXPECT_EQ(tensors[1].shape, (Shape{2}));
  EXPECT_EQ(tensors[1].begin, data + 1);
  EXPECT_EQ(tensors[1].end, data + 3);
}

TEST(SafetensorsHeader, KeepsTheLastOfEqualKeysInReferenceMode) {
  const Case c{"", R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},)" + kPlain + "}", 16};
  const auto header = parse(c, ParseMode::kReference);
  ASSERT_TRUE(header.ok());
  ASSERT_EQ(header.value().tensors.size(), 1u);
  EXPECT_EQ(header.value().tensors[0].dtype, Dtype::kI32);
  EXPECT_EQ(header.value().tensors[0].bytes(), 16);
}

TEST(SafetensorsHeader, UnescapesNamesAndMetadata) {
  const Case c{"", R"({"__metadata__":{"k\n":"\u00e9"},"\u0061\/\ud83d\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1};
  const auto header = parse(c, ParseMode::kStrict);
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(header.value().tensors[0].name, "a/😀");
  ASSERT_EQ(header.value().metadata.size(), 1u);
  EXPECT_EQ(header.value().metadata[0].first, "k\n");
  EXPECT_EQ(header.value().metadata[0].second, "é");
}

TEST(SafetensorsHeader, ReportsAllDefectsAtOnce) {
  const Case c{"",
               R"({"one":{"dtype":"I32","shape":[3],"data_offsets":[0,16]},"two":{"dtype":"U8","shape":[1],"data_offsets":[16,17],"x":1},)"
               R"("three":{"dtype":"F4","shape":[3],"data_offsets":[17,19]}})",
               19};
  const Status status = parse(c, ParseMode::kStrict).status();
  for (const char* expected :
       {"\"one\": data_offsets hold 16 bytes, I32 [3] needs 12", "\"two\": unknown field \"x\"", "\"three\": F4 [3] has 12 bits"}) {
    EXPECT_NE(status.message().find(expected), std::string::npos) << status.message();
  }
}

TEST(SafetensorsHeader, RefusesNamesOverTheLimit) {
  const Case c{"", "{\"" + std::string(kSafetensorsNameBytesMax + 1, 'n') + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1};
  EXPECT_FALSE(parse(c, ParseMode::kStrict).ok());
  EXPECT_FALSE(parse(c, ParseMode::kReference).ok());
}

TEST(SafetensorsHeader, CutsLongNamesInMessagesBetweenCharacters) {
  std::string name = "x";
  for (int i = 0; i < 300; ++i) name += "ż";
  const Case c{"", "{\"" + name + R"(":{"dtype":"none","shape":[1],"data_offsets":[0,1]}})", 1};
  const std::string message = parse(c, ParseMode::kStrict).status().message();
  EXPECT_NE(message.find("ż…\": dtype \"none\" is unknown"), std::string::npos) << message;
}

TEST(SafetensorsFile, OpensAndFindsTensors) {
  const TempFolder folder;
  const auto path = folder.write("m.safetensors", safetensors_text("{" + kPlain + "}", 16));
  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_NE(file.value().find("a"), nullptr);
  EXPECT_EQ(file.value().find("b"), nullptr);
  EXPECT_EQ(file.value().find("a")->end, file.value().file_bytes());
}

TEST(SafetensorsFile, StaysUsableAfterAMove) {
  const TempFolder folder;
  auto opened = SafetensorsFile::open(folder.write("m.safetensors", safetensors_text("{" + kPlain + "}", 16)));
  ASSERT_TRUE(opened.ok());
  const SafetensorsFile file = std::move(opened).value();
  ASSERT_NE(file.find("a"), nullptr);
  EXPECT_TRUE(file.check_size().ok());
}

TEST(SafetensorsFile, RefusesHeadersThatLieAboutTheirLength) {
  const TempFolder folder;
  const std::string good = safetensors_text("{" + kPlain + "}", 16);
  const auto with_length = [&](std::uint64_t length) {
    std::string text = good;
    for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(length >> (8 * i));
    return folder.write("lie.safetensors", text);
  };
  const std::uint64_t right = good.size() - 8 - 16;
  ASSERT_TRUE(SafetensorsFile::open(with_length(right)).ok());
  for (const std::uint64_t length : {~std::uint64_t{0}, std::uint64_t{100'000'001}, std::uint64_t{100'000'000}, good.size() - 7, right + 1,
                                     right - 1, std::uint64_t{0}}) {
    for (const ParseMode mode : {ParseMode::kReference, ParseMode::kStrict}) {
      EXPECT_FALSE(SafetensorsFile::open(with_length(length), mode).ok()) << length;
    }
  }
}

TEST(SafetensorsFile, RefusesFilesWithoutALengthWord) {
  const TempFolder folder;
  EXPECT_FALSE(SafetensorsFile::open(folder.write("empty.safetensors", "")).ok());
  EXPECT_FALSE(SafetensorsFile::open(folder.write("short.safetensors", "1234567")).ok());
  EXPECT_FALSE(SafetensorsFile::open(folder.path()).ok());
  const Status missing = SafetensorsFile::open(folder.path() / "missing.safetensors").status();
  EXPECT_EQ(missing.native(), ENOENT);
}

TEST(SafetensorsFile, NamesFileTensorAndSizesOfATruncatedFile) {
  const TempFolder folder;
  std::string text = safetensors_text("{" + kPlain + "}", 16);
  const std::string size = std::to_string(text.size() - 3);
  text.resize(text.size() - 3);
  const Status status = SafetensorsFile::open(folder.write("cut.safetensors", text)).status();
  for (const std::string& expected : {"cut.safetensors"s, "\"a\""s, "+16"s, size}) {
    EXPECT_NE(status.message().find(expected), std::string::npos) << status.message();
  }
}

TEST(SafetensorsFile, NoticesThatItWasCutAfterOpen) {
  const TempFolder folder;
  const auto path = folder.write("m.safetensors", safetensors_text("{" + kPlain + "}", 16));
  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.ok());
  std::filesystem::resize_file(path, 20);
  EXPECT_EQ(file.value().check_size().code(), Code::kFailedPrecondition);
}

TEST(SafetensorsWriter, WritesWidestTypesFirstThenByNameAndPadsToEight) {
  const auto header = write_safetensors_header(
      {{"b", Dtype::kU8, {3}}, {"c", Dtype::kF32, {2}}, {"a", Dtype::kU8, {1}}, {"d\"\n", Dtype::kI64, {}}}, {{"format", "pt"}});
  ASSERT_TRUE(header.ok());
  std::string text(reinterpret_cast<const char*>(header.value().bytes.data()), header.value().bytes.size());
  EXPECT_EQ(text.size() % 8, 0u);
  EXPECT_EQ(static_cast<unsigned char>(text[0]) + 256 * static_cast<unsigned char>(text[1]), static_cast<int>(text.size() - 8));
  const std::string json = R"({"__metadata__":{"format":"pt"},"d\"\u000a":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                           R"("c":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},"a":{"dtype":"U8","shape":[1],"data_offsets":[16,17]},)"
                           R"("b":{"dtype":"U8","shape":[3],"data_offsets":[17,20]}})";
  EXPECT_EQ(text.substr(8, json.size()), json);
  EXPECT_EQ(text.find_first_not_of(' ', 8 + json.size()), std::string::npos);
  EXPECT_EQ(header.value().file_bytes, static_cast<std::int64_t>(text.size()) + 20);
}

TEST(SafetensorsWriter, IsReadBackInReferenceModeAsItWasWritten) {
  const auto header = write_safetensors_header({{"z", Dtype::kF32, {0}}, {"ü", Dtype::kBF16, {3, 5}}, {"\x01", Dtype::kF8E8M0, {7}}});
  ASSERT_TRUE(header.ok());
  const auto& written = header.value();
  const auto read = parse_header(std::span(written.bytes).subspan(8), written.file_bytes, ParseMode::kReference);
  ASSERT_TRUE(read.ok()) << read.status().message();
  ASSERT_EQ(read.value().tensors.size(), written.tensors.size());
  for (std::size_t i = 0; i < written.tensors.size(); ++i) {
    EXPECT_EQ(read.value().tensors[i].name, written.tensors[i].name);
    EXPECT_EQ(read.value().tensors[i].shape, written.tensors[i].shape);
    EXPECT_EQ(read.value().tensors[i].begin, written.tensors[i].begin);
    EXPECT_EQ(read.value().tensors[i].end, written.tensors[i].end);
  }
}

TEST(SafetensorsWriter, RefusesEqualNamesAndShapesWithoutWholeBytes) {
  EXPECT_FALSE(write_safetensors_header({{"a", Dtype::kU8, {1}}, {"a", Dtype::kU8, {1}}}).ok());
  EXPECT_FALSE(write_safetensors_header({{"a", Dtype::kU8, {-1}}}).ok());
  EXPECT_FALSE(write_safetensors_header({{"a", Dtype::kF4, {3}}}).ok());
  EXPECT_FALSE(write_safetensors_header({{"__metadata__", Dtype::kU8, {1}}}).ok());
}

}  // namespace
}  // namespace headrace
