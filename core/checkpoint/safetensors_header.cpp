// Without its throwing conversions: every result of the parser is asked for its error.
#define SIMDJSON_EXCEPTIONS 0

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>

#include "core/checkpoint/safetensors.h"

namespace headrace {
namespace {

namespace ondemand = simdjson::ondemand;

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr int kDepthMax = 127;  // containers within containers, the bound of the reference's JSON library
constexpr std::size_t kDefectsListed = 16;

/// A name as it may stand in a message: on one line, short and still valid UTF-8.
std::string shown(std::string_view name) {
  constexpr std::size_t kShown = 200;
  std::size_t end = std::min(name.size(), kShown);
  while (end < name.size() && end > 0 && (static_cast<unsigned char>(name[end]) & 0xC0) == 0x80) --end;
  std::string text = "\"";
  for (const char c : name.substr(0, end)) {
    if (static_cast<unsigned char>(c) < 0x20) {
      text += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      text += c;
    }
  }
  return text + (name.size() > end ? "…\"" : "\"");
}

bool has_control_character(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

/// The parser turns an escaped low surrogate that stands alone into three bytes that no valid UTF-8 text has.
bool has_surrogate(std::string_view text) {
  for (std::size_t i = 0; i + 1 < text.size(); ++i) {
    if (static_cast<unsigned char>(text[i]) == 0xED && static_cast<unsigned char>(text[i + 1]) >= 0xA0) return true;
  }
  return false;
}

struct Entry {
  std::string_view name;  // lives in the parser's buffer
  Dtype dtype = Dtype::kU8;
  std::span<const std::uint64_t> dims;  // set once all are read
  std::size_t dims_begin = 0;           // into the reader's list of all dimensions
  std::size_t dims_count = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::size_t order = 0;  // in the header
};

/// Bits of the packed tensor; nullopt when a product on the way, dimensions in order, does not fit 64 bits.
std::optional<std::uint64_t> entry_bits(const Entry& entry) {
  std::uint64_t product = 1;
  for (const std::uint64_t dim : entry.dims) {
    if (__builtin_mul_overflow(product, dim, &product)) return std::nullopt;
  }
  if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(dtype_bits(entry.dtype)), &product)) return std::nullopt;
  return product;
}

std::string dims_text(std::span<const std::uint64_t> dims) {
  return fmt::format("[{}]", fmt::join(dims, ","));
}

/// Reads the JSON. Text that is no JSON stops it (`fatal`); what is JSON yet not a header is collected in `defects`.
/// The members that return bool return false when parsing cannot go on.
class HeaderReader {
 public:
  HeaderReader(ParseMode mode, DataPart data) : strict_(mode == ParseMode::kStrict), data_ignored_(data == DataPart::kIgnored) {}

  bool read(const simdjson::padded_string& text);
  void check_offsets(std::int64_t header_bytes, std::int64_t file_bytes);
  Status status() const;
  ParsedHeader take(std::int64_t header_bytes);

 private:
  bool fatal(std::string why) {
    fatal_ = std::move(why);
    return false;
  }
  bool fatal(simdjson::error_code error) { return fatal(std::string("the header is no JSON: ") + simdjson::error_message(error)); }
  void defect(std::string why) {
    if (++defect_count_ <= kDefectsListed) defects_.push_back(std::move(why));
  }
  void tensor_defect(std::string_view name, std::string_view why) { defect(fmt::format("tensor {}: {}", shown(name), why)); }

  bool read_key(ondemand::field& field, std::string_view& key);
  bool read_metadata(ondemand::value value);
  bool read_tensor(std::string_view name, ondemand::value value);
  bool read_tensor_object(Entry& entry, ondemand::object object, bool& whole);
  bool read_tensor_array(Entry& entry, ondemand::array array, bool& whole);
  bool read_dtype(const Entry& entry, ondemand::value value, std::string_view& text);
  bool read_part(int part, Entry& entry, ondemand::value value, bool& whole);
  bool read_integers(std::string_view name, std::string_view what, ondemand::value value, std::vector<std::uint64_t>& out, bool& whole);
  bool read_ignored(ondemand::value value, int depth);
  void add(const Entry& entry);

