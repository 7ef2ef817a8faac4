#include "receiver/models/config_reader.h"

#include <fmt/format.h>

#include <utility>

namespace headrace {
namespace {

// Far above any model, and low enough that the bytes of a product of two sizes stay in 64 bits.
constexpr std::int64_t kSizeMax = 1 << 24;

}  // namespace

ConfigReader::ConfigReader(const JsonValue& root, std::string model)
    : root_(&root), text_(root.find("text_config")), model_(std::move(model)) {}

const JsonValue* ConfigReader::find(std::string_view key) const {
  for (const JsonValue* part : {text_, root_}) {
    const JsonValue* found = part == nullptr ? nullptr : part->find(key);
    if (found != nullptr && !found->is_null()) return found;
  }
  return nullptr;
}

std::int64_t ConfigReader::size(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) {
    if (const JsonValue* value = find(key)) return checked(key, *value);
  }
  fail(fmt::format("{} is missing", fmt::join(keys, " or ")));
  return 1;
}

std::int64_t ConfigReader::size_or(std::string_view key, std::int64_t otherwise) {
  const JsonValue* value = find(key);
  return value == nullptr ? otherwise : checked(key, *value);
}

std::int64_t ConfigReader::count_or(std::string_view key, std::int64_t otherwise) {
  const JsonValue* value = find(key);
  return value == nullptr ? otherwise : checked(key, *value, 0);
}

std::optional<bool> ConfigReader::flag(std::string_view key) {
  const JsonValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->as_bool()) fail(fmt::format("{} is of kind {}, expected a bool", key, value->kind()));
  return value->as_bool();
}

std::vector<std::int64_t> ConfigReader::weight_block() {
  const JsonValue* quantization = find("quantization_config");
  const JsonValue* block = quantization == nullptr ? nullptr : quantization->find("weight_block_size");
  if (block == nullptr || block->is_null()) return {};
  const JsonValue::Array* sizes = block->as_array();
  if (sizes == nullptr || sizes->size() != 2) {
    fail("quantization_config.weight_block_size is no pair of sizes");
    return {};
  }
  std::vector<std::int64_t> result;
  for (const JsonValue& size : *sizes) result.push_back(checked("quantization_config.weight_block_size", size));
  return result;
}

std::int64_t ConfigReader::checked(std::string_view key, const JsonValue& value, std::int64_t min) {
  const auto number = value.as_int64();
  if (!number) {
    fail(fmt::format("{} is of kind {}, expected an integer", key, value.kind()));
    return 1;
  }
  if (*number < min || *number > kSizeMax) {
    fail(fmt::format("{} is {}, expected {} to {}", key, *number, min, kSizeMax));
    return 1;
  }
  return *number;
}

void ConfigReader::fail(const std::string& reason) {
  if (status_.ok()) status_ = Status(Code::kInvalidArgument, fmt::format("config.json of a {} model: {}", model_, reason));
}

}  // namespace headrace
