#include "cli/picture.h"

#include <gtest/gtest.h>

#include <cmath>
#include <regex>
#include <string>
#include <vector>

#include "cli/svg.h"

namespace headrace::cli {
namespace {

Result<std::string> drawn(const std::string& text) {
  const Result<JsonValue> document = parse_json(text);
  EXPECT_TRUE(document.ok()) << document.status().to_string();
  return draw(document.value());
}

std::string refusal(const std::string& text) {
  const Result<std::string> picture = drawn(text);
  EXPECT_EQ(picture.status().code(), Code::kInvalidArgument) << text;
  return picture.status().message();
}

/// Every number that stands for `pattern`'s group, in the order of the text.
std::vector<double> numbers(const std::string& picture, const std::string& pattern) {
  std::vector<double> found;
  const std::regex expression(pattern);
  for (std::sregex_iterator it(picture.begin(), picture.end(), expression), end; it != end; ++it) found.push_back(std::stod((*it)[1]));
  return found;
}

const std::string kPhases = R"("phases_ms":{"manifest":1,"transfer":2,"prepare":0,"commit":1})";

std::string receipt(int rank, const std::string& engine = "e") {
  return R"({"engine":")" + engine + R"(","rank":)" + std::to_string(rank) +
         R"(,"version":"run/1","data_path":"shm","applied_bytes":1500,)" + kPhases + "}";
}

std::string plan(const std::string& senders, const std::string& ranks) {
  return R"({"family":"dense","layout":"tp2","tensors":3,"wire_bytes":30,"senders":[)" + senders + R"(],"ranks":[)" + ranks + "]}";
}

TEST(Picture, OfAReceiptHasItsPhasesToScale) {
  const Result<std::string> picture = drawn(receipt(3));
  ASSERT_TRUE(picture.ok()) << picture.status().to_string();
  EXPECT_NE(picture.value().find(">e rank 3<"), std::string::npos);
  EXPECT_NE(picture.value().find(">4 ms, 1.50 kB<"), std::string::npos);
  const std::vector<double> widths = numbers(picture.value(), R"re(<rect [^>]*width="([0-9.]+)" height="22)re");
  ASSERT_EQ(widths.size(), 3u) << "a phase that took no time has no box";
  EXPECT_DOUBLE_EQ(widths[0] * 2, widths[1]);
  EXPECT_DOUBLE_EQ(widths[0], widths[2]);
  EXPECT_NEAR(widths[0] + widths[1] + widths[2], 520, 0.01) << "the longest lane fills the room";
}

TEST(Picture, OfAReportHasALaneForTheSenderAndForEachRank) {
  const std::string report =
      R"({"version":"run/1","data_path":"shm","wire_bytes":7,)" + kPhases + R"(,"receipts":[)" + receipt(0) + "," + receipt(1) + "]}";
  for (const std::string& document : {report, R"({"schema":"headrace.push/1","report":)" + report + "}"}) {
    const Result<std::string> picture = drawn(document);
    ASSERT_TRUE(picture.ok()) << picture.status().to_string();
    for (const char* words : {">run/1, shm<", ">sender<", ">e rank 0<", ">e rank 1<", "7 B on the wire"})
      EXPECT_NE(picture.value().find(words), std::string::npos) << words;
  }
}

TEST(Picture, OfAPlanHasABandForEachPairAsWideAsItsBytes) {
  const Result<std::string> picture = drawn(plan(R"({"name":"a","wire_bytes":[10,0]},{"name":"b","wire_bytes":[7,4]})",
                                                 R"({"rank":0,"wire_bytes":17,"tensors":3},{"rank":1,"wire_bytes":4,"tensors":1})"));
  ASSERT_TRUE(picture.ok()) << picture.status().to_string();
  const std::vector<double> bands = numbers(picture.value(), R"re(stroke-width="([0-9.]+)"><title>[ab] to)re");
  ASSERT_EQ(bands.size(), 3u) << "who sends nothing has no band";
  const std::vector<double> bars = numbers(picture.value(), R"re(width="12.000" height="([0-9.]+)")re");
  ASSERT_EQ(bars.size(), 4u);
  EXPECT_NEAR(bars[0], bands[0], 0.002);
  EXPECT_NEAR(bars[1], bands[1] + bands[2], 0.002);
  EXPECT_NEAR(bars[2], bands[0] + bands[1], 0.002);
  EXPECT_NEAR(bars[3], bands[2], 0.002);
  EXPECT_NEAR(bands[0] / bands[2], 2.5, 0.002);
  EXPECT_NE(picture.value().find(">rank 1: 4 B, 1 tensors<"), std::string::npos);
}

TEST(Picture, OfManyOnEitherSideStaysWithinItsHeight) {
  for (const auto& [senders, ranks] : std::vector<std::pair<int, int>>{{1, 40}, {40, 1}, {13, 13}}) {
    std::string brought;
    std::string wanted;
    for (int s = 0; s < senders; ++s) {
      brought += (s > 0 ? "," : "") + std::string(R"({"name":"s","wire_bytes":[)");
      for (int r = 0; r < ranks; ++r) brought += (r > 0 ? ",5" : "5");
      brought += "]}";
    }
    for (int r = 0; r < ranks; ++r) {
      wanted += (r > 0 ? "," : "") + std::string(R"({"tensors":1,"rank":)") + std::to_string(r) + R"(,"wire_bytes":)" +
                std::to_string(5 * senders) + "}";
    }
    const Result<std::string> picture = drawn(plan(brought, wanted));
    ASSERT_TRUE(picture.ok()) << picture.status().to_string();
    const double height = numbers(picture.value(), R"re(<svg [^>]*height="([0-9.]+)")re").at(0);
    const std::vector<double> tops = numbers(picture.value(), R"re(<rect x="[0-9.]+" y="(-?[0-9.]+)" width="12.000")re");
    const std::vector<double> heights = numbers(picture.value(), R"re(width="12.000" height="([0-9.]+)")re");
    ASSERT_EQ(tops.size(), static_cast<std::size_t>(senders + ranks));
    for (std::size_t i = 0; i < tops.size(); ++i) {
      EXPECT_GE(tops[i], 40) << "below the title";
      EXPECT_LE(tops[i] + heights[i], height);
    }
  }
}

TEST(Picture, NamesWhatADocumentLacks) {
  for (const char* text : {"{}", "[]", "3", "\"report\"", R"({"report":3})", R"({"ranks":[]})"}) {
    EXPECT_EQ(refusal(text), "expected the JSON of a push, a plan, a report or a receipt") << text;
  }
  EXPECT_EQ(refusal(R"({"phases_ms":{}})"), "version: expected a field, not nothing");
  EXPECT_EQ(refusal(R"({"version":"v","data_path":3,"phases_ms":{}})"), "data_path: expected text, not integer");
  EXPECT_EQ(refusal(R"({"receipts":[{}],"version":"v","data_path":"p","wire_bytes":1,)" + kPhases + "}"),
            "receipts[0].engine: expected a field, not nothing");
  EXPECT_EQ(refusal(R"({"receipts":[4],"version":"v","data_path":"p","wire_bytes":1,)" + kPhases + "}"),
            "receipts[0].engine: expected a field, not integer");
  EXPECT_EQ(refusal(R"({"receipts":[],"version":"v","data_path":"p","wire_bytes":-1,)" + kPhases + "}"),
            "wire_bytes: expected a whole number from 0 on, not integer");
  for (const char* ms : {"-1", "1e300", "\"1\"", "null", "[]"}) {
    const std::string text =
        R"({"engine":"e","rank":0,"version":"v","data_path":"p","applied_bytes":1,"phases_ms":{"manifest":)" + std::string(ms) + "}}";
    EXPECT_TRUE(refusal(text).starts_with("manifest: expected milliseconds, not ")) << ms;
  }
  EXPECT_EQ(refusal(plan("", R"({"rank":0,"wire_bytes":1,"tensors":1})")), "senders: expected at least one, not none");
  EXPECT_EQ(refusal(plan(R"({"name":"a","wire_bytes":[1]})", "")), "ranks: expected at least one, not none");
  EXPECT_EQ(refusal(plan(R"({"name":"a","wire_bytes":[]})", R"({"rank":0,"wire_bytes":1,"tensors":1})")),
            "senders[0].wire_bytes: expected 1 of them, not 0");
  EXPECT_EQ(refusal(plan(R"({"name":"a","wire_bytes":[2]})", R"({"rank":0,"wire_bytes":1,"tensors":1})")),
            "senders: expected 1 bytes for rank 0, not 2");
  const std::string all = "18446744073709551615";
  EXPECT_EQ(refusal(plan(R"({"name":"a","wire_bytes":[)" + all + R"(]},{"name":"b","wire_bytes":[2]})",
                         R"({"rank":0,"wire_bytes":1,"tensors":1})")),
            "senders[1].wire_bytes: expected a size, not one without end");
}

TEST(Picture, RefusesMoreThanFitsAndTakesTheLargestNumbers) {
  std::string receipts = receipt(0);
  for (int i = 0; i < 1'024; ++i) receipts += "," + receipt(i);
  EXPECT_EQ(refusal(R"({"version":"v","data_path":"p","wire_bytes":1,)" + kPhases + R"(,"receipts":[)" + receipts + "]}"),
            "receipts: expected a list of at most 1024, not 1025");
  const std::string all = "18446744073709551615";
  const Result<std::string> picture =
      drawn(plan(R"({"name":"a","wire_bytes":[)" + all + "]}", R"({"rank":)" + all + R"(,"wire_bytes":)" + all + R"(,"tensors":0})"));
  ASSERT_TRUE(picture.ok()) << picture.status().to_string();
  EXPECT_EQ(numbers(picture.value(), R"re(stroke-width="([0-9.]+)"><title>a to)re"), std::vector<double>{34});
}

TEST(XmlText, EscapesAndReplaces) {
  EXPECT_EQ(xml_text("a<b>&\"c\""), "a&lt;b&gt;&amp;&quot;c&quot;");
  EXPECT_EQ(xml_text(std::string_view("a\0\x01\n\t\x1f!", 7)), "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD!");
  EXPECT_EQ(xml_text("\xEF\xBF\xBE\xEF\xBF\xBF\xEF\xBF\xBC"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBC");
}

TEST(ShortenedText, EndsBetweenTwoCharacters) {
  EXPECT_EQ(shortened("\xC3\xA4\xC3\xB6\xC3\xBC", 2), "\xC3\xA4\xC3\xB6\xE2\x80\xA6");
  EXPECT_EQ(shortened("ab", 2), "ab");
  const Result<std::string> picture = drawn(receipt(7, std::string(64, 'x')));
  ASSERT_TRUE(picture.ok()) << picture.status().to_string();
  EXPECT_NE(picture.value().find(">" + std::string(20, 'x') + "\xE2\x80\xA6 rank 7<"), std::string::npos);
}

TEST(Picture, EscapesEveryTextOfADocument) {
  const std::string evil = R"(</text><script>&\"\u0001)";
  const Result<std::string> timeline = drawn(R"({"engine":")" + evil + R"(","rank":0,"version":")" + evil + R"(","data_path":")" + evil +
                                             R"(","applied_bytes":1,)" + kPhases + "}");
  const Result<std::string> flow =
      drawn(R"({"family":")" + evil + R"(","layout":")" + evil + R"(","tensors":1,"wire_bytes":1,"senders":[{"name":")" + evil +
            R"(","wire_bytes":[1]}],"ranks":[{"rank":0,"wire_bytes":1,"tensors":1}]})");
  for (const Result<std::string>* picture : {&timeline, &flow}) {
    ASSERT_TRUE(picture->ok()) << picture->status().to_string();
    EXPECT_EQ(picture->value().find("<script"), std::string::npos);
    EXPECT_EQ(picture->value().find('\x01'), std::string::npos);
    EXPECT_NE(picture->value().find("&lt;script&gt;&amp;&quot;"), std::string::npos);
  }
}

}  // namespace
}  // namespace headrace::cli
