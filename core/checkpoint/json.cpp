#include "core/checkpoint/json.h"

#include <fcntl.h>
// Without its throwing conversions: every result of the parser is asked for its error.
#define SIMDJSON_EXCEPTIONS 0

#include <fmt/format.h>
#include <simdjson.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <unordered_set>

#include "core/base/unique_fd.h"

namespace headrace {
namespace {

Status bad_json(std::string_view why) {
  return Status(Code::kInvalidArgument, fmt::format("JSON: {}", why));
}

Result<JsonValue> convert(const simdjson::dom::element& element);

Result<JsonValue> convert_array(const simdjson::dom::array& array) {
  JsonValue::Array items;
  items.reserve(array.size());
  for (const simdjson::dom::element item : array) {
    Result<JsonValue> value = convert(item);
    if (!value.ok()) return value.status();
    items.push_back(std::move(value).value());
  }
  return JsonValue(std::move(items));
}

Result<JsonValue> convert_object(const simdjson::dom::object& object) {
  JsonValue::Object members;
  std::unordered_set<std::string_view> keys;  // views into the parser's own copy, which outlives this call
  members.reserve(object.size());
  keys.reserve(object.size());
  for (const simdjson::dom::key_value_pair member : object) {
    if (!keys.insert(member.key).second) return bad_json(fmt::format("key \"{}\" stands twice in one object", member.key));
    Result<JsonValue> value = convert(member.value);
    if (!value.ok()) return value.status();
    members.push_back(JsonMember{std::string(member.key), std::move(value).value()});
  }
  return JsonValue(std::move(members));
}

// Each get below cannot fail: the type was asked for first.
Result<JsonValue> convert(const simdjson::dom::element& element) {
  using simdjson::dom::element_type;
  switch (element.type()) {
    case element_type::NULL_VALUE: return JsonValue();
    case element_type::BOOL: return JsonValue(element.get_bool().value_unsafe());
    case element_type::INT64: return JsonValue(element.get_int64().value_unsafe());
    case element_type::UINT64: return JsonValue(element.get_uint64().value_unsafe());
    case element_type::DOUBLE: return JsonValue(element.get_double().value_unsafe());
    case element_type::STRING: return JsonValue(std::string(element.get_string().value_unsafe()));
    case element_type::ARRAY: return convert_array(element.get_array().value_unsafe());
    case element_type::OBJECT: return convert_object(element.get_object().value_unsafe());
  }
  return bad_json("a value of unknown type");
}

Result<std::string> read_text(const std::string& path, std::size_t bytes_max) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return errno_status(errno, "open " + path);
  std::string text;
  // Read to the end, not to the size that fstat tells, so that a file that grows meanwhile is still bounded.
  for (;;) {
    constexpr std::size_t kStep = 1 << 20;
    const std::size_t used = text.size();
    text.resize(used + kStep);
    const ssize_t got = ::read(fd.get(), text.data() + used, kStep);
    text.resize(used + (got > 0 ? static_cast<std::size_t>(got) : 0));
    if (got < 0 && errno != EINTR) return errno_status(errno, "read " + path);
    if (got == 0) return text;
    if (text.size() > bytes_max) return Status(Code::kInvalidArgument, fmt::format("{}: over the limit of {} bytes", path, bytes_max));
  }
}

}  // namespace

std::optional<bool> JsonValue::as_bool() const noexcept {
  if (const bool* value = std::get_if<bool>(&content_)) return *value;
  return std::nullopt;
}

std::optional<std::int64_t> JsonValue::as_int64() const noexcept {
  if (const std::int64_t* value = std::get_if<std::int64_t>(&content_)) return *value;
  return std::nullopt;  // the parser uses the unsigned kind only for what does not fit the signed one
}

std::optional<std::uint64_t> JsonValue::as_uint64() const noexcept {
  if (const std::uint64_t* value = std::get_if<std::uint64_t>(&content_)) return *value;
  if (const std::int64_t* value = std::get_if<std::int64_t>(&content_); value != nullptr && *value >= 0) {
    return static_cast<std::uint64_t>(*value);
  }
  return std::nullopt;
}

std::optional<double> JsonValue::as_double() const noexcept {
  if (const double* value = std::get_if<double>(&content_)) return *value;
  if (const std::int64_t* value = std::get_if<std::int64_t>(&content_)) return static_cast<double>(*value);
  if (const std::uint64_t* value = std::get_if<std::uint64_t>(&content_)) return static_cast<double>(*value);
  return std::nullopt;
}

const JsonValue* JsonValue::find(std::string_view key) const noexcept {
  if (const Object* members = as_object()) {
    for (const JsonMember& member : *members) {
      if (member.key == key) return &member.value;
    }
  }
  return nullptr;
}

std::string_view JsonValue::kind() const noexcept {
  constexpr std::string_view kKinds[] = {"null", "bool", "integer", "integer", "number", "string", "array", "object"};
  return kKinds[content_.index()];
}

Result<JsonValue> parse_json(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.bytes_max) return bad_json(fmt::format("{} bytes, at most {} are taken", text.size(), limits.bytes_max));
  if (text.starts_with("\xEF\xBB\xBF")) return bad_json("begins with a byte order mark");
  const simdjson::padded_string padded(text);
  simdjson::dom::parser parser;
  if (const auto error = parser.allocate(std::max<std::size_t>(text.size(), 64), limits.depth_max)) return bad_json(error_message(error));
  simdjson::dom::element root;
  if (const auto error = parser.parse(padded).get(root)) {
    if (error == simdjson::DEPTH_ERROR) return bad_json(fmt::format("nested deeper than {}", limits.depth_max));
    return bad_json(error_message(error));
  }
  return convert(root);
}

Result<JsonValue> read_json_file(const std::string& path, const JsonLimits& limits) {
  Result<std::string> text = read_text(path, limits.bytes_max);
  if (!text.ok()) return text.status();
  Result<JsonValue> value = parse_json(text.value(), limits);
  if (!value.ok()) return Status(value.status().code(), path + ": " + value.status().message());
  return value;
}

}  // namespace headrace
