#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/oracle/checkpoint_bytes.h"

namespace headrace::oracle {

/// The outcome of comparing bytes with bytes; outcomes add up, and the first difference of the sum is that of its first part that has one.
struct Comparison {
  struct Difference {
    std::string storage;
    std::uint64_t offset = 0;
    std::uint8_t expected = 0;
    std::uint8_t actual = 0;
  };

  std::uint64_t bytes_compared = 0;
  std::uint64_t bytes_different = 0;
  std::optional<Difference> first;

  Comparison& operator+=(const Comparison& other);
  bool equal() const { return bytes_different == 0; }
  /// "2097152 bytes compared, 3 different, first at model.norm.weight + 17: expected 0x12, actual 0x00".
  std::string to_string() const;
};

/// Compares byte by byte; `offset` is where both spans start within the storage. Throws when the lengths differ.
Comparison compare_bytes(const std::string& storage, std::uint64_t offset, std::span<const std::uint8_t> expected,
                         std::span<const std::uint8_t> actual);

/// What one live storage of one rank must hold: pieces one after the other, each computed when asked for. Refers to the CheckpointBytes
/// that it was made from, which must outlive it. Any thread.
struct ExpectedStorage {
  struct Piece {
    std::uint64_t bytes = 0;
    std::function<std::vector<std::uint8_t>(std::uint64_t version)> expected;
  };

  std::string name;                  // at run time, e.g. "model.layers.0.ffn.experts.w13_weight"
  std::vector<std::string> sources;  // names of the checkpoint tensors that land here
  std::uint64_t bytes = 0;           // of the storage, padding included
  std::uint64_t source_bytes = 0;    // of `sources`
  std::vector<Piece> pieces;         // in the order of their bytes

  /// All bytes at `version`.
  std::vector<std::uint8_t> expected(std::uint64_t version) const;
  /// Compares every byte with `live`. A length other than `bytes` throws.
  Comparison compare(std::uint64_t version, std::span<const std::uint8_t> live) const;
};

/// The tensor's bytes as they stand in the file, under its own name: the dense family.
ExpectedStorage plain_storage(const CheckpointBytes& checkpoint, const std::string& name);
/// One storage for each tensor of the checkpoint.
std::vector<ExpectedStorage> dense_storages(const CheckpointBytes& checkpoint);

/// Sum of source_bytes over the storages of one rank: what an update of that rank applies.
std::uint64_t applied_bytes(const std::vector<ExpectedStorage>& storages);
/// Bytes of all tensors that at least one of the ranks wants, each counted once: what an update puts on the wire.
std::uint64_t wanted_wire_bytes(const CheckpointBytes& checkpoint, const std::vector<std::vector<ExpectedStorage>>& ranks);

}  // namespace headrace::oracle
