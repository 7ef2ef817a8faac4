#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "core/wire/codec.h"
#include "tests/style/source_tree.h"

namespace headrace::style {
namespace {

bool stands_in(const std::string& document, const std::string& word) {
  const std::regex whole("(^|[^A-Za-z0-9_])" + word + "($|[^A-Za-z0-9_])");
  return std::regex_search(document, whole);
}

TEST(ProtocolDocument, NamesEveryLimit) {
  const std::string document = read_text(root() / "docs/protocol.md");
  const std::string limits = read_text(root() / "core/wire/limits.h");
  const std::regex constant("constexpr [a-z0-9_:]+ (k[A-Za-z0-9]+)");
  std::size_t seen = 0;
  for (auto match = std::sregex_iterator(limits.begin(), limits.end(), constant); match != std::sregex_iterator(); ++match) {
    ++seen;
    EXPECT_TRUE(stands_in(document, (*match)[1])) << "docs/protocol.md does not name the limit " << (*match)[1];
  }
  EXPECT_GT(seen, 10u);
}

TEST(ProtocolDocument, NamesEveryMessageAndEveryKey) {
  const std::string document = read_text(root() / "docs/protocol.md");
  const std::vector<wire::MessageKeys> messages = wire::all_message_keys();
  EXPECT_EQ(messages.size(), std::variant_size_v<wire::Body>);
  for (const wire::MessageKeys& message : messages) {
    // In the message's own row of the table: the same word elsewhere on the page describes something else.
    const std::string start =
        "| " + std::to_string(static_cast<int>(message.type)) + " | " + std::string(wire::message_name(message.type)) + " |";
    const std::size_t at = document.find("\n" + start);
    ASSERT_NE(at, std::string::npos) << "docs/protocol.md has no row " << start;
    const std::string row = document.substr(at + 1, document.find('\n', at + 1) - at - 1);
    for (const std::string& key : message.keys) {
      EXPECT_NE(row.find("`" + key + "`"), std::string::npos) << "docs/protocol.md does not name the key " << key << " in: " << start;
    }
  }
}

TEST(Documents, LinkOnlyToWhatExists) {
  const std::regex link(R"(\]\(([^)#\s]+)(#[^)]*)?\))");
  std::size_t seen = 0;
  for (const SourceFile& file : project_files()) {
    if (!file.path.ends_with(".md")) continue;
    for (auto match = std::sregex_iterator(file.text.begin(), file.text.end(), link); match != std::sregex_iterator(); ++match) {
      const std::string target = (*match)[1];
      if (target.find("://") != std::string::npos || target.starts_with("mailto:")) continue;
      ++seen;
      EXPECT_TRUE(std::filesystem::exists((root() / file.path).parent_path() / target)) << file.path << " links to " << target;
    }
  }
  EXPECT_GT(seen, 0u);
}

/// Names of options and positional words that `code` adds to a verb.
std::vector<std::string> added_options(const std::string& code) {
  std::vector<std::string> names;
  const std::regex option("add_(?:option|flag)\\(\"([a-z-]+)\"");
  for (auto match = std::sregex_iterator(code.begin(), code.end(), option); match != std::sregex_iterator(); ++match)
    names.push_back((*match)[1]);
  return names;
}

/// What stands in `text` from `begin` up to the next `end`.
std::string part_of(const std::string& text, const std::string& begin, const std::string& end) {
  const std::size_t from = text.find(begin);
  if (from == std::string::npos) return {};
  return text.substr(from, text.find(end, from + begin.size()) - from);
}

TEST(Commands, AreDescribedWithTheirOptionsInTheCommandDocument) {
  const std::string document = read_text(root() / "docs/cli.md");
  const std::string source = read_text(root() / "cli/main.cpp");
  const std::regex verb("add_subcommand\\(\"([a-z]+)\"");
  std::size_t seen = 0;
  for (auto match = std::sregex_iterator(source.begin(), source.end(), verb); match != std::sregex_iterator(); ++match) {
    const std::string name = (*match)[1];
    const std::string section = part_of(document, "\n## " + name + "\n", "\n## ");
    const std::string code = part_of(source, "void add_" + name + "(", "\n}\n");
    std::vector<std::string> options = added_options(code);
    for (const char* shared : {"add_model", "add_json"}) {
      if (code.find(std::string(shared) + "(*verb") == std::string::npos) continue;
      for (const std::string& option : added_options(part_of(source, "void " + std::string(shared) + "(", "\n}\n")))
        options.push_back(option);
    }
    for (const std::string& option : options) {
      ++seen;
      const bool described = section.find("`" + option + "`") != std::string::npos || section.find("`" + option + " ") != std::string::npos;
      EXPECT_TRUE(described) << "docs/cli.md does not describe " << option << " of " << name;
    }
  }
  EXPECT_GT(seen, 50u);
}

/// Every document that --json writes has a schema with a section in docs/cli.md.
TEST(Commands, HaveTheirDocumentSchemasInTheCommandDocument) {
  const std::string document = read_text(root() / "docs/cli.md");
  for (const char* schema : {"headrace.serve/1", "headrace.push/1", "headrace.plan/1", "headrace.status/1", "headrace.fingerprint/1",
                             "headrace.verify/1", "headrace.doctor/1", "headrace.demo/1"}) {
    EXPECT_NE(document.find(schema), std::string::npos) << schema;
  }
}

}  // namespace
}  // namespace headrace::style
