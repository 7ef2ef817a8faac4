#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/checkpoint/checkpoint.h"
#include "core/wire/reports.h"
#include "receiver/models/family.h"

namespace headrace::cli {

/// An update that nobody has to be there for.
struct ForecastInput {
  ModelRequest request;               // `rank` is ignored: buckets are shared, so all ranks of the layout are looked at
  const JsonValue* config = nullptr;  // config.json; null where there is none
  std::span<const CheckpointTensor> model{};
  /// What the sender would bring, in its order. None: every tensor that the ranks need, as the family names it.
  std::optional<std::vector<CheckpointTensor>> brought{};
  std::vector<std::string> scopes{"target"};
  std::vector<std::string> optional_names{};
  std::int64_t bucket_bytes = 0;  // 0: the default
};

struct RankForecast {
  wire::Receipt receipt;        // its figures as the rank would report them; times and proofs are left out
  std::uint64_t converted = 0;  // of its tensors, those that are kept in another dtype than they are brought in
  std::uint64_t storages = 0;
  std::uint64_t storage_bytes = 0;
  std::uint64_t groups = 0;         // staged groups, whose hooks would run
  std::uint64_t padding_bytes = 0;  // written by the layout's constants, at start and after a discard
};

struct UpdateForecast {
  std::string family;
  std::uint64_t tensors = 0;  // brought
  std::uint64_t wire_bytes = 0;
  std::uint64_t applied_bytes = 0;
  std::uint64_t buckets = 0;
  std::int64_t bucket_bytes = 0;
  std::uint64_t values = 0;          // of its tensors, that a MANIFEST must bring
  std::vector<std::string> ignored;  // names that the engine drops
  std::vector<RankForecast> ranks;
};

/// Goes through the whole update as sender and receivers would, with their own planning, checks and runs, and moves no byte: addresses are
/// reserved, not backed. kInvalidArgument: everything that the ranks would refuse, with all defects.
Result<UpdateForecast> forecast_update(const ForecastInput& input);

}  // namespace headrace::cli
