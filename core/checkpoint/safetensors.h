#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "core/base/status.h"
#include "core/base/unique_fd.h"

namespace [[gnu::visibility("default")]] headrace {

/// The reference's own bound on the JSON part of a file.
inline constexpr std::int64_t kSafetensorsHeaderBytesMax = 100'000'000;
inline constexpr std::size_t kSafetensorsTensorsMax = 1'000'000;
inline constexpr std::size_t kSafetensorsNameBytesMax = 4096;

/// How much of what the safetensors crate lets pass is taken.
enum class ParseMode {
  /// What the crate takes, no more and no less, save for our caps on tensors and name length. Of equal keys the last one counts; a
  /// dimension over 2^63-1, legal beside a zero, is stored as 2^63-1.
  kReference,
  /// Refuses also: equal keys, unknown fields, tensors written as arrays, text before the `{`, control characters in names, and
  /// dimensions over 2^63-1.
  kStrict,
};

/// What is asked of the bytes that follow a header.
enum class DataPart {
  kWhole,    // exactly the bytes that the header speaks of
  kIgnored,  // nothing: they may be missing or cut, for those who read headers alone
};

/// One tensor of a file. `begin` and `end` are absolute file offsets of its packed row-major little-endian bytes.
struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t bytes() const noexcept { return end - begin; }
};

struct ParsedHeader {
  std::vector<TensorInfo> tensors;  // by file offset; zero-size tensors at one offset keep the header's order
  std::vector<std::pair<std::string, std::string>> metadata;
};

/// Checks the JSON part of a file of `file_bytes` bytes (length word and data included) against the format. The Status lists every
/// defect of a well-formed header, not only the first. A pure function.
Result<ParsedHeader> parse_header(std::span<const std::byte> header, std::int64_t file_bytes, ParseMode mode,
                                  DataPart data = DataPart::kWhole);

/// What goes into a new file, before offsets are known.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;
};

struct SafetensorsHeader {
  std::vector<std::byte> bytes;     // length word and JSON, a multiple of 8
  std::vector<TensorInfo> tensors;  // in the order their data follows
  std::int64_t file_bytes = 0;      // of the finished file
};

/// Lays out a new file as the reference writer does: widest dtype first, then by name, header padded with spaces to 8 bytes. Refuses equal
/// names and shapes whose bits do not fill bytes.
Result<SafetensorsHeader> write_safetensors_header(std::vector<TensorSpec> tensors,
                                                   const std::vector<std::pair<std::string, std::string>>& metadata = {});

/// One validated safetensors file with its descriptor. Move-only; any thread may read it.
class SafetensorsFile {
 public:
  /// Reads and checks the header alone. Fails when the file is shorter or longer than its header says, unless that is to be ignored.
  /// Messages begin with the path.
  static Result<SafetensorsFile> open(const std::filesystem::path& path, ParseMode mode = ParseMode::kStrict,
                                      DataPart data = DataPart::kWhole);

  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  const std::vector<std::pair<std::string, std::string>>& metadata() const noexcept { return metadata_; }
  const TensorInfo* find(std::string_view name) const;
  /// Open for reading as long as this object lives.
  int fd() const noexcept { return fd_.get(); }
  /// Size when it was opened.
  std::int64_t file_bytes() const noexcept { return file_bytes_; }
  const std::filesystem::path& path() const noexcept { return path_; }
  /// Ok while the file has the size that it had at open; reading a mapping past a cut would kill the process.
  Status check_size() const;

 private:
  SafetensorsFile() = default;

  std::filesystem::path path_;
  UniqueFd fd_;
  std::int64_t file_bytes_ = 0;
  std::vector<TensorInfo> tensors_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  std::unordered_map<std::string_view, std::size_t> by_name_;  // views into tensors_, whose elements stay where they are on a move
};

}  // namespace headrace
