#include "core/checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "core/base/mapped_region.h"

namespace headrace {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kConfigName = "config.json";
constexpr std::size_t kDefectsShown = 16;

Status refused(const fs::path& path, std::string_view why) {
  return Status(Code::kInvalidArgument, fmt::format("{}: {}", path.string(), why));
}

/// Collects what is wrong, so that one run tells all of it.
class Defects {
 public:
  void add(std::string text) {
    if (++count_ <= kDefectsShown) shown_.push_back(std::move(text));
  }
  Status status() const {
    if (count_ == 0) return ok_status();
    std::string text = fmt::format("{}", fmt::join(shown_, "; "));
    if (count_ > shown_.size()) text += fmt::format("; and {} more", count_ - shown_.size());
    return Status(Code::kInvalidArgument, std::move(text));
  }

 private:
  std::vector<std::string> shown_;
  std::size_t count_ = 0;
};

/// A name that stays in the folder whatever it says.
bool plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

struct Index {
  fs::path path;
  JsonValue json;  // holds the text that file_of looks at; its members stay where they are on a move
  std::unordered_map<std::string_view, std::string_view> file_of;  // by tensor name
  std::vector<std::string> files;                                  // natural order, each once
};

Result<Index> read_index(const fs::path& path) {
  Result<JsonValue> json = read_json_file(path.string());
  if (!json.ok()) return json.status();
  Index index;
  index.path = path;
  index.json = std::move(json).value();
  const JsonValue* map = index.json.find("weight_map");
  if (map == nullptr || map->as_object() == nullptr) return refused(path, "has no object \"weight_map\"");
  if (map->as_object()->empty()) return refused(path, "its weight_map is empty");
  index.file_of.reserve(map->as_object()->size());
  std::unordered_set<std::string_view> files;
  Defects defects;
  for (const JsonMember& member : *map->as_object()) {
    const std::string* file = member.value.as_string();
    if (file == nullptr) {
      defects.add(fmt::format("{}: tensor \"{}\": its file is a {}, expected a string", path.string(), member.key, member.value.kind()));
    } else if (!plain_file_name(*file)) {
      defects.add(fmt::format("{}: tensor \"{}\": file \"{}\" is no plain name within the folder", path.string(), member.key, *file));
    } else {
      index.file_of.emplace(member.key, *file);
      files.insert(*file);
    }
  }
  HEADRACE_RETURN_IF_ERROR(defects.status());
  index.files.assign(files.begin(), files.end());
  std::sort(index.files.begin(), index.files.end(), [](const std::string& a, const std::string& b) { return natural_less(a, b); });
  return index;
}

Result<std::vector<std::string>> list_files(const fs::path& dir) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == ".safetensors") names.push_back(entry->path().filename().string());
  }
  if (error) return errno_status(error.value(), "list " + dir.string());
  if (names.empty()) return refused(dir, "holds no *.safetensors file");
  std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) { return natural_less(a, b); });
  return names;
}

/// Both ways: every mapped tensor is in the header of its file, every header's tensor is mapped to that file.
void cross_check(const Index& index, const std::vector<SafetensorsFile>& files, Defects& defects) {
  std::unordered_map<std::string_view, const SafetensorsFile*> by_file;
  std::vector<std::string> file_names;
  file_names.reserve(files.size());
  for (const SafetensorsFile& file : files) {
    by_file.emplace(file_names.emplace_back(file.path().filename().string()), &file);
    for (const TensorInfo& tensor : file.tensors()) {
      const auto mapped = index.file_of.find(tensor.name);
      if (mapped == index.file_of.end()) {
        defects.add(fmt::format("{}: tensor \"{}\" is not in {}", file.path().string(), tensor.name, kIndexName));
      } else if (mapped->second != file_names.back()) {
        defects.add(fmt::format("{}: tensor \"{}\": {} puts it into {}", file.path().string(), tensor.name, kIndexName, mapped->second));
      }
    }
  }
  for (const auto& [name, file_name] : index.file_of) {
    const auto file = by_file.find(file_name);
    if (file != by_file.end() && file->second->find(name) == nullptr) {
      defects.add(fmt::format("{}: tensor \"{}\" is not in {}, where it was expected", index.path.string(), name, file_name));
    }
  }
}

