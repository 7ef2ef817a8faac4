#include "receiver/models/config_reader.h"

#include <fmt/format.h>

#include <utility>

namespace headrace {

ConfigReader::ConfigReader(const JsonValue& root, std::string model, std::string_view part)
    : root_(&root), part_(root.find(part)), model_(std::move(model)) {}

const JsonValue* ConfigReader::find(std::string_view key) const {
  for (const JsonValue* part : {part_, root_}) {
    const JsonValue* found = part == nullptr ? nullptr : part->find(key);
    if (found != nullptr && !found->is_null()) return found;
  }
  return nullptr;
}

std::int64_t ConfigReader::integer(std::string_view key, std::int64_t min, std::int64_t max) {
  if (const JsonValue* value = find(key)) return checked(key, *value, min, max);
  fail(fmt::format("{} is missing or null", key));
  return 1;
}

std::int64_t ConfigReader::integer_or(std::string_view key, std::int64_t otherwise, std::int64_t min, std::int64_t max) {
  const JsonValue* value = find(key);
  return value == nullptr ? otherwise : checked(key, *value, min, max);
}

std::int64_t ConfigReader::size(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) {
    if (const JsonValue* value = find(key)) return checked(key, *value, 1, kSizeMax);
  }
  fail(fmt::format("{} is missing or null", fmt::join(keys, " or ")));
  return 1;
}

std::vector<std::int64_t> ConfigReader::list(std::string_view key, std::int64_t min, std::int64_t max) {
  if (const JsonValue* value = find(key)) return checked_list(key, *value, min, max);
  fail(fmt::format("{} is missing or null", key));
  return {};
}

std::vector<std::int64_t> ConfigReader::list_or_empty(std::string_view key, std::int64_t min, std::int64_t max) {
  const JsonValue* value = find(key);
  return value == nullptr ? std::vector<std::int64_t>() : checked_list(key, *value, min, max);
}

std::optional<bool> ConfigReader::flag(std::string_view key) {
  const JsonValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->as_bool()) fail(fmt::format("{} is of kind {}, expected a bool", key, value->kind()));
  return value->as_bool();
}

std::vector<std::int64_t> ConfigReader::weight_block() {
  constexpr std::string_view kKey = "quantization_config.weight_block_size";
  const JsonValue* quantization = find("quantization_config");
  const JsonValue* block = quantization == nullptr ? nullptr : quantization->find("weight_block_size");
  if (block == nullptr || block->is_null()) return {};
  std::vector<std::int64_t> sizes = checked_list(kKey, *block, 1, kSizeMax);
  if (sizes.size() == 2) return sizes;
  fail(fmt::format("{} is no pair of sizes", kKey));
  return {};
}

std::int64_t ConfigReader::checked(std::string_view key, const JsonValue& value, std::int64_t min, std::int64_t max) {
  const auto number = value.as_int64();
  if (!number) {
    fail(fmt::format("{} is of kind {}, expected an integer", key, value.kind()));
    return 1;
  }
  if (*number < min || *number > max) {
    fail(fmt::format("{} is {}, expected {} to {}", key, *number, min, max));
    return 1;
  }
  return *number;
}

std::vector<std::int64_t> ConfigReader::checked_list(std::string_view key, const JsonValue& value, std::int64_t min, std::int64_t max) {
  const JsonValue::Array* array = value.as_array();
  if (array == nullptr) {
    fail(fmt::format("{} is of kind {}, expected an array", key, value.kind()));
    return {};
  }
  std::vector<std::int64_t> numbers;
  for (const JsonValue& item : *array) numbers.push_back(checked(key, item, min, max));
  return numbers;
}

void ConfigReader::fail(const std::string& reason, Code code) {
  if (status_.ok()) status_ = Status(code, fmt::format("config.json of a {} model: {}", model_, reason));
}

}  // namespace headrace
