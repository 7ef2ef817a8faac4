#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/checkpoint/json.h"

namespace headrace {

/// Reads config.json key by key: in one part of the model first when there is one, then at the top. The first failure sticks, later
/// answers then mean nothing. A null counts as absent.
class ConfigReader {
 public:
  /// Of what is measured in elements. Far above any model, and low enough that the bytes of a product of two sizes stay in 64 bits.
  static constexpr std::int64_t kSizeMax = 1 << 24;

  /// `model` names what the config is of, in messages. `root` outlives the reader.
  ConfigReader(const JsonValue& root, std::string model, std::string_view part = "text_config");

  const JsonValue* find(std::string_view key) const;
  /// From `min` to `max`. kInvalidArgument when the key is absent.
  std::int64_t integer(std::string_view key, std::int64_t min, std::int64_t max);
  std::int64_t integer_or(std::string_view key, std::int64_t otherwise, std::int64_t min, std::int64_t max);
  /// A size of a tensor, from 1 to kSizeMax, under the first of the keys that is there. kInvalidArgument when none is.
  std::int64_t size(std::initializer_list<std::string_view> keys);
  std::int64_t size_or(std::string_view key, std::int64_t otherwise) { return integer_or(key, otherwise, 1, kSizeMax); }
  /// As size_or(), from 0.
  std::int64_t count_or(std::string_view key, std::int64_t otherwise) { return integer_or(key, otherwise, 0, kSizeMax); }
  /// Integers from `min` to `max`. kInvalidArgument when the key is absent.
  std::vector<std::int64_t> list(std::string_view key, std::int64_t min, std::int64_t max);
  /// As list(); absent means none.
  std::vector<std::int64_t> list_or_empty(std::string_view key, std::int64_t min, std::int64_t max);
  std::optional<bool> flag(std::string_view key);
  /// [rows, columns] that share one scale: `quantization_config.weight_block_size`; empty when there is none.
  std::vector<std::int64_t> weight_block();

  /// For what a family finds wrong in the values.
  void fail(const std::string& reason, Code code = Code::kInvalidArgument);
  const Status& status() const noexcept { return status_; }

 private:
  std::int64_t checked(std::string_view key, const JsonValue& value, std::int64_t min, std::int64_t max);
  std::vector<std::int64_t> checked_list(std::string_view key, const JsonValue& value, std::int64_t min, std::int64_t max);

  const JsonValue* root_;
  const JsonValue* part_;
  std::string model_;
  Status status_;
};

}  // namespace headrace