std::string_view take_digits(std::string_view& text) {
  std::size_t n = 0;
  while (n < text.size() && std::isdigit(static_cast<unsigned char>(text[n])) != 0) ++n;
  std::string_view digits = text.substr(0, n);
  text.remove_prefix(n);
  digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
  return digits;
}

}  // namespace

bool natural_less(std::string_view a, std::string_view b) noexcept {
  std::string_view left = a;
  std::string_view right = b;
  while (!left.empty() && !right.empty()) {
    const bool left_digit = std::isdigit(static_cast<unsigned char>(left[0])) != 0;
    const bool right_digit = std::isdigit(static_cast<unsigned char>(right[0])) != 0;
    if (left_digit && right_digit) {
      const std::string_view left_digits = take_digits(left);
      const std::string_view right_digits = take_digits(right);
      if (left_digits.size() != right_digits.size()) return left_digits.size() < right_digits.size();
      if (left_digits != right_digits) return left_digits < right_digits;
      continue;
    }
    if (left[0] != right[0]) return static_cast<unsigned char>(left[0]) < static_cast<unsigned char>(right[0]);
    left.remove_prefix(1);
    right.remove_prefix(1);
  }
  if (left.empty() != right.empty()) return left.empty();
  return a < b;  // "01" and "1": any order, yet always the same
}

struct Checkpoint::State {
  explicit State(DataPart part) : data(part) {}
  Status open(const fs::path& dir_or_file, ParseMode mode);
  Status open_files(const fs::path& dir, const std::vector<std::string>& names, ParseMode mode);
  Status collect(const Index* index);
  Status read_config(const fs::path& path);

  const DataPart data;
  std::vector<SafetensorsFile> files;
  std::vector<CheckpointTensor> tensors;
  std::unordered_map<std::string_view, std::size_t> by_name;  // views into tensors, which no longer change
  std::optional<JsonValue> config;
  std::int64_t total_bytes = 0;
  std::mutex mutex;
  std::vector<std::optional<MappedRegion>> mappings;  // one per file, guarded by mutex; never taken down before the end
};

Status Checkpoint::State::open(const fs::path& dir_or_file, ParseMode mode) {
  std::error_code error;
  const fs::file_status kind = fs::status(dir_or_file, error);
  if (kind.type() == fs::file_type::not_found) return refused(dir_or_file, "there is no such file or folder");
  if (error) return errno_status(error.value(), "stat " + dir_or_file.string());
  if (kind.type() != fs::file_type::directory) {
    const fs::path dir = dir_or_file.has_parent_path() ? dir_or_file.parent_path() : fs::path(".");
    HEADRACE_RETURN_IF_ERROR(open_files(dir, {dir_or_file.filename().string()}, mode));
    HEADRACE_RETURN_IF_ERROR(collect(nullptr));
    return read_config(dir / kConfigName);
  }
  if (fs::exists(fs::symlink_status(dir_or_file / kIndexName, error))) {
    Result<Index> index = read_index(dir_or_file / kIndexName);
    if (!index.ok()) return index.status();
    HEADRACE_RETURN_IF_ERROR(open_files(dir_or_file, index.value().files, mode));
    HEADRACE_RETURN_IF_ERROR(collect(&index.value()));
  } else {
    Result<std::vector<std::string>> names = list_files(dir_or_file);
    if (!names.ok()) return names.status();
    HEADRACE_RETURN_IF_ERROR(open_files(dir_or_file, names.value(), mode));
    HEADRACE_RETURN_IF_ERROR(collect(nullptr));
  }
  return read_config(dir_or_file / kConfigName);
}

Status Checkpoint::State::open_files(const fs::path& dir, const std::vector<std::string>& names, ParseMode mode) {
  Defects defects;
  std::optional<Status> only;
  for (const std::string& name : names) {
    Result<SafetensorsFile> file = SafetensorsFile::open(dir / name, mode, data);
    if (file.ok()) {
      files.push_back(std::move(file).value());
      continue;
    }
    only = only ? Status(Code::kInvalidArgument, "") : file.status();
    defects.add(file.status().message());
  }
  if (!only) return ok_status();
  return only->message().empty() ? defects.status() : *only;  // one failure keeps its own code and errno
}

