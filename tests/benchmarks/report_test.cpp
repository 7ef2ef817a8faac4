#include "benchmarks/report.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "benchmarks/rows.h"
#include "core/checkpoint/json.h"

namespace headrace::bench {
namespace {

Row row(double value, double reference) {
  return Row{.name = "a/b", .value = value, .unit = "GB/s"}.against("memcpy", reference);
}

TEST(Row, ReachesItsTargetAtTheBoundAndMissesItBeyond) {
  EXPECT_TRUE(*row(9, 10).ratio_at_least(0.90).ok);
  EXPECT_FALSE(*row(8.99, 10).ratio_at_least(0.90).ok);
  EXPECT_TRUE(*row(12, 10).ratio_at_most(1.20).ok);
  EXPECT_FALSE(*row(12.01, 10).ratio_at_most(1.20).ok);
  EXPECT_TRUE(*row(210, 10).excess_at_most(200).ok);
  EXPECT_FALSE(*row(211, 10).excess_at_most(200).ok);
  EXPECT_TRUE(*row(60, 1).value_at_most(60).ok);
  EXPECT_FALSE(*row(60.1, 1).value_at_most(60).ok);
  EXPECT_TRUE(*row(5, 5).ratio_exactly_one().ok);
  EXPECT_FALSE(*row(5, 6).ratio_exactly_one().ok);
}

TEST(Report, OfRowsWithoutATargetIsNotMissed) {
  const Row plain{.name = "a", .value = 1, .unit = "ms"};
  EXPECT_TRUE(all_reached({plain}));
  EXPECT_TRUE(all_reached({plain, row(10, 10).ratio_at_least(0.9)}));
  EXPECT_FALSE(all_reached({plain, row(1, 10).ratio_at_least(0.9)}));
}

/// The keys of an object, which must be exactly these.
void expect_keys(const JsonValue& value, const std::set<std::string>& keys) {
  ASSERT_NE(value.as_object(), nullptr);
  std::set<std::string> found;
  for (const JsonMember& member : *value.as_object()) found.insert(member.key);
  EXPECT_EQ(found, keys);
}

void expect_schema(const JsonValue& document) {
  expect_keys(document, {"schema", "machine", "rows"});
  EXPECT_EQ(*document.find("schema")->as_string(), "headrace.bench/1");
  expect_keys(*document.find("machine"), {"cpu", "isa", "page_sizes", "commit"});
  EXPECT_GE(document.find("machine")->find("page_sizes")->as_array()->size(), 1u);
  for (const JsonValue& line : *document.find("rows")->as_array()) {
    expect_keys(line, {"name", "value", "unit", "reference", "reference_value", "ratio", "target", "ok"});
    EXPECT_TRUE(line.find("value")->as_double().has_value());
    EXPECT_EQ(line.find("reference")->is_null(), line.find("reference_value")->is_null());
    EXPECT_EQ(line.find("target")->is_null(), line.find("ok")->is_null());
  }
}

TEST(Report, IsNullWhereThereIsNothing) {
  const Machine machine{"cpu", "AVX2", {4096}, ""};
  const JsonValue document = report_json(machine, {Row{.name = "a", .value = 1.5, .unit = "ms"}, row(3, 4).ratio_at_least(0.5)});
  expect_schema(document);
  EXPECT_TRUE(document.find("machine")->find("commit")->is_null());
  const JsonValue::Array& rows = *document.find("rows")->as_array();
  ASSERT_EQ(rows.size(), 2u);
  for (const char* key : {"reference", "reference_value", "ratio", "target", "ok"}) EXPECT_TRUE(rows[0].find(key)->is_null()) << key;
  EXPECT_EQ(rows[1].find("ratio")->as_double(), 0.75);
  EXPECT_EQ(rows[1].find("ok")->as_bool(), true);
}

TEST(Report, ForPeopleHasALineForEachRow) {
  const std::vector<Row> rows{Row{.name = "first/row", .value = 1.5, .unit = "ms"}, row(1, 4).ratio_at_least(0.5).remark("a note")};
  const Machine machine{"cpu", "AVX2", {4096}, "abc"};
  const std::string text = report_text(machine, rows);
  EXPECT_NE(text.find("first/row"), std::string::npos);
  EXPECT_NE(text.find("MISSED"), std::string::npos);
  EXPECT_NE(text.find("a note"), std::string::npos);
  EXPECT_NE(report_markdown(machine, rows).find("| a/b | 1 GB/s | 4 GB/s (memcpy) | 0.25 | ratio >= 0.50 | MISSED |"), std::string::npos);
}

/// Runs the program; its exit code.
int bench(const std::string& arguments) {
  const std::string command = std::string(HEADRACE_BINARY_DIR) + "/benchmarks/headrace-bench " + arguments + " >/dev/null 2>&1";
  const int status = std::system(command.c_str());  // NOLINT(cert-env33-c,bugprone-command-processor): our own words
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Program, WritesTheSchemaForTheRowsThatWereAskedFor) {
  const std::filesystem::path file = std::filesystem::path(HEADRACE_BINARY_DIR) / "bench-test.json";
  std::filesystem::remove(file);
  const int code = bench("index/v41 --commit abc --json " + file.string());
  const JsonValue document = read_json_file(file.string()).value_or_throw();
  std::filesystem::remove(file);
  expect_schema(document);
  const JsonValue::Array& rows = *document.find("rows")->as_array();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(*rows[0].find("name")->as_string(), "index/v41");
  EXPECT_EQ(*document.find("machine")->find("commit")->as_string(), "abc");
  EXPECT_EQ(code, *rows[0].find("ok")->as_bool() ? 0 : 1);
}

TEST(Program, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(bench("no/such/row"), 2);
  EXPECT_EQ(bench("--no-such-option"), 2);
  EXPECT_EQ(bench("index --json"), 2);
}

}  // namespace
}  // namespace headrace::bench