  const bool strict_;
  const bool data_ignored_;
  ondemand::parser parser_;
  std::vector<Entry> entries_;
  std::vector<std::uint64_t> all_dims_;  // one list for all tensors: an allocation for each would cost more than the parsing
  std::vector<std::uint64_t> offsets_;   // of the tensor at hand
  std::unordered_map<std::string_view, std::size_t> by_name_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  bool metadata_seen_ = false;
  bool all_whole_ = true;
  std::string fatal_;
  std::vector<std::string> defects_;
  std::size_t defect_count_ = 0;
};

bool HeaderReader::read(const simdjson::padded_string& text) {
  const std::string_view view(text);
  if (view.starts_with("\xEF\xBB\xBF")) return fatal("the header begins with a byte order mark");
  if (strict_ && !view.starts_with('{')) defect("the header does not begin with '{'");
  constexpr std::size_t kTypicalEntryBytes = 100;
  entries_.reserve(view.size() / kTypicalEntryBytes);
  by_name_.reserve(view.size() / kTypicalEntryBytes);
  ondemand::document document;
  if (const auto error = parser_.iterate(text).get(document)) return fatal(error);
  ondemand::object object;
  if (const auto error = document.get_object().get(object)) return fatal(error);
  for (auto result : object) {
    ondemand::field field;
    if (const auto error = std::move(result).get(field)) return fatal(error);
    std::string_view key;
    if (!read_key(field, key)) return false;
    if (key == kMetadataKey) {
      if (metadata_seen_) return fatal("__metadata__ stands twice");
      metadata_seen_ = true;
      if (!read_metadata(field.value())) return false;
    } else if (!read_tensor(key, field.value())) {
      return false;
    }
  }
  // The parser stops after the object; where it stands tells whether that was the end of the text.
  const char* rest = nullptr;
  return document.current_location().get(rest) == simdjson::OUT_OF_BOUNDS || fatal("text follows the header's object");
}

bool HeaderReader::read_key(ondemand::field& field, std::string_view& key) {
  if (const auto error = field.unescaped_key().get(key)) return fatal(error);
  return !has_surrogate(key) || fatal("a key has half of a surrogate pair");
}

bool HeaderReader::read_metadata(ondemand::value value) {
  auto type = ondemand::json_type::null;
  if (const auto error = value.type().get(type)) return fatal(error);
  if (type == ondemand::json_type::null) return read_ignored(value, 1);
  ondemand::object object;
  if (value.get_object().get(object)) return fatal("__metadata__ is no object");
  for (auto result : object) {
    ondemand::field field;
    if (const auto error = std::move(result).get(field)) return fatal(error);
    std::string_view key;
    if (!read_key(field, key)) return false;
    std::string_view text;
    if (field.value().get_string().get(text)) return fatal(fmt::format("__metadata__ {} is no string", shown(key)));
    if (has_surrogate(text)) return fatal("a text in __metadata__ has half of a surrogate pair");
    const auto same = std::find_if(metadata_.begin(), metadata_.end(), [&](const auto& pair) { return pair.first == key; });
    if (same == metadata_.end()) {
      metadata_.emplace_back(key, text);
      continue;
    }
    same->second = text;
    if (strict_) defect(fmt::format("__metadata__ has the key {} twice", shown(key)));
  }
  return true;
}

bool HeaderReader::read_tensor(std::string_view name, ondemand::value value) {
  if (entries_.size() >= kSafetensorsTensorsMax) return fatal(fmt::format("more than {} tensors", kSafetensorsTensorsMax));
  if (name.size() > kSafetensorsNameBytesMax) {
    tensor_defect(name, fmt::format("a name of {} bytes, at most {} are taken", name.size(), kSafetensorsNameBytesMax));
  }
  if (strict_ && has_control_character(name)) tensor_defect(name, "control characters in the name");
  auto type = ondemand::json_type::null;
  if (const auto error = value.type().get(type)) return fatal(error);
  Entry entry;
  entry.name = name;
  bool whole = true;
  if (type == ondemand::json_type::object) {
    ondemand::object object;
    if (const auto error = value.get_object().get(object)) return fatal(error);
    if (!read_tensor_object(entry, object, whole)) return false;
  } else if (type == ondemand::json_type::array) {
    if (strict_) tensor_defect(name, "written as an array");
    ondemand::array array;
    if (const auto error = value.get_array().get(array)) return fatal(error);
    if (!read_tensor_array(entry, array, whole)) return false;
  } else {
    return fatal(fmt::format("tensor {}: its value is no object", shown(name)));
  }
  if (whole) {
    add(entry);
  } else {
    all_whole_ = false;
  }
  return true;
}

constexpr std::array<std::string_view, 3> kParts{"dtype", "shape", "data_offsets"};

bool HeaderReader::read_tensor_object(Entry& entry, ondemand::object object, bool& whole) {
  std::array<bool, 3> seen{};
  for (auto result : object) {
    ondemand::field field;
    if (const auto error = std::move(result).get(field)) return fatal(error);
    std::string_view key;
    if (!read_key(field, key)) return false;
    const auto part = static_cast<std::size_t>(std::find(kParts.begin(), kParts.end(), key) - kParts.begin());
    if (part == kParts.size()) {
      if (strict_) tensor_defect(entry.name, fmt::format("unknown field {}", shown(key)));
      if (!read_ignored(field.value(), 2)) return false;
      continue;
    }
    if (seen[part]) return fatal(fmt::format("tensor {}: field {} stands twice", shown(entry.name), key));
    seen[part] = true;
    if (!read_part(static_cast<int>(part), entry, field.value(), whole)) return false;
  }
  for (std::size_t part = 0; part < kParts.size(); ++part) {
    if (seen[part]) continue;
    tensor_defect(entry.name, fmt::format("field {} is missing", kParts[part]));
    whole = false;
  }
  return true;
}

bool HeaderReader::read_tensor_array(Entry& entry, ondemand::array array, bool& whole) {
  int part = 0;
  for (auto result : array) {
    ondemand::value value;
    if (const auto error = std::move(result).get(value)) return fatal(error);
    if (part == 3) return fatal(fmt::format("tensor {}: an array of more than three parts", shown(entry.name)));
    if (!read_part(part, entry, value, whole)) return false;
    ++part;
  }
  return part == 3 || fatal(fmt::format("tensor {}: an array of {} parts, expected three", shown(entry.name), part));
}

/// A string, or for the reference also an object with the dtype as its only key and null as the value.
bool HeaderReader::read_dtype(const Entry& entry, ondemand::value value, std::string_view& text) {
  auto type = ondemand::json_type::null;
  if (const auto error = value.type().get(type)) return fatal(error);
  if (type == ondemand::json_type::string) {
    if (const auto error = value.get_string().get(text)) return fatal(error);
    return true;
  }
  ondemand::object object;
  if (value.get_object().get(object)) return fatal(fmt::format("tensor {}: dtype is no string", shown(entry.name)));
  if (strict_) tensor_defect(entry.name, "dtype is no string");
  int members = 0;
  for (auto result : object) {
    ondemand::field field;
    if (const auto error = std::move(result).get(field)) return fatal(error);
    bool null = false;
    if (!read_key(field, text) || field.value().is_null().get(null)) null = false;
    if (!null || ++members > 1) return fatal(fmt::format("tensor {}: dtype is no string", shown(entry.name)));
  }
  return members == 1 || fatal(fmt::format("tensor {}: dtype is no string", shown(entry.name)));
}

bool HeaderReader::read_part(int part, Entry& entry, ondemand::value value, bool& whole) {
  if (part == 0) {
    std::string_view text;
    if (!read_dtype(entry, value, text)) return false;
    if (const auto dtype = parse_dtype(text)) {
      entry.dtype = *dtype;
    } else {
      tensor_defect(entry.name, fmt::format("dtype {} is unknown", shown(text)));
      whole = false;
    }
    return true;
  }
  if (part == 1) {
    entry.dims_begin = all_dims_.size();
    if (!read_integers(entry.name, "shape", value, all_dims_, whole)) return false;
    entry.dims_count = all_dims_.size() - entry.dims_begin;
    return true;
  }
  offsets_.clear();
  if (!read_integers(entry.name, "data_offsets", value, offsets_, whole)) return false;
  if (offsets_.size() == 2) {
    entry.begin = offsets_[0];
    entry.end = offsets_[1];
  } else if (whole) {
    tensor_defect(entry.name, fmt::format("data_offsets has {} numbers, expected 2", offsets_.size()));
    whole = false;
  }
  return true;
}

bool HeaderReader::read_integers(std::string_view name, std::string_view what, ondemand::value value, std::vector<std::uint64_t>& out,
                                 bool& whole) {
  ondemand::array array;
  if (value.get_array().get(array)) return fatal(fmt::format("tensor {}: {} is no array", shown(name), what));
  for (auto result : array) {
    ondemand::value item;
    if (const auto error = std::move(result).get(item)) return fatal(error);
    std::uint64_t number = 0;
    if (item.get_uint64().get(number)) {
      return fatal(fmt::format("tensor {}: {} holds something that is no whole number from 0 to 2^64-1", shown(name), what));
    }
    if (strict_ && what == "shape" && number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      tensor_defect(name, fmt::format("a dimension of {}, at most 2^63-1 is taken", number));
      whole = false;
    }
    out.push_back(number);
  }
  return true;
}

/// Walks a value nobody reads: the on-demand parser checks only what is asked for, the reference checks all.
bool HeaderReader::read_ignored(ondemand::value value, int depth) {
  auto type = ondemand::json_type::null;
  if (const auto error = value.type().get(type)) return fatal(error);
  switch (type) {
    case ondemand::json_type::object: {
      if (depth >= kDepthMax) return fatal("the header is nested too deep");
      ondemand::object object;
      if (const auto error = value.get_object().get(object)) return fatal(error);
      for (auto result : object) {
        ondemand::field field;
        if (const auto error = std::move(result).get(field)) return fatal(error);
        std::string_view key;
        if (!read_key(field, key) || !read_ignored(field.value(), depth + 1)) return false;
      }
      return true;
    }
    case ondemand::json_type::array: {
      if (depth >= kDepthMax) return fatal("the header is nested too deep");
      ondemand::array array;
      if (const auto error = value.get_array().get(array)) return fatal(error);
      for (auto result : array) {
        ondemand::value item;
        if (const auto error = std::move(result).get(item)) return fatal(error);
        if (!read_ignored(item, depth + 1)) return false;
      }
      return true;
    }
    case ondemand::json_type::string: {
      std::string_view text;
      if (const auto error = value.get_string().get(text)) return fatal(error);
      return !has_surrogate(text) || fatal("a text has half of a surrogate pair");
    }
    case ondemand::json_type::number: {
      double number = 0;
      const auto error = value.get_double().get(number);
      return error == simdjson::SUCCESS || fatal(error);
    }
    case ondemand::json_type::boolean: {
      bool flag = false;
      const auto error = value.get_bool().get(flag);
      return error == simdjson::SUCCESS || fatal(error);
    }
    case ondemand::json_type::null: {
      bool null = false;
      const auto error = value.is_null().get(null);
      if (error) return fatal(error);
      return null || fatal("a word that is no JSON");
    }
  }
  return fatal("a value of unknown type");
}

void HeaderReader::add(const Entry& entry) {
  const auto [place, fresh] = by_name_.emplace(entry.name, entries_.size());
  if (fresh) {
    entries_.push_back(entry);
    entries_.back().order = place->second;
    return;
  }
  if (strict_) tensor_defect(entry.name, "stands twice");
  entries_[place->second] = entry;
  entries_[place->second].order = place->second;
}

void HeaderReader::check_offsets(std::int64_t header_bytes, std::int64_t file_bytes) {
  if (!all_whole_) return;  // offsets of the others would only seem wrong
  for (Entry& entry : entries_) entry.dims = std::span(all_dims_).subspan(entry.dims_begin, entry.dims_count);
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& x, const Entry& y) { return std::tie(x.begin, x.end, x.order) < std::tie(y.begin, y.end, y.order); });
  // Without the data's own size the only bound is that offsets in the file are numbers.
  constexpr std::int64_t kFileBytesMax = std::numeric_limits<std::int64_t>::max();
  const auto data_bytes = static_cast<std::uint64_t>((data_ignored_ ? kFileBytesMax : file_bytes) - 8 - header_bytes);
  std::uint64_t expected_begin = 0;
  const Entry* cut = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.begin != expected_begin || entry.end < entry.begin) {
      tensor_defect(entry.name, fmt::format("data_offsets [{},{}], expected to begin at {}", entry.begin, entry.end, expected_begin));
    }
    expected_begin = entry.end;
    if (cut == nullptr && entry.end > data_bytes) cut = &entry;
    const std::optional<std::uint64_t> bits = entry_bits(entry);
    if (!bits) {
      tensor_defect(entry.name, fmt::format("the size of {} {} does not fit 64 bits", dtype_name(entry.dtype), dims_text(entry.dims)));
    } else if (*bits % 8 != 0) {
      tensor_defect(entry.name,
                    fmt::format("{} {} has {} bits, no whole number of bytes", dtype_name(entry.dtype), dims_text(entry.dims), *bits));
    } else if (entry.end - entry.begin != *bits / 8) {
      tensor_defect(entry.name, fmt::format("data_offsets hold {} bytes, {} {} needs {}", entry.end - entry.begin, dtype_name(entry.dtype),
                                            dims_text(entry.dims), *bits / 8));
    }
  }
  if (cut != nullptr) {
    tensor_defect(cut->name,
                  fmt::format("its data end at file offset {}+{}, the file ends at {}: truncated", 8 + header_bytes, cut->end, file_bytes));
  } else if (expected_begin < data_bytes && !data_ignored_) {
    defect(fmt::format("{} bytes follow the last tensor, expected none (file of {} bytes)", data_bytes - expected_begin, file_bytes));
  }
}

