#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/status.h"

namespace [[gnu::visibility("default")]] headrace {

struct JsonMember;

/// One read-only JSON value. A plain value: free to copy, any thread may read it.
class JsonValue {
 public:
  using Array = std::vector<JsonValue>;
  using Object = std::vector<JsonMember>;  // in the order of the text, keys unique
  using Content = std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string, Array, Object>;

  // Defined below JsonMember, which they need whole.
  JsonValue();
  explicit JsonValue(Content content);
  JsonValue(const JsonValue&);
  JsonValue(JsonValue&&) noexcept;
  JsonValue& operator=(const JsonValue&);
  JsonValue& operator=(JsonValue&&) noexcept;
  ~JsonValue();

  bool is_null() const noexcept { return std::holds_alternative<std::nullptr_t>(content_); }
  /// The accessors give null pointers or nullopt when the value is of another kind.
  std::optional<bool> as_bool() const noexcept;
  /// An integer that fits, written without a fraction or an exponent.
  std::optional<std::int64_t> as_int64() const noexcept;
  std::optional<std::uint64_t> as_uint64() const noexcept;
  /// Any number.
  std::optional<double> as_double() const noexcept;
  const std::string* as_string() const noexcept { return std::get_if<std::string>(&content_); }
  const Array* as_array() const noexcept { return std::get_if<Array>(&content_); }
  const Object* as_object() const noexcept { return std::get_if<Object>(&content_); }
  /// The member of an object with this key; nullptr when there is none or this is no object. Time grows with the number of members.
  const JsonValue* find(std::string_view key) const noexcept;
  /// "null", "bool", "integer", "number", "string", "array" or "object", for messages.
  std::string_view kind() const noexcept;

 private:
  Content content_;
};

struct JsonMember {
  std::string key;
  JsonValue value;
};

inline JsonValue::JsonValue() = default;
inline JsonValue::JsonValue(Content content) : content_(std::move(content)) {}
inline JsonValue::JsonValue(const JsonValue&) = default;
inline JsonValue::JsonValue(JsonValue&&) noexcept = default;
inline JsonValue& JsonValue::operator=(const JsonValue&) = default;
inline JsonValue& JsonValue::operator=(JsonValue&&) noexcept = default;
inline JsonValue::~JsonValue() = default;

struct JsonLimits {
  std::size_t bytes_max = std::size_t{64} << 20;
  std::size_t depth_max = 64;
};

/// Parses one whole document. Refuses text over the limits, invalid UTF-8, anything after the value and, in any object, two equal keys.
Result<JsonValue> parse_json(std::string_view text, const JsonLimits& limits = {});
/// Reads and parses a file. Messages begin with its path.
Result<JsonValue> read_json_file(const std::string& path, const JsonLimits& limits = {});

}  // namespace headrace
