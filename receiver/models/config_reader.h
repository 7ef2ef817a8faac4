#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/checkpoint/json.h"

namespace headrace {

/// Reads config.json key by key: in `text_config` first when there is one, then at the top. The first failure sticks, later answers then
/// mean nothing. A null counts as absent.
class ConfigReader {
 public:
  /// `model` names what the config is of, in messages. `root` outlives the reader.
  ConfigReader(const JsonValue& root, std::string model);

  const JsonValue* find(std::string_view key) const;
  /// A size of a tensor, from 1 to 2^24, under the first of the keys that is there. kInvalidArgument when none is.
  std::int64_t size(std::initializer_list<std::string_view> keys);
  std::int64_t size_or(std::string_view key, std::int64_t otherwise);
  /// As size_or(), from 0.
  std::int64_t count_or(std::string_view key, std::int64_t otherwise);
  std::optional<bool> flag(std::string_view key);
  /// [rows, columns] that share one scale: `quantization_config.weight_block_size`; empty when there is none.
  std::vector<std::int64_t> weight_block();

  const Status& status() const noexcept { return status_; }

 private:
  std::int64_t checked(std::string_view key, const JsonValue& value, std::int64_t min = 1);
  void fail(const std::string& reason);

  const JsonValue* root_;
  const JsonValue* text_;
  std::string model_;
  Status status_;
};

}  // namespace headrace