Status HeaderReader::status() const {
  if (!fatal_.empty()) return Status(Code::kInvalidArgument, fatal_);
  if (defect_count_ == 0) return ok_status();
  std::string text = fmt::format("{}", fmt::join(defects_, "; "));
  if (defect_count_ > defects_.size()) text += fmt::format("; and {} more", defect_count_ - defects_.size());
  return Status(Code::kInvalidArgument, std::move(text));
}

ParsedHeader HeaderReader::take(std::int64_t header_bytes) {
  ParsedHeader header;
  header.metadata = std::move(metadata_);
  header.tensors.reserve(entries_.size());
  constexpr auto kDimMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  for (const Entry& entry : entries_) {
    TensorInfo info;
    info.name = entry.name;
    info.dtype = entry.dtype;
    info.shape.reserve(entry.dims.size());
    for (const std::uint64_t dim : entry.dims) info.shape.push_back(static_cast<std::int64_t>(std::min(dim, kDimMax)));
    info.begin = 8 + header_bytes + static_cast<std::int64_t>(entry.begin);
    info.end = 8 + header_bytes + static_cast<std::int64_t>(entry.end);
    header.tensors.push_back(std::move(info));
  }
  return header;
}

/// Position of a dtype in the reference's own list, by which its writer sorts.
int writer_rank(Dtype dtype) {
  constexpr std::array kOrder{Dtype::kBool,   Dtype::kF4,     Dtype::kF6E2M3, Dtype::kF6E3M2,     Dtype::kU8,         Dtype::kI8,
                              Dtype::kF8E5M2, Dtype::kF8E4M3, Dtype::kF8E8M0, Dtype::kF8E4M3Fnuz, Dtype::kF8E5M2Fnuz, Dtype::kI16,
                              Dtype::kU16,    Dtype::kF16,    Dtype::kBF16,   Dtype::kI32,        Dtype::kU32,        Dtype::kF32,
                              Dtype::kC64,    Dtype::kF64,    Dtype::kI64,    Dtype::kU64};
  return static_cast<int>(std::find(kOrder.begin(), kOrder.end(), dtype) - kOrder.begin());
}

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  out += '"';
}

