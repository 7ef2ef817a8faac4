#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

using Lines = std::vector<std::string>;

/// The indented blocks of one section of README.md.
std::vector<Lines> blocks_of(const std::string& heading) {
  std::ifstream file(fs::path(HEADRACE_SOURCE_DIR) / "README.md");
  std::vector<Lines> blocks;
  bool inside = false;
  bool open = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) inside = line == heading;
    const bool indented = inside && line.starts_with("    ");
    if (indented && !open) blocks.emplace_back();
    if (indented) blocks.back().push_back(line.substr(4));
    open = indented;
  }
  return blocks;
}

bool holds_commands(const Lines& block) {
  for (const char* word : {"./run ", "cp ", "printf ", "diff "})
    if (block.front().starts_with(word)) return true;
  return false;
}

/// A folder that looks like the repository to whoever types what README.md says: ./run headrace is the program of this build.
class Readme : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* file = std::getenv("HEADRACE_MINILM");
    const fs::path model = file != nullptr ? fs::path(file) : fs::path(HEADRACE_SOURCE_DIR) / "build/minilm/model.safetensors";
    if (!fs::exists(model)) GTEST_SKIP() << "all-MiniLM-L6-v2 is not there: ./run test fetches it, or set HEADRACE_MINILM";
    fs::create_directories(folder_.path() / "build/minilm");
    for (const char* name : {"model.safetensors", "config.json"})
      fs::copy_file(model.parent_path() / name, folder_.path() / "build/minilm" / name);
    fs::create_directory_symlink(fs::path(HEADRACE_SOURCE_DIR) / "examples", folder_.path() / "examples");
    const fs::path run = folder_.path() / "run";
    std::ofstream(run) << "#!/bin/sh\n[ \"$1\" = model ] && exit 0\nshift\nexec '" HEADRACE_BINARY_DIR "/headrace' \"$@\"\n";
    fs::permissions(run, fs::perms::owner_all);
    fs::current_path(folder_.path());
  }
  void TearDown() override { fs::current_path(before_); }

  /// Starts a rank, or runs a command to its end; `expected` is what README.md shows of its output.
  void type(const std::string& command, const std::string& expected) {
    const std::string serve = "./run headrace serve ";
    if (command.starts_with(serve)) {
      std::istringstream words(command.substr(serve.size()));
      Lines arguments;
      for (std::string word; words >> word;) arguments.push_back(word);
      ranks_.push_back(std::make_unique<Serve>(arguments));
      return;
    }
    const Outcome outcome = run_program({"/bin/bash", "-c", command});
    const bool difference = expected.find("first difference") != std::string::npos;
    EXPECT_EQ(outcome.code, difference ? 1 : 0) << command << "\n" << outcome.out << outcome.err;
    EXPECT_NE((outcome.out + outcome.err).find(expected), std::string::npos) << command << " says\n" << outcome.out << outcome.err;
  }

  const fs::path before_ = fs::current_path();
  const PrivateRunDirectory run_directory_;
  const ScratchDir folder_;
  std::vector<std::unique_ptr<Serve>> ranks_;
};

TEST_F(Readme, ShowsCommandsOfTheRealModelThatDoWhatItSays) {
  const std::vector<Lines> blocks = blocks_of("## A real model");
  std::size_t typed = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (!holds_commands(blocks[b])) continue;
    std::string shown;
    if (b + 1 < blocks.size() && !holds_commands(blocks[b + 1])) {
      for (const std::string& line : blocks[b + 1]) shown += line + "\n";
    }
    // Of a line with times, what stands before them.
    if (const std::size_t time = shown.find(" ms,"); time != std::string::npos) shown.resize(shown.rfind(", ", time));
    for (std::size_t c = 0; c < blocks[b].size(); ++c) {
      // A push says what it did, and the status behind it is not shown.
      const bool shows = shown.starts_with("push/") ? blocks[b][c].find(" push ") != std::string::npos : c + 1 == blocks[b].size();
      type(blocks[b][c], shows ? shown : std::string());
      ++typed;
    }
  }
  EXPECT_GE(typed, 16u);
  EXPECT_EQ(ranks_.size(), 3u);
}

}  // namespace
}  // namespace headrace::system_test