Status Checkpoint::State::collect(const Index* index) {
  std::size_t count = 0;
  for (const SafetensorsFile& file : files) count += file.tensors().size();
  tensors.reserve(count);
  by_name.reserve(count);
  Defects defects;
  for (std::size_t f = 0; f < files.size(); ++f) {
    for (const TensorInfo& info : files[f].tensors()) {
      CheckpointTensor& tensor = tensors.emplace_back(CheckpointTensor{info, f});
      const auto [first, fresh] = by_name.emplace(tensor.name, tensors.size() - 1);
      if (!fresh) {
        defects.add(fmt::format("{}: tensor \"{}\" stands in {} too", files[f].path().string(), info.name,
                                files[tensors[first->second].file].path().string()));
      }
      total_bytes += info.bytes();
    }
  }
  if (index != nullptr) cross_check(*index, files, defects);
  mappings.resize(files.size());
  return defects.status();
}

Status Checkpoint::State::read_config(const fs::path& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return error ? errno_status(error.value(), "stat " + path.string()) : ok_status();
  Result<JsonValue> value = read_json_file(path.string());
  if (!value.ok()) return value.status();
  config = std::move(value).value();
  return ok_status();
}

Checkpoint::Checkpoint(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Result<Checkpoint> Checkpoint::open(const fs::path& dir_or_file, ParseMode mode, DataPart data) {
  auto state = std::make_unique<State>(data);
  HEADRACE_RETURN_IF_ERROR(state->open(dir_or_file, mode));
  return Checkpoint(std::move(state));
}

const std::vector<CheckpointTensor>& Checkpoint::tensors() const noexcept {
  return state_->tensors;
}

const std::vector<SafetensorsFile>& Checkpoint::files() const noexcept {
  return state_->files;
}

const CheckpointTensor* Checkpoint::find(std::string_view name) const {
  const auto place = state_->by_name.find(name);
  return place != state_->by_name.end() ? &state_->tensors[place->second] : nullptr;
}

Result<std::span<const std::byte>> Checkpoint::bytes(const CheckpointTensor& tensor) const {
  const SafetensorsFile& file = state_->files.at(tensor.file);
  if (state_->data == DataPart::kIgnored) {
    return Status(Code::kFailedPrecondition, fmt::format("{}: tensor {}: opened for its header alone", file.path().string(), tensor.name));
  }
  // Each time, not only before mapping: a page beyond a cut kills the reader.
  HEADRACE_RETURN_IF_ERROR(file.check_size());
  const std::lock_guard lock(state_->mutex);
  std::optional<MappedRegion>& mapping = state_->mappings[tensor.file];
  if (!mapping) {
    Result<MappedRegion> region = MappedRegion::map_file(file.fd(), static_cast<std::size_t>(file.file_bytes()));
    if (!region.ok()) {
      return Status(region.status().code(), file.path().string() + ": " + region.status().message(), region.status().source(),
                    region.status().native());
    }
    mapping = std::move(region).value();
  }
  return std::span<const std::byte>(mapping->bytes())
      .subspan(static_cast<std::size_t>(tensor.begin), static_cast<std::size_t>(tensor.bytes()));
}

const JsonValue* Checkpoint::config() const noexcept {
  return state_->config ? &*state_->config : nullptr;
}

std::int64_t Checkpoint::total_bytes() const noexcept {
  return state_->total_bytes;
}

std::vector<const CheckpointTensor*> natural_order(const Checkpoint& checkpoint) {
  std::vector<const CheckpointTensor*> tensors;
  tensors.reserve(checkpoint.tensors().size());
  for (const CheckpointTensor& tensor : checkpoint.tensors()) tensors.push_back(&tensor);
  std::sort(tensors.begin(), tensors.end(),
            [](const CheckpointTensor* a, const CheckpointTensor* b) { return natural_less(a->name, b->name); });
  return tensors;
}

}  // namespace headrace
