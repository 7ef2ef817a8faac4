#include "examples/demo/make_checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "core/base/unique_fd.h"
#include "examples/demo/demo_model_files.h"
#include "examples/demo/demo_values.h"

namespace headrace {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStampName = "headrace-demo.txt";
constexpr std::size_t kWriteBytes = std::size_t{4} << 20;

Status write_all(int fd, const fs::path& path, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno_status(errno, fmt::format("write {} bytes to {}", bytes.size(), path.string()));
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
  return ok_status();
}

Result<UniqueFd> create_file(const fs::path& path) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd.valid()) return errno_status(errno, "create " + path.string());
  return fd;
}

Status write_text(const fs::path& path, const std::string& text) {
  Result<UniqueFd> fd = create_file(path);
  if (!fd.ok()) return fd.status();
  return write_all(fd.value().get(), path, std::as_bytes(std::span(text)));
}

/// Writes the shards of a model, any number of threads at once.
class ShardWriter {
 public:
  ShardWriter(const fs::path& dir, const DemoModel& model, const std::vector<DemoShard>& shards)
      : dir_(dir), model_(model), shards_(shards) {}

  /// Takes shards until none is left or one failed. `progress` may be empty.
  void work(const DemoProgress& progress, std::int64_t bytes_total);
  Status status() const {
    const std::lock_guard lock(mutex_);
    return status_;
  }

 private:
  Status write_shard(const DemoShard& shard, const DemoProgress& progress, std::int64_t bytes_total);
  Status write_tensor(int fd, const fs::path& path, const TensorInfo& tensor, std::vector<std::byte>& buffer);

  const fs::path dir_;
  const DemoModel& model_;
  const std::vector<DemoShard>& shards_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::int64_t> bytes_done_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  Status status_;  // the first failure, guarded by mutex_
};

void ShardWriter::work(const DemoProgress& progress, std::int64_t bytes_total) {
  while (!failed_.load()) {
    const std::size_t i = next_.fetch_add(1);
    if (i >= shards_.size()) return;
    Status status = write_shard(shards_[i], progress, bytes_total);
    if (status.ok()) continue;
    const std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = std::move(status);
    failed_.store(true);
  }
}

Status ShardWriter::write_shard(const DemoShard& shard, const DemoProgress& progress, std::int64_t bytes_total) {
  const fs::path path = dir_ / shard.file;
  Result<SafetensorsHeader> header = write_safetensors_header(shard.tensors, {{"format", "pt"}});
  if (!header.ok()) return header.status();
  Result<UniqueFd> fd = create_file(path);
  if (!fd.ok()) return fd.status();
  std::vector<std::byte> buffer(std::move(header.value().bytes));
  buffer.reserve(kWriteBytes);
  for (const TensorInfo& tensor : header.value().tensors) {
    HEADRACE_RETURN_IF_ERROR(write_tensor(fd.value().get(), path, tensor, buffer));
    bytes_done_.fetch_add(tensor.bytes());
    if (progress) progress(bytes_done_.load(), bytes_total);
    if (failed_.load()) return ok_status();  // the other thread has the reason
  }
  return write_all(fd.value().get(), path, buffer);
}

Status ShardWriter::write_tensor(int fd, const fs::path& path, const TensorInfo& tensor, std::vector<std::byte>& buffer) {
  const std::uint64_t stream = demo_mix(demo_name_key(tensor.name) ^ demo_mix(model_.seed));
  const auto bytes = static_cast<std::uint64_t>(tensor.bytes());
  for (std::uint64_t o = 0; o < bytes;) {
    if (buffer.size() >= kWriteBytes) {
      HEADRACE_RETURN_IF_ERROR(write_all(fd, path, buffer));
      buffer.clear();
    }
    const std::size_t at = buffer.size();
    const std::size_t piece = std::min<std::size_t>(bytes - o, std::max<std::size_t>(kWriteBytes - at, 8) / 8 * 8);
    buffer.resize(at + piece);
    for (std::size_t i = 0; i < piece; i += 8) {
      const std::uint64_t word = demo_mix(stream + (o + i) / 8 * 0x9E3779B97F4A7C15u);
      std::memcpy(buffer.data() + at + i, &word, std::min<std::size_t>(8, piece - i));
    }
    o += piece;
  }
  return ok_status();
}

Status write_shards(const fs::path& dir, const DemoModel& model, const std::vector<DemoShard>& shards, const DemoProgress& progress) {
  const std::int64_t total = demo_checkpoint_bytes(model);
  ShardWriter writer(dir, model, shards);
  {
    const std::jthread second([&] { writer.work({}, total); });
    writer.work(progress, total);
  }
  return writer.status();
}

