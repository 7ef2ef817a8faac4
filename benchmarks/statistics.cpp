#include "benchmarks/statistics.h"

#include <algorithm>
#include <cmath>

#include "core/base/check.h"

namespace headrace::bench {

double median(std::vector<double> values) {
  HEADRACE_CHECK(!values.empty(), "a median needs values");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

double spread(const std::vector<double>& values) {
  const double centre = median(values);
  if (centre == 0) return 0;
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value - centre));
  return largest / std::abs(centre);
}

double gigabytes_per_second(double bytes, double seconds) {
  return bytes / seconds / 1e9;
}

}  // namespace headrace::bench
