#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/checkpoint/json.h"

// Making JSON: reports, receipts, command output.
namespace headrace {

/// Wraps a plain value. Text must be UTF-8; other bytes are replaced when it is written.
template <class T>
JsonValue to_json(const T& value) {
  if constexpr (std::same_as<T, JsonValue>) {
    return value;
  } else if constexpr (std::same_as<T, bool>) {
    return JsonValue(JsonValue::Content(value));
  } else if constexpr (std::floating_point<T>) {
    return JsonValue(JsonValue::Content(static_cast<double>(value)));
  } else if constexpr (std::unsigned_integral<T>) {
    // As the parser does: the unsigned kind only for what does not fit the signed one.
    if (std::in_range<std::int64_t>(value)) return JsonValue(JsonValue::Content(static_cast<std::int64_t>(value)));
    return JsonValue(JsonValue::Content(static_cast<std::uint64_t>(value)));
  } else if constexpr (std::signed_integral<T>) {
    return JsonValue(JsonValue::Content(static_cast<std::int64_t>(value)));
  } else if constexpr (std::same_as<T, JsonValue::Array>) {
    return JsonValue(JsonValue::Content(value));
  } else {
    return JsonValue(JsonValue::Content(std::string(std::string_view(value))));
  }
}

/// An array of the wrapped items of a range.
template <class Range>
JsonValue json_array(const Range& range) {
  JsonValue::Array items;
  for (const auto& item : range) items.push_back(to_json(item));
  return to_json(items);
}

/// Collects the members of an object in the order in which they are set. Keys must differ.
class JsonObject {
 public:
  template <class T>
  JsonObject& set(std::string_view key, const T& value) {
    members_.push_back({std::string(key), to_json(value)});
    return *this;
  }
  JsonValue done() { return JsonValue(JsonValue::Content(std::move(members_))); }

 private:
  JsonValue::Object members_;
};

/// The text of a value, members in their order. `indent` < 0: all in one line. No newline at the end. Numbers that JSON has not (NaN,
/// infinities) become null.
std::string json_text(const JsonValue& value, int indent = 2);

}  // namespace headrace
