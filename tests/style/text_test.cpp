#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tests/style/source_tree.h"

namespace headrace::style {
namespace {

constexpr std::size_t kFileLinesMax = 600;
constexpr std::size_t kColumnsMax = 140;

struct Function {
  std::string first_line;
  std::size_t lines = 0;
};

/// Functions by their shape after clang-format: a line at the outermost indentation that opens a brace, up to the brace that closes it
/// there.
std::vector<Function> functions_of(const SourceFile& file) {
  std::vector<Function> functions;
  const std::vector<std::string> lines = lines_of(file.text);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    const bool opens = line.ends_with("{") && line.find('(') != std::string::npos && !line.starts_with(" ") && !line.starts_with("#");
    if (!opens) continue;
    std::size_t end = i + 1;
    while (end < lines.size() && lines[end] != "}" && lines[end] != "};") ++end;
    functions.push_back({line, end - i + 1});
    i = end;
  }
  return functions;
}

TEST(Files, StayUnderTheirLength) {
  for (const SourceFile& file : project_files()) {
    EXPECT_TRUE(!is_cpp(file) || lines_of(file.text).size() <= kFileLinesMax)
        << file.path << " has " << lines_of(file.text).size() << " lines";
  }
}

TEST(Functions, StayUnderTheirLength) {
  constexpr std::size_t kFunctionLinesMax = 80;
  std::size_t seen = 0;
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file) || file.path.starts_with("tests/")) continue;
    for (const Function& function : functions_of(file)) {
      ++seen;
      EXPECT_LE(function.lines, kFunctionLinesMax) << file.path << ": " << function.first_line;
    }
  }
  EXPECT_GT(seen, 100u);
}

TEST(Lines, FitTheirColumnsAndEndWithoutSpaces) {
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file) && file.path != "run" && file.path != ".ci/run") continue;
    std::size_t number = 0;
    for (const std::string& line : lines_of(file.text)) {
      ++number;
      // In C++ only a literal can be longer: clang-format breaks everything else.
      EXPECT_TRUE(line.size() <= kColumnsMax || line.find('"') != std::string::npos) << file.path << ":" << number;
      EXPECT_FALSE(line.ends_with(" ") || line.ends_with("\t") || line.ends_with("\r")) << file.path << ":" << number;
    }
  }
}

TEST(Code, HasNoUnfinishedPlacesAndNoUsingNamespace) {
  // Put together here, so that this file does not find itself.
  const std::vector<std::string> words{std::string("TO") + "DO", std::string("FIX") + "ME", std::string("using name") + "space "};
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file)) continue;
    for (const std::string& word : words) EXPECT_EQ(file.text.find(word), std::string::npos) << file.path << " has " << word;
  }
}

/// A checkout must work anywhere: nothing may point into a folder of the machine that it was written on.
TEST(Files, NameNoFolderOfOneMachine) {
  const std::vector<std::string> folders{std::string("/ro") + "ot/", std::string("/ho") + "me/", std::string("/wo") + "rk/",
                                         std::string("/Us") + "ers/"};
  for (const SourceFile& file : project_files()) {
    for (const std::string& folder : folders) EXPECT_EQ(file.text.find(folder), std::string::npos) << file.path << " names " << folder;
  }
}

/// The libraries live inside engines and trainers: heap, limits, signals, environment and locale of the process are their hosts' own.
/// (A trim of the heap from two threads at once also crashes where an engine has put another malloc in front of the C library's.)
TEST(Libraries, LeaveWhatBelongsToTheWholeProcessAlone) {
  for (const SourceFile& file : project_files()) {
    const bool library = file.path.starts_with("core/") || file.path.starts_with("kernels/") || file.path.starts_with("receiver/") ||
                         file.path.starts_with("sender_sdk/");
    if (!library) continue;
    for (const std::string call : {"malloc_trim", "mallopt(", "setrlimit(", "sigaction(", "setenv(", "putenv(", "umask(", "setlocale("}) {
      EXPECT_EQ(file.text.find(call), std::string::npos) << file.path << " calls " << call;
    }
  }
}

TEST(Headers, SayPragmaOnce) {
  for (const SourceFile& file : project_files()) {
    EXPECT_TRUE(!file.path.ends_with(".h") || file.text.starts_with("#pragma once\n")) << file.path;
  }
}

}  // namespace
}  // namespace headrace::style
