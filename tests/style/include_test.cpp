#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/style/source_tree.h"

namespace headrace::style {
namespace {

/// What the files of a folder may include of ours, besides the folder itself. The longest prefix of a file's path counts.
const std::map<std::string, std::vector<std::string>>& allowed_includes() {
  static const std::map<std::string, std::vector<std::string>> kAllowed{
      {"core/base/", {}},
      {"core/wire/", {"core/base/"}},
      {"core/device/", {"core/base/"}},
      {"core/transport/", {"core/base/", "core/wire/", "core/device/"}},
      {"core/checkpoint/", {"core/base/"}},
      {"kernels/", {"core/base/", "core/device/"}},
      {"receiver/", {"core/", "kernels/"}},
      {"sender_sdk/", {"core/", "kernels/"}},
      {"cli/", {"core/", "kernels/", "receiver/", "sender_sdk/"}},
      // Of the program the one part that draws: records show themselves.
      {"python/", {"core/", "kernels/", "receiver/", "sender_sdk/", "cli/picture.h"}},
      // A trainer and a judge: the public SDK, what reads checkpoints, and of the program the parts that ask receivers and show progress.
      {"examples/",
       {"core/base/", "core/checkpoint/", "core/wire/messages.h", "core/transport/run_directory.h", "kernels/fingerprint.h",
        "sender_sdk/sender.h", "sender_sdk/report_json.h", "receiver/receiver.h", "cli/receiver_client.h", "cli/fingerprints.h",
        "cli/progress.h", "cli/output.h", "tests/oracle/"}},
      {"tests/oracle/", {}},
      {"tests/", {"core/", "kernels/", "receiver/", "sender_sdk/", "cli/", "examples/", "benchmarks/"}},
      {"benchmarks/", {"core/", "kernels/", "receiver/", "sender_sdk/"}},
  };
  return kAllowed;
}

/// The one place of each third-party header: a prefix of the include, and the files or folders that may have it.
const std::map<std::string, std::vector<std::string>>& third_party_homes() {
  static const std::map<std::string, std::vector<std::string>> kHomes{
      {"zmq", {"core/transport/"}},
      {"msgpack", {"core/wire/codec.cpp", "core/wire/entry_reader.cpp"}},
      {"simdjson", {"core/checkpoint/"}},
      {"nlohmann/", {"core/checkpoint/json_text.cpp", "tests/"}},
      {"hwy/", {"kernels/"}},
      {"sodium", {"core/base/digest.cpp"}},
      {"CLI/", {"cli/main.cpp"}},
      {"nanobind/", {"python/src/"}},
      {"gtest/", {"tests/"}},
      {"gmock/", {"tests/"}},
      {"rapidcheck", {"tests/"}},
      {"benchmark/", {"benchmarks/"}},
  };
  return kHomes;
}

template <class Map>
const typename Map::mapped_type* longest_prefix(const Map& map, const std::string& path) {
  const typename Map::mapped_type* best = nullptr;
  std::size_t length = 0;
  for (const auto& [prefix, value] : map) {
    if (path.starts_with(prefix) && prefix.size() >= length) {
      best = &value;
      length = prefix.size();
    }
  }
  return best;
}

bool starts_with_any(const std::string& path, const std::vector<std::string>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(), [&](const std::string& prefix) { return path.starts_with(prefix); });
}

std::string folder_of(const std::string& path) {
  for (const auto& [prefix, ignored] : allowed_includes()) {
    if (prefix != "tests/" && path.starts_with(prefix)) return prefix;
  }
  return path.starts_with("tests/") ? "tests/" : std::string();
}

TEST(Includes, OfOursFollowTheTableOfRooms) {
  std::size_t seen = 0;
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file)) continue;
    const std::vector<std::string>* allowed = longest_prefix(allowed_includes(), file.path);
    ASSERT_NE(allowed, nullptr) << file.path << " is in no room of the table";
    for (const Include& include : includes_of(file)) {
      if (!include.quoted) continue;
      ++seen;
      EXPECT_TRUE(include.path.starts_with(folder_of(file.path)) || starts_with_any(include.path, *allowed))
          << file.path << " must not include " << include.path;
      EXPECT_TRUE(std::filesystem::exists(root() / include.path))
          << file.path << " includes " << include.path << " by a path that is not from the root";
    }
  }
  EXPECT_GT(seen, 100u);
}