void append_metadata(std::string& json, const std::vector<std::pair<std::string, std::string>>& metadata) {
  append_json_string(json, kMetadataKey);
  json += ":{";
  for (std::size_t i = 0; i < metadata.size(); ++i) {
    if (i != 0) json += ',';
    append_json_string(json, metadata[i].first);
    json += ':';
    append_json_string(json, metadata[i].second);
  }
  json += '}';
}

}  // namespace

Result<ParsedHeader> parse_header(std::span<const std::byte> header, std::int64_t file_bytes, ParseMode mode, DataPart data) {
  const auto header_bytes = static_cast<std::int64_t>(header.size());
  if (header_bytes > kSafetensorsHeaderBytesMax) {
    return Status(Code::kInvalidArgument,
                  fmt::format("a header of {} bytes, at most {} are taken", header_bytes, kSafetensorsHeaderBytesMax));
  }
  if (file_bytes < 8 || header_bytes > file_bytes - 8) {
    return Status(Code::kInvalidArgument, fmt::format("a header of {} bytes in a file of {}", header_bytes, file_bytes));
  }
  const simdjson::padded_string text(reinterpret_cast<const char*>(header.data()), header.size());
  HeaderReader reader(mode, data);
  if (reader.read(text)) reader.check_offsets(header_bytes, file_bytes);
  HEADRACE_RETURN_IF_ERROR(reader.status());
  return reader.take(header_bytes);
}

