#include <gtest/gtest.h>

#include <cstdlib>
#include <regex>
#include <string>
#include <vector>

#include "tests/style/source_tree.h"

namespace headrace::style {
namespace {

/// The blocks of a document that are fenced as `language`.
std::vector<std::string> fenced_blocks(const std::string& document, const std::string& language) {
  std::vector<std::string> blocks;
  const std::string fence = "```" + language + "\n";
  for (std::size_t at = document.find(fence); at != std::string::npos; at = document.find(fence, at)) {
    at += fence.size();
    const std::size_t end = document.find("```", at);
    blocks.push_back(document.substr(at, end - at));
    at = end;
  }
  return blocks;
}

/// What the first group of `pattern` matches, each time.
std::vector<std::string> matches(const std::string& text, const std::string& pattern) {
  std::vector<std::string> found;
  const std::regex words(pattern);
  for (auto match = std::sregex_iterator(text.begin(), text.end(), words); match != std::sregex_iterator(); ++match)
    found.push_back((*match)[1]);
  return found;
}

TEST(Readme, ShowsCodeThatIsBuiltAndRun) {
  const std::string examples = read_text(root() / "examples/embedded_receiver.cpp") + read_text(root() / "examples/small_sender.cpp");
  const std::vector<std::string> blocks = fenced_blocks(read_text(root() / "README.md"), "cpp");
  EXPECT_GE(blocks.size(), 3u);
  for (const std::string& block : blocks) {
    EXPECT_NE(examples.find(block), std::string::npos) << "no example holds\n" << block;
  }
}

TEST(Readme, NamesOnlyCommandsThatExist) {
  const std::string run = read_text(root() / "run");
  const std::string verbs = read_text(root() / "cli/main.cpp");
  for (const char* document : {"README.md", "CONTRIBUTING.md", "docs/cli.md"}) {
    const std::string text = read_text(root() / document);
    for (const std::string& command : matches(text, "\\./run ([a-z]+)")) {
      EXPECT_TRUE(command == "help" || run.find("command_" + command + "()") != std::string::npos)
          << document << " names ./run " << command;
    }
    for (const std::string& verb : matches(text, "\\./run headrace ([a-z]+)")) {
      EXPECT_NE(verbs.find("add_subcommand(\"" + verb + "\""), std::string::npos) << document << " names headrace " << verb;
    }
  }
}

TEST(Documents, DescribeEveryFieldThatTheProgramWrites) {
  const std::string document = read_text(root() / "docs/cli.md");
  std::size_t seen = 0;
  for (const SourceFile& file : project_files()) {
    const bool writes =
        file.path.starts_with("cli/") || file.path == "sender_sdk/report_json.cpp" || file.path == "examples/demo/demo_report.cpp";
    if (!writes || !is_cpp(file)) continue;
    for (const std::string& field : matches(file.text, "\\.set\\(\"([a-z_]+)\"")) {
      ++seen;
      EXPECT_NE(document.find("`" + field + "`"), std::string::npos) << "docs/cli.md does not describe " << field << " of " << file.path;
    }
  }
  EXPECT_GT(seen, 80u);
}

TEST(Pictures, AreWhatTheirScriptDraws) {
  if (std::system("command -v python3 >/dev/null 2>&1") != 0) GTEST_SKIP() << "python3 is not there";  // NOLINT: no shell input
  const std::string script = (root() / "docs/pictures/make_pictures.py").string();
  EXPECT_EQ(std::system(("python3 '" + script + "' --check").c_str()), 0) << "run docs/pictures/make_pictures.py";  // NOLINT
}

TEST(Pictures, StandInTheDocuments) {
  std::string documents;
  for (const SourceFile& file : project_files())
    if (file.path.ends_with(".md")) documents += file.text;
  std::size_t seen = 0;
  for (const SourceFile& file : project_files()) {
    if (!file.path.ends_with(".svg")) continue;
    ++seen;
    EXPECT_NE(documents.find(file.path.substr(file.path.rfind('/') + 1)), std::string::npos) << file.path;
  }
  EXPECT_GT(seen, 0u);
}

}  // namespace
}  // namespace headrace::style
