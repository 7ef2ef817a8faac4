#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/oracle/parallel_rows.h"
#include "tests/receiver/layout_judge.h"
#include "tests/receiver/small_checkpoints.h"

namespace headrace::testing {

using Bytes = std::vector<std::uint8_t>;

inline Bytes plain_bytes(const std::vector<std::byte>& bytes) {
  Bytes result(bytes.size());
  std::transform(bytes.begin(), bytes.end(), result.begin(), [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
  return result;
}

/// What the formulas make of a checkpoint on one rank.
class Expected {
 public:
  Expected(const SmallCheckpoint& checkpoint, std::int64_t tp, std::int64_t rank) : checkpoint_(checkpoint), tp_(tp), rank_(rank) {}

  const CheckpointTensor& tensor(const std::string& name) const {
    const auto found = std::find_if(checkpoint_.tensors.begin(), checkpoint_.tensors.end(), [&](const auto& t) { return t.name == name; });
    if (found == checkpoint_.tensors.end()) throw std::runtime_error("no tensor " + name);
    return *found;
  }
  Bytes bytes(const std::string& name) const {
    const CheckpointTensor& t = tensor(name);
    return plain_bytes(seeded_tensor(t.name, t.dtype, t.shape));
  }
  Bytes rows(const std::string& name, const std::vector<std::int64_t>& numbers) const {
    const CheckpointTensor& t = tensor(name);
    const std::int64_t row = dtype_bytes(t.dtype) * (t.shape.size() == 2 ? t.shape[1] : 1);
    return oracle::gather_rows(bytes(name), row, numbers);
  }
  Bytes part(const std::string& name) const { return rows(name, oracle::even_share(tensor(name).shape[0], tp_, rank_)); }
  Bytes heads(const std::string& name, std::int64_t count) const {
    return rows(name, oracle::head_share(count, tensor(name).shape[0] / count, tp_, rank_));
  }
  Bytes vocabulary(const std::string& name) const { return rows(name, oracle::vocabulary_share(tensor(name).shape[0], tp_, rank_)); }
  Bytes columns(const std::string& name) const {
    const CheckpointTensor& t = tensor(name);
    const std::int64_t elem = dtype_bytes(t.dtype);
    return oracle::gather_columns(bytes(name), t.shape[1] * elem, elem, oracle::even_share(t.shape[1], tp_, rank_));
  }

 private:
  const SmallCheckpoint& checkpoint_;
  std::int64_t tp_;
  std::int64_t rank_;
};

inline Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace headrace::testing
