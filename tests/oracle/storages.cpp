#include "tests/oracle/storages.h"

#include <cstdio>
#include <cstring>
#include <set>
#include <stdexcept>

namespace headrace::oracle {

Comparison& Comparison::operator+=(const Comparison& other) {
  bytes_compared += other.bytes_compared;
  bytes_different += other.bytes_different;
  if (!first) first = other.first;
  return *this;
}

std::string Comparison::to_string() const {
  std::string text = std::to_string(bytes_compared) + " bytes compared, " + std::to_string(bytes_different) + " different";
  if (!first) return text;
  char values[64];
  std::snprintf(values, sizeof values, ": expected 0x%02x, actual 0x%02x", first->expected, first->actual);
  return text + ", first at " + first->storage + " + " + std::to_string(first->offset) + values;
}

Comparison compare_bytes(const std::string& storage, std::uint64_t offset, std::span<const std::uint8_t> expected,
                         std::span<const std::uint8_t> actual) {
  if (expected.size() != actual.size()) {
    throw std::runtime_error(storage + ": expected " + std::to_string(expected.size()) + " bytes, found " + std::to_string(actual.size()));
  }
  Comparison result;
  result.bytes_compared = expected.size();
  if (expected.empty() || std::memcmp(expected.data(), actual.data(), expected.size()) == 0) return result;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == actual[i]) continue;
    ++result.bytes_different;
    if (!result.first) result.first = Comparison::Difference{storage, offset + i, expected[i], actual[i]};
  }
  return result;
}

std::vector<std::uint8_t> ExpectedStorage::expected(std::uint64_t version) const {
  std::vector<std::uint8_t> all;
  all.reserve(bytes);
  for (const Piece& piece : pieces) {
    const std::vector<std::uint8_t> part = piece.expected(version);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

Comparison ExpectedStorage::compare(std::uint64_t version, std::span<const std::uint8_t> live) const {
  if (live.size() != bytes) {
    throw std::runtime_error(name + ": expected a storage of " + std::to_string(bytes) + " bytes, found " + std::to_string(live.size()));
  }
  Comparison result;
  std::uint64_t offset = 0;
  for (const Piece& piece : pieces) {
    result += compare_bytes(name, offset, piece.expected(version), live.subspan(offset, piece.bytes));
    offset += piece.bytes;
  }
  return result;
}

ExpectedStorage plain_storage(const CheckpointBytes& checkpoint, const std::string& name) {
  const CheckpointBytes::Tensor& tensor = checkpoint.at(name);
  ExpectedStorage storage;
  storage.name = name;
  storage.sources = {name};
  storage.bytes = storage.source_bytes = tensor.bytes.size();
  storage.pieces.push_back({tensor.bytes.size(), [&tensor](std::uint64_t version) { return version_bytes(tensor, version); }});
  return storage;
}

std::vector<ExpectedStorage> dense_storages(const CheckpointBytes& checkpoint) {
  std::vector<ExpectedStorage> storages;
  for (const auto& [name, tensor] : checkpoint.tensors()) storages.push_back(plain_storage(checkpoint, name));
  return storages;
}

std::uint64_t applied_bytes(const std::vector<ExpectedStorage>& storages) {
  std::uint64_t sum = 0;
  for (const ExpectedStorage& storage : storages) sum += storage.source_bytes;
  return sum;
}

std::uint64_t wanted_wire_bytes(const CheckpointBytes& checkpoint, const std::vector<std::vector<ExpectedStorage>>& ranks) {
  std::set<std::string> wanted;
  for (const std::vector<ExpectedStorage>& storages : ranks) {
    for (const ExpectedStorage& storage : storages) wanted.insert(storage.sources.begin(), storage.sources.end());
  }
  std::uint64_t sum = 0;
  for (const std::string& name : wanted) sum += checkpoint.at(name).bytes.size();
  return sum;
}

}  // namespace headrace::oracle