Result<SafetensorsHeader> write_safetensors_header(std::vector<TensorSpec> tensors,
                                                   const std::vector<std::pair<std::string, std::string>>& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) {
    const int rank_a = writer_rank(a.dtype);
    const int rank_b = writer_rank(b.dtype);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });
  SafetensorsHeader header;
  std::unordered_map<std::string_view, bool> names;
  std::string json = "{";
  if (!metadata.empty()) append_metadata(json, metadata);
  std::int64_t offset = 0;
  for (const TensorSpec& tensor : tensors) {
    const std::optional<std::int64_t> bytes = byte_count(tensor.dtype, tensor.shape);
    std::int64_t end = 0;
    if (!bytes || __builtin_add_overflow(offset, *bytes, &end)) {
      return Status(Code::kInvalidArgument, fmt::format("tensor {}: {} {} has no size in bytes that fits", shown(tensor.name),
                                                        dtype_name(tensor.dtype), to_string(tensor.shape)));
    }
    if (tensor.name == kMetadataKey || !names.emplace(tensor.name, true).second) {
      return Status(Code::kInvalidArgument, fmt::format("tensor {}: the name is taken", shown(tensor.name)));
    }
    if (json.size() > 1) json += ',';
    append_json_string(json, tensor.name);
    json += fmt::format(":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", dtype_name(tensor.dtype), to_string(tensor.shape),
                        offset, end);
    header.tensors.push_back(TensorInfo{tensor.name, tensor.dtype, tensor.shape, offset, end});
    offset = end;
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  if (json.size() > static_cast<std::size_t>(kSafetensorsHeaderBytesMax)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("a header of {} bytes, at most {} are read", json.size(), kSafetensorsHeaderBytesMax));
  }
  header.bytes.resize(8 + json.size());
  for (std::size_t i = 0; i < 8; ++i) header.bytes[i] = static_cast<std::byte>(json.size() >> (8 * i));
  std::memcpy(header.bytes.data() + 8, json.data(), json.size());
  const auto data_begin = static_cast<std::int64_t>(header.bytes.size());
  for (TensorInfo& tensor : header.tensors) {
    tensor.begin += data_begin;
    tensor.end += data_begin;
  }
  header.file_bytes = data_begin + offset;
  return header;
}

}  // namespace headrace
