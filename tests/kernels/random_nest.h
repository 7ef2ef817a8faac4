#pragma once

#include <rapidcheck.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/strided_copy.h"

// Valid nests at random, for properties. RapidCheck picks every number, so a failure shrinks and prints its seed.
namespace headrace::randomly {

struct NestOptions {
  int dims_max = 4;
  std::int64_t count_max = 5;
  std::int64_t run_max = 24;
  bool repeats = true;
  bool table = true;
  bool distinct_source = false;  // no two runs read the same byte, so the nest has an inverse
};

inline std::int64_t number(std::int64_t from, std::int64_t to) {
  return *rc::gen::inRange(from, to + 1);
}

inline std::vector<std::size_t> order(std::size_t count) {
  std::vector<std::size_t> dims(count);
  std::iota(dims.begin(), dims.end(), std::size_t{0});
  for (std::size_t j = count; j > 1; --j)
    std::swap(dims[j - 1], dims[static_cast<std::size_t>(number(0, static_cast<std::int64_t>(j) - 1))]);
  return dims;
}

/// Gives the dimensions strides that nest in a random order, often without gaps.
template <class Stride>
void nest_strides(std::vector<CopyDim>& dims, std::int64_t run, std::int64_t widest_step, int indexed, Stride CopyDim::* stride) {
  std::int64_t extent = run;
  for (const std::size_t j : order(dims.size())) {
    const std::int64_t gap = number(0, 2) == 0 ? number(1, 9) : 0;
    dims[j].*stride = extent + gap;
    extent = (extent + gap) * (indexed == static_cast<int>(j) ? widest_step + 1 : dims[j].count);
  }
}

inline StridedCopy nest(const NestOptions& options) {
  std::vector<CopyDim> dims(static_cast<std::size_t>(number(0, options.dims_max)));
  for (CopyDim& dim : dims) dim.count = number(1, options.count_max);
  const std::int64_t run = number(1, options.run_max);
  const int indexed =
      options.table && !dims.empty() && number(0, 2) == 0 ? static_cast<int>(number(0, static_cast<std::int64_t>(dims.size()) - 1)) : -1;
  std::vector<std::int32_t> slots;
  if (indexed >= 0) {
    const auto count = static_cast<std::size_t>(dims[static_cast<std::size_t>(indexed)].count);
    for (const std::size_t slot : order(count + 3)) slots.push_back(static_cast<std::int32_t>(slot));
    slots.resize(count);
  }
  nest_strides(dims, run, static_cast<std::int64_t>(slots.size()) + 3, indexed, &CopyDim::dst_stride);
  nest_strides(dims, run, 0, -1, &CopyDim::src_stride);
  for (CopyDim& dim : dims) {
    if (options.repeats && number(0, 3) == 0) dim.src_stride = 0;
    if (!options.distinct_source && number(0, 3) == 0) dim.src_stride = number(1, 40);
  }
  StridedCopy copy = StridedCopy::make(number(0, 9), number(0, 9), run, dims);
  if (indexed >= 0) {
    copy.indexed_dim = static_cast<std::int8_t>(indexed);
    copy.slots = std::make_shared<const std::vector<std::int32_t>>(slots);
  }
  return copy;
}

}  // namespace headrace::randomly