TEST(Includes, ReceiverAndSenderNeverMeet) {
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file)) continue;
    for (const Include& include : includes_of(file)) {
      EXPECT_FALSE(file.path.starts_with("receiver/") && include.path.starts_with("sender_sdk/")) << file.path;
      EXPECT_FALSE(file.path.starts_with("sender_sdk/") && include.path.starts_with("receiver/")) << file.path;
    }
  }
}

TEST(Includes, OfThirdPartiesStayInTheirPlace) {
  std::set<std::string> used;
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file)) continue;
    for (const Include& include : includes_of(file)) {
      for (const auto& [prefix, homes] : third_party_homes()) {
        if (include.quoted || !include.path.starts_with(prefix)) continue;
        used.insert(prefix);
        EXPECT_TRUE(starts_with_any(file.path, homes)) << file.path << " must not include <" << include.path << ">";
      }
    }
  }
  for (const char* prefix : {"zmq", "msgpack", "simdjson", "nlohmann/", "hwy/", "sodium", "CLI/", "nanobind/"}) {
    EXPECT_EQ(used.count(prefix), 1u) << prefix << " is included nowhere: the rule guards nothing";
  }
}

TEST(Includes, OfThirdPartiesHaveOneFolderInTheProduct) {
  for (const char* prefix : {"zmq", "msgpack", "simdjson", "nlohmann/", "hwy/", "sodium", "CLI/", "nanobind/"}) {
    std::set<std::string> files;
    for (const SourceFile& file : project_files()) {
      if (!is_cpp(file) || file.path.starts_with("tests/")) continue;
      for (const Include& include : includes_of(file)) {
        if (!include.quoted && include.path.starts_with(prefix)) files.insert(file.path.substr(0, file.path.rfind('/')));
      }
    }
    EXPECT_EQ(files.size(), 1u) << prefix << " is included in more than one folder";
  }
}

/// Files of pure values: no thread, no clock, no I/O, so that they can be tested and reasoned about alone.
TEST(Includes, OfPureFilesHaveNoThreadClockOrInputOutput) {
  const std::vector<std::string> impure{"thread",  "mutex", "condition_variable", "chrono", "fstream", "iostream", "unistd.h",
                                        "fcntl.h", "sys/"};
  const std::vector<std::string> pure{"core/wire/",          "kernels/strided_copy",   "kernels/copy_",         "kernels/loop_nest",
                                      "receiver/models/",    "receiver/session_table", "receiver/weight_index", "receiver/name_table",
                                      "receiver/expert_map", "receiver/sync_plan",     "receiver/coverage",     "sender_sdk/bucket_plan"};
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file) || !starts_with_any(file.path, pure)) continue;
    for (const Include& include : includes_of(file)) {
      EXPECT_TRUE(include.quoted || !starts_with_any(include.path, impure))
          << file.path << " is pure, but includes <" << include.path << ">";
    }
  }
}

TEST(Preprocessor, AsksForBackendsInAtMostOneFile) {
  std::vector<std::string> files;
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file) || file.path.starts_with("tests/style/")) continue;
    for (const std::string& line : lines_of(file.text)) {
      if (line.starts_with("#") && line.find("HEADRACE_HAS_") != std::string::npos) {
        files.push_back(file.path);
        break;
      }
    }
  }
  EXPECT_LE(files.size(), 1u) << ::testing::PrintToString(files);
}

TEST(Oracle, IncludesNothingOfWhatItJudges) {
  std::size_t seen = 0;
  for (const SourceFile& file : project_files()) {
    if (!is_cpp(file) || !file.path.starts_with("tests/oracle/")) continue;
    ++seen;
    for (const Include& include : includes_of(file)) {
      EXPECT_TRUE(!include.quoted || include.path.starts_with("tests/oracle/")) << file.path << " includes " << include.path;
    }
  }
  EXPECT_GT(seen, 0u);
}

}  // namespace
}  // namespace headrace::style
