#include "core/checkpoint/json_text.h"

#include <nlohmann/json.hpp>

namespace headrace {
namespace {

using Writer = nlohmann::ordered_json;

Writer convert(const JsonValue& value);

Writer convert_container(const JsonValue& value) {
  if (const JsonValue::Array* items = value.as_array()) {
    Writer array = Writer::array();
    for (const JsonValue& item : *items) array.push_back(convert(item));
    return array;
  }
  Writer object = Writer::object();
  for (const JsonMember& member : *value.as_object()) object[member.key] = convert(member.value);
  return object;
}

Writer convert(const JsonValue& value) {
  if (value.is_null()) return nullptr;
  if (const auto flag = value.as_bool()) return *flag;
  if (const std::string* text = value.as_string()) return *text;
  if (value.as_array() != nullptr || value.as_object() != nullptr) return convert_container(value);
  if (const auto number = value.as_int64()) return *number;
  if (const auto number = value.as_uint64()) return *number;
  return value.as_double().value_or(0);
}

}  // namespace

std::string json_text(const JsonValue& value, int indent) {
  return convert(value).dump(indent, ' ', false, Writer::error_handler_t::replace);
}

}  // namespace headrace
