#include "tests/oracle/bert.h"

#include <fstream>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tests/oracle/parallel_rows.h"

namespace headrace::oracle {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Tensor = CheckpointBytes::Tensor;
using Numbers = std::vector<std::int64_t>;

constexpr std::int64_t kFloatBytes = 4;

/// Rows or columns of one checkpoint tensor that this rank holds.
struct Share {
  const Tensor* tensor = nullptr;
  bool columns = false;
  Numbers numbers;
};

std::int64_t rows_of(const Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.shape.front());
}

std::int64_t row_bytes_of(const Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.bytes.size()) / rows_of(tensor);
}

Bytes bytes_of(const Share& share, std::uint64_t version) {
  const Bytes all = version_bytes(*share.tensor, version);
  const std::int64_t row_bytes = row_bytes_of(*share.tensor);
  return share.columns ? gather_columns(all, row_bytes, kFloatBytes, share.numbers) : gather_rows(all, row_bytes, share.numbers);
}

/// One share after the other.
ExpectedStorage stack(const std::string& name, const std::vector<Share>& shares, bool bfloat16) {
  ExpectedStorage storage;
  storage.name = name;
  for (const Share& share : shares) {
    if (share.tensor->dtype != "F32") throw std::runtime_error(share.tensor->name + " is " + share.tensor->dtype + ", expected F32");
    const auto numbers = static_cast<std::uint64_t>(share.numbers.size());
    const auto rows = static_cast<std::uint64_t>(rows_of(*share.tensor));
    const std::uint64_t bytes =
        share.columns ? numbers * rows * kFloatBytes : numbers * static_cast<std::uint64_t>(row_bytes_of(*share.tensor));
    const std::uint64_t kept = bfloat16 ? bytes / 2 : bytes;
    storage.sources.push_back(share.tensor->name);
    storage.bytes += kept;
    storage.source_bytes += bytes;
    storage.pieces.push_back({kept, [share, bfloat16](std::uint64_t version) {
                                const Bytes floats = bytes_of(share, version);
                                return bfloat16 ? bfloat16_of(floats) : floats;
                              }});
  }
  return storage;
}

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string name;
  for (const std::string_view part : parts) name += part;
  return name;
}

}  // namespace

Bytes bfloat16_of(std::span<const std::uint8_t> floats) {
  Bytes halves;
  for (std::size_t i = 0; i + 4 <= floats.size(); i += 4) {
    const std::uint32_t low = floats[i] + 256u * floats[i + 1];
    std::uint32_t high = floats[i + 2] + 256u * floats[i + 3];
    const bool nan = (high & 0x7F80u) == 0x7F80u && ((high & 0x7Fu) != 0 || low != 0);
    if (nan) {
      high |= 0x40u;
    } else if (low > 0x8000u || (low == 0x8000u && high % 2 == 1)) {
      ++high;  // up to the next number, from the largest one to infinity
    }
    halves.push_back(static_cast<std::uint8_t>(high % 256));
    halves.push_back(static_cast<std::uint8_t>(high / 256));
  }
  return halves;
}

std::vector<ExpectedStorage> bert_storages(const CheckpointBytes& checkpoint, std::int64_t tp, std::int64_t rank, bool bfloat16) {
  std::ifstream file(checkpoint.dir() / "config.json");
  const nlohmann::json config = nlohmann::json::parse(file);
  const auto heads = config.at("num_attention_heads").get<std::int64_t>();
  const std::int64_t head_dim = config.at("hidden_size").get<std::int64_t>() / heads;
  std::vector<ExpectedStorage> storages;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (name.ends_with("position_ids")) continue;  // counted by the engine
    const std::size_t dot = name.rfind('.');
    const std::string module = name.substr(0, dot);
    const std::string leaf = name.substr(dot);
    const std::int64_t rows = rows_of(tensor);
    if (module.ends_with("attention.self.key") || module.ends_with("attention.self.value")) continue;  // with the queries
    if (module.ends_with("attention.self.query")) {
      const std::string attention = module.substr(0, module.size() - std::string_view("query").size());
      std::vector<Share> shares;
      for (const char* part : {"query", "key", "value"})
        shares.push_back({&checkpoint.at(joined({attention, part, leaf})), false, head_share(heads, head_dim, tp, rank)});
      storages.push_back(stack(joined({attention, "qkv_proj", leaf}), shares, bfloat16));
    } else if (module.ends_with("intermediate.dense")) {
      storages.push_back(stack(name, {{&tensor, false, even_share(rows, tp, rank)}}, bfloat16));
    } else if (module.ends_with("output.dense") && leaf == ".weight") {
      const auto columns = static_cast<std::int64_t>(tensor.shape.at(1));
      storages.push_back(stack(name, {{&tensor, true, even_share(columns, tp, rank)}}, bfloat16));
    } else if (module.ends_with("_embeddings")) {
      storages.push_back(stack(name, {{&tensor, false, vocabulary_share(rows, tp, rank)}}, bfloat16));
    } else if (module.ends_with("LayerNorm") || module.ends_with("pooler.dense") || module.ends_with("output.dense")) {
      storages.push_back(stack(name, {{&tensor, false, even_share(rows, 1, 0)}}, bfloat16));
    } else {
      throw std::runtime_error(name + " is no tensor of a BERT");
    }
  }
  return storages;
}

}  // namespace headrace::oracle
