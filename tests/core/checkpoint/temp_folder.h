#pragma once

#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace headrace::testing {

/// A fresh folder that goes with the object.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "headrace-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make " + pattern);
    path_ = pattern;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, std::string_view content) const {
    std::ofstream file(path_ / name, std::ios::binary);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// Length word (the JSON's own length unless told otherwise), JSON, then `data_bytes` bytes that count up.
inline std::string safetensors_text(std::string_view json, std::size_t data_bytes) {
  std::string text;
  for (std::size_t i = 0; i < 8; ++i) text += static_cast<char>(json.size() >> (8 * i));
  text += json;
  for (std::size_t i = 0; i < data_bytes; ++i) text += static_cast<char>(i);
  return text;
}

}  // namespace headrace::testing
