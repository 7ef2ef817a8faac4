#pragma once

#include <vector>

namespace headrace::bench {

/// The middle value; the mean of the two middle ones when there is no single one. Precondition: not empty.
double median(std::vector<double> values);

/// The largest deviation from the median, as a share of it: how much one should believe the median. 0 for a median of 0.
double spread(const std::vector<double>& values);

/// Bytes and seconds as GB/s (powers of 1000).
double gigabytes_per_second(double bytes, double seconds);

}  // namespace headrace::bench
