#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "receiver/storage_table.h"

namespace headrace {

/// Notices that a memory pool lost its content though its addresses stayed: a seeded pattern in the bytes of each pool that are the
/// receiver's own. A pool loses all of its content or none. One thread at a time.
class Canaries {
 public:
  explicit Canaries(std::span<const Canary> places) : places_(places.begin(), places.end()) {}

  /// A new pattern everywhere, so that what an earlier life or an earlier content left is never taken for ours.
  void write();
  /// The pools whose pattern is no longer there. Precondition: write() was called, and the memory is mapped.
  std::vector<std::string> lost() const;

 private:
  std::vector<Canary> places_;
  std::uint64_t seed_ = 0;
};

}  // namespace headrace
