#include "core/checkpoint/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace headrace {
namespace {

Status in_file(const std::filesystem::path& path, const Status& status) {
  return Status(status.code(), path.string() + ": " + status.message(), status.source(), status.native());
}

Status refused(const std::filesystem::path& path, std::string_view why) {
  return Status(Code::kInvalidArgument, fmt::format("{}: {}", path.string(), why));
}

Status read_exact(int fd, const std::filesystem::path& path, std::span<std::byte> out, std::int64_t offset) {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(fd, out.data() + done, out.size() - done, offset + static_cast<std::int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(errno, "read " + path.string());
    if (got == 0) return refused(path, fmt::format("ended at byte {} while its header was read", offset + static_cast<std::int64_t>(done)));
    done += static_cast<std::size_t>(got);
  }
  return ok_status();
}

Result<std::vector<std::byte>> read_header(int fd, const std::filesystem::path& path, std::int64_t file_bytes) {
  if (file_bytes < 8) return refused(path, fmt::format("{} bytes, a safetensors file has at least 8", file_bytes));
  std::array<std::byte, 8> word{};
  HEADRACE_RETURN_IF_ERROR(read_exact(fd, path, word, 0));
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8; ++i) length |= std::to_integer<std::uint64_t>(word[i]) << (8 * i);
  if (length > static_cast<std::uint64_t>(kSafetensorsHeaderBytesMax)) {
    return refused(path, fmt::format("a header of {} bytes, at most {} are taken", length, kSafetensorsHeaderBytesMax));
  }
  if (length > static_cast<std::uint64_t>(file_bytes - 8)) {
    return refused(path, fmt::format("a header of {} bytes in a file of {}", length, file_bytes));
  }
  std::vector<std::byte> header(length);
  HEADRACE_RETURN_IF_ERROR(read_exact(fd, path, header, 8));
  return header;
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path, ParseMode mode, DataPart data) {
  SafetensorsFile file;
  file.path_ = path;
  // Without O_NONBLOCK a pipe under this name would hang the open.
  file.fd_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.fd_.valid()) return errno_status(errno, "open " + path.string());
  struct stat info{};
  if (::fstat(file.fd_.get(), &info) != 0) return errno_status(errno, "stat " + path.string());
  if (!S_ISREG(info.st_mode)) return refused(path, "is no regular file");
  file.file_bytes_ = info.st_size;
  Result<std::vector<std::byte>> header = read_header(file.fd_.get(), path, file.file_bytes_);
  if (!header.ok()) return header.status();
  Result<ParsedHeader> parsed = parse_header(header.value(), file.file_bytes_, mode, data);
  if (!parsed.ok()) return in_file(path, parsed.status());
  file.tensors_ = std::move(parsed.value().tensors);
  file.metadata_ = std::move(parsed.value().metadata);
  file.by_name_.reserve(file.tensors_.size());
  for (std::size_t i = 0; i < file.tensors_.size(); ++i) file.by_name_.emplace(file.tensors_[i].name, i);
  return file;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto place = by_name_.find(name);
  return place != by_name_.end() ? &tensors_[place->second] : nullptr;
}

Status SafetensorsFile::check_size() const {
  struct stat info{};
  if (::fstat(fd_.get(), &info) != 0) return errno_status(errno, "stat " + path_.string());
  if (info.st_size == file_bytes_) return ok_status();
  return Status(Code::kFailedPrecondition,
                fmt::format("{}: changed since it was opened: expected {} bytes, found {}", path_.string(), file_bytes_, info.st_size));
}

}  // namespace headrace
