#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

/// The repository as text, for tests that hold it to its own rules.
namespace headrace::style {

struct SourceFile {
  std::string path;  // relative to the root, with '/'
  std::string text;
};

inline std::filesystem::path root() {
  return HEADRACE_SOURCE_DIR;
}

inline std::string read_text(const std::filesystem::path& path) {
  const std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Everything that belongs to the project; no build folders, caches or version control.
inline std::vector<SourceFile> project_files() {
  namespace fs = std::filesystem;
  std::vector<SourceFile> files;
  for (auto entry = fs::recursive_directory_iterator(root()); entry != fs::recursive_directory_iterator(); ++entry) {
    const std::string name = entry->path().filename().string();
    const bool hidden = name.starts_with(".") && name != ".ci" && name != ".clang-tidy" && name != ".clang-format";
    if (entry->is_directory() && (hidden || name == "build" || name == "__pycache__")) {
      entry.disable_recursion_pending();
      continue;
    }
    if (!entry->is_regular_file() || hidden) continue;
    files.push_back({fs::relative(entry->path(), root()).generic_string(), read_text(entry->path())});
  }
  return files;
}

inline bool is_cpp(const SourceFile& file) {
  return file.path.ends_with(".cpp") || file.path.ends_with(".h");
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

struct Include {
  std::string path;
  bool quoted = false;
};

inline std::vector<Include> includes_of(const SourceFile& file) {
  std::vector<Include> includes;
  for (const std::string& line : lines_of(file.text)) {
    if (!line.starts_with("#include ")) continue;
    const std::size_t open = line.find_first_of("\"<");
    const std::size_t close = open == std::string::npos ? open : line.find_first_of("\">", open + 1);
    if (close != std::string::npos) includes.push_back({line.substr(open + 1, close - open - 1), line[open] == '"'});
  }
  return includes;
}

}  // namespace headrace::style
