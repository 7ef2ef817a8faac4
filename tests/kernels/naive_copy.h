#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "kernels/strided_copy.h"

// The oracle of these tests: a nest as plain loops, byte by byte, written from its definition.
namespace headrace::naive {

using Bytes = std::vector<std::byte>;

/// Calls visit(source offset, destination offset) for every byte.
inline void each_byte(const StridedCopy& copy, const std::function<void(std::int64_t, std::int64_t)>& visit, std::size_t dim = 0,
                      std::int64_t src = 0, std::int64_t dst = 0) {
  if (dim == copy.dim_count) {
    for (std::int64_t b = 0; b < copy.run_bytes; ++b) visit(copy.src_offset + src + b, copy.dst_offset + dst + b);
    return;
  }
  for (std::int64_t i = 0; i < copy.dims[dim].count; ++i) {
    std::int64_t src_step = i;
    std::int64_t dst_step = i;
    if (copy.indexed_dim == static_cast<int>(dim)) (copy.indexed_source ? src_step : dst_step) = (*copy.slots)[static_cast<std::size_t>(i)];
    each_byte(copy, visit, dim + 1, src + src_step * copy.dims[dim].src_stride, dst + dst_step * copy.dims[dim].dst_stride);
  }
}

inline void move(const StridedCopy& copy, const Bytes& src, Bytes& dst) {
  each_byte(copy, [&](std::int64_t s, std::int64_t d) { dst.at(static_cast<std::size_t>(d)) = src.at(static_cast<std::size_t>(s)); });
}

struct Reach {
  std::int64_t src = 0;  // one past the last byte
  std::int64_t dst = 0;
};
inline Reach reach(const StridedCopy& copy) {
  Reach reach;
  each_byte(copy, [&](std::int64_t s, std::int64_t d) {
    reach.src = std::max(reach.src, s + 1);
    reach.dst = std::max(reach.dst, d + 1);
  });
  return reach;
}

inline Bytes random_bytes(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  Bytes bytes(static_cast<std::size_t>(count));
  for (std::byte& b : bytes) b = static_cast<std::byte>(engine());
  return bytes;
}

}  // namespace headrace::naive