Status check_space(const fs::path& dir, const DemoModel& model) {
  std::error_code error;
  const fs::space_info space = fs::space(dir, error);
  if (error) return errno_status(error.value(), "ask for the free space of " + dir.string());
  constexpr std::uint64_t kSpare = std::uint64_t{64} << 20;  // headers, index, and not to fill a disk to its last byte
  const std::uint64_t needed = static_cast<std::uint64_t>(demo_checkpoint_bytes(model)) + kSpare;
  if (space.available >= needed) return ok_status();
  return Status(Code::kResourceExhausted,
                fmt::format("the demo checkpoint in {} needs {} bytes of disk, {} are free", dir.string(), needed, space.available));
}

std::optional<std::string> read_stamp(const fs::path& dir) {
  const UniqueFd fd(::open((dir / kStampName).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return std::nullopt;
  std::array<char, 4096> text{};
  const ssize_t got = ::read(fd.get(), text.data(), text.size());
  if (got < 0) return std::nullopt;
  return std::string(text.data(), static_cast<std::size_t>(got));
}

/// Creates and locks the folder to write into. Another run may finish, and rename the folder away, while this one waits for its lock; then
/// the lock is of no use and the whole begins anew. The result is invalid when the checkpoint turned up meanwhile.
Result<UniqueFd> lock_partial(const fs::path& partial, const fs::path& dir, const DemoModel& model) {
  for (;;) {
    std::error_code error;
    fs::create_directories(partial, error);
    if (error) return errno_status(error.value(), "create " + partial.string());
    UniqueFd fd(::open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd.valid() && errno == ENOENT) continue;
    if (!fd.valid()) return errno_status(errno, "open " + partial.string());
    while (::flock(fd.get(), LOCK_EX) != 0) {
      if (errno != EINTR) return errno_status(errno, "lock " + partial.string());
    }
    struct stat held{};
    struct stat named{};
    const bool same =
        ::fstat(fd.get(), &held) == 0 && ::stat(partial.c_str(), &named) == 0 && held.st_ino == named.st_ino && held.st_dev == named.st_dev;
    if (!same) continue;
    if (!demo_checkpoint_exists(dir, model)) return fd;
    fs::remove_all(partial, error);
    return UniqueFd();
  }
}

Status clear_folder(const fs::path& dir) {
  std::error_code error;
  for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code failed;
    fs::remove_all(entry->path(), failed);
    if (failed) return errno_status(failed.value(), "remove " + entry->path().string());
  }
  return error ? errno_status(error.value(), "list " + dir.string()) : ok_status();
}

/// Makes room at `dir` for the rename: only what this function's own kind has written may go.
Status vacate(const fs::path& dir) {
  std::error_code error;
  if (!fs::exists(dir, error)) return error ? errno_status(error.value(), "stat " + dir.string()) : ok_status();
  if (fs::is_directory(dir, error) && fs::is_empty(dir, error)) return ok_status();
  if (!read_stamp(dir)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: holds something that the demo has not made: choose another folder", dir.string()));
  }
  fs::remove_all(dir, error);
  return error ? errno_status(error.value(), "remove " + dir.string()) : ok_status();
}

Status write_checkpoint(const fs::path& partial, const DemoModel& model, const DemoProgress& progress) {
  HEADRACE_RETURN_IF_ERROR(clear_folder(partial));
  HEADRACE_RETURN_IF_ERROR(check_space(partial, model));
  const std::vector<DemoShard> shards = demo_shards(model);
  HEADRACE_RETURN_IF_ERROR(write_shards(partial, model, shards, progress));
  HEADRACE_RETURN_IF_ERROR(write_text(partial / "config.json", demo_config_json(model)));
  HEADRACE_RETURN_IF_ERROR(write_text(partial / "model.safetensors.index.json", demo_index_json(model, shards)));
  return write_text(partial / kStampName, demo_stamp(model));
}

}  // namespace

bool demo_checkpoint_exists(const fs::path& dir, const DemoModel& model) {
  return read_stamp(dir) == demo_stamp(model);
}

Status make_demo_checkpoint(const fs::path& dir, const DemoModel& model, const DemoProgress& progress) {
  if (demo_checkpoint_exists(dir, model)) return ok_status();
  const fs::path target = fs::absolute(dir).lexically_normal();
  fs::path partial = target;
  if (!partial.has_filename()) partial = partial.parent_path();  // "folder/"
  partial += ".partial";
  Result<UniqueFd> lock = lock_partial(partial, target, model);
  if (!lock.ok()) return lock.status();
  if (!lock.value().valid()) return ok_status();
  Status status = write_checkpoint(partial, model, progress);
  if (status.ok()) status = vacate(target);
  if (status.ok() && ::rename(partial.c_str(), target.c_str()) != 0) {
    status = errno_status(errno, fmt::format("rename {} to {}", partial.string(), target.string()));
  }
  if (!status.ok()) {
    std::error_code ignored;  // the first failure is the one to tell
    fs::remove_all(partial, ignored);
  }
  return status;
}

}  // namespace headrace
