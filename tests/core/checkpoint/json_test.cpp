#include "core/checkpoint/json.h"

#include <gtest/gtest.h>

#include "tests/core/checkpoint/temp_folder.h"

namespace headrace {
namespace {

TEST(Json, GivesValuesByKindAndKeepsTheOrderOfMembers) {
  const auto json = parse_json(R"({"z":[1,-2,18446744073709551615,2.5,"s",null,true],"a":{"b":{}}})");
  ASSERT_TRUE(json.ok()) << json.status().message();
  ASSERT_NE(json.value().as_object(), nullptr);
  EXPECT_EQ(json.value().as_object()->at(0).key, "z");
  EXPECT_EQ(json.value().as_object()->at(1).key, "a");
  const JsonValue::Array& z = *json.value().find("z")->as_array();
  ASSERT_EQ(z.size(), 7u);
  EXPECT_EQ(z[0].as_int64(), 1);
  EXPECT_EQ(z[0].as_uint64(), 1u);
  EXPECT_EQ(z[1].as_int64(), -2);
  EXPECT_EQ(z[1].as_uint64(), std::nullopt);
  EXPECT_EQ(z[2].as_uint64(), ~std::uint64_t{0});
  EXPECT_EQ(z[2].as_int64(), std::nullopt);
  EXPECT_EQ(z[3].as_double(), 2.5);
  EXPECT_EQ(z[3].as_int64(), std::nullopt);
  EXPECT_EQ(*z[4].as_string(), "s");
  EXPECT_TRUE(z[5].is_null());
  EXPECT_EQ(z[6].as_bool(), true);
  EXPECT_EQ(json.value().find("a")->find("b")->kind(), "object");
  EXPECT_EQ(json.value().find("missing"), nullptr);
  EXPECT_EQ(z[0].find("x"), nullptr);
}

TEST(Json, RefusesEqualKeysAtAnyDepth) {
  const Status status = parse_json(R"({"a":[{"key":1,"key":2}]})").status();
  EXPECT_NE(status.message().find("\"key\""), std::string::npos) << status.message();
  EXPECT_FALSE(parse_json(R"({"a":1,"\u0061":2})").ok());
  EXPECT_TRUE(parse_json(R"({"a":{"a":1},"b":{"a":1}})").ok());
}

TEST(Json, RefusesWhatIsOverItsLimits) {
  const JsonLimits limits{32, 3};
  EXPECT_TRUE(parse_json("[[1]]", limits).ok());
  EXPECT_FALSE(parse_json("[[[[[1]]]]]", limits).ok());
  EXPECT_FALSE(parse_json("\"" + std::string(31, 'x') + "\"", limits).ok());
}

TEST(Json, RefusesWhatIsNoJson) {
  for (const std::string text : {"", " ", "{", "{}{}", "[1,]", "{'a':1}", "nul", "\xEF\xBB\xBF{}", "\"\xED\xA0\x80\"", "[1] x"}) {
    EXPECT_FALSE(parse_json(text).ok()) << text;
  }
}

TEST(Json, NamesTheFileThatItCouldNotRead) {
  const testing::TempFolder folder;
  const auto path = folder.write("config.json", "{\"a\":}");
  const Status status = read_json_file(path.string()).status();
  EXPECT_NE(status.message().find("config.json"), std::string::npos);
  EXPECT_EQ(read_json_file((folder.path() / "none.json").string()).status().native(), ENOENT);
  folder.write("big.json", std::string(200, ' ') + "1");
  EXPECT_FALSE(read_json_file((folder.path() / "big.json").string(), JsonLimits{100, 4}).ok());
}

}  // namespace
}  // namespace headrace
