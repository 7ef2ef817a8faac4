#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "kernels/loop_nest.h"
#include "kernels/strided_copy.h"

namespace headrace {
namespace {

/// What lies between the two nests, address by address, as the mixed-radix digits of the first one's destination: level j steps by `dst`
/// and takes `count` values, each worth `src` bytes of the first one's source. The last level is the run.
struct Digits {
  std::array<Loop, kLoopsMax + 1> level;
  std::size_t size = 0;

  explicit Digits(const LoopNest& first) {
    for (const Loop& loop : first.all()) level[size++] = loop;
    std::sort(level.begin(), level.begin() + static_cast<std::ptrdiff_t>(size), [](const Loop& a, const Loop& b) { return a.dst > b.dst; });
    level[size++] = {first.run, 1, 1, false};
  }
};

using DigitValues = std::array<std::int64_t, kLoopsMax + 1>;

/// The digits of a distance; nullopt when it leads to a place that the first nest does not write.
std::optional<DigitValues> digits_of(const Digits& digits, std::int64_t distance) {
  DigitValues values{};
  if (distance < 0) return std::nullopt;
  for (std::size_t j = 0; j < digits.size; ++j) {
    values[j] = distance / digits.level[j].dst;
    if (values[j] >= digits.level[j].count) return std::nullopt;
    distance -= values[j] * digits.level[j].dst;
  }
  return values;
}

std::int64_t source_worth(const Digits& digits, const DigitValues& values) {
  std::int64_t worth = 0;
  for (std::size_t j = 0; j < digits.size; ++j) worth += values[j] * digits.level[j].src;
  return worth;
}

/// Steps of `stride` that can be taken before the leading digit carries, when it then carries exactly; 0 when it does not.
std::int64_t steps_to_carry(const Digits& digits, const DigitValues& values) {
  std::size_t lead = 0;
  while (lead < digits.size && values[lead] == 0) ++lead;
  for (std::size_t j = lead + 1; j < digits.size; ++j) {
    if (values[j] != 0) return 0;
  }
  if (lead == 0 || lead == digits.size) return 0;
  const Loop& level = digits.level[lead];
  if (level.dst * level.count != digits.level[lead - 1].dst || level.count % values[lead] != 0) return 0;
  return level.count / values[lead];
}

class Composition {
 public:
  explicit Composition(const LoopNest& first) : digits_(first), top_{} {}

  Status start(std::int64_t distance, LoopNest& out) {
    const auto values = digits_of(digits_, distance);
    if (!values) return {Code::kUnsupported, "compose: the second nest begins where the first one writes nothing"};
    top_ = *values;
    out.src_offset += source_worth(digits_, *values);
    return ok_status();
  }

  /// Adds one loop of the second nest, cut where the digits of the first one carry. `dim` is for the message.
  Status add(Loop loop, std::size_t dim, LoopNest& out) {
    while (loop.count > 1) {
      const auto values = digits_of(digits_, loop.src);
      if (!values) break;
      if (fits(*values, loop.count)) {
        for (std::size_t j = 0; j < digits_.size; ++j) top_[j] += (loop.count - 1) * (*values)[j];
        out.push({loop.count, source_worth(digits_, *values), loop.dst, loop.indexed});
        return ok_status();
      }
      const std::int64_t inner = steps_to_carry(digits_, *values);
      if (inner <= 1 || loop.indexed || loop.count % inner != 0) break;
      HEADRACE_RETURN_IF_ERROR(add({inner, loop.src, loop.dst, false}, dim, out));
      loop = {loop.count / inner, loop.src * inner, loop.dst * inner, false};
    }
    if (loop.count == 1) return ok_status();
    return {Code::kUnsupported,
            fmt::format("compose: dimension {} of the second nest ({} steps of {} bytes) does not follow the first one's", dim, loop.count,
                        loop.src)};
  }

 private:
  bool fits(const DigitValues& values, std::int64_t count) const {
    for (std::size_t j = 0; j < digits_.size; ++j) {
      if (top_[j] + (count - 1) * values[j] >= digits_.level[j].count) return false;
    }
    return true;
  }

  Digits digits_;
  DigitValues top_;  // digits of the highest address reached so far
};

Status check_composable(const LoopNest& nest, const char* which, bool table_allowed) {
  for (std::size_t j = 0; j < nest.size; ++j) {
    const Loop& loop = nest.loops[j];
    const bool negative = loop.src < 0 || loop.dst <= 0;
    if (!negative && !(loop.indexed && !table_allowed)) continue;
    return {Code::kUnsupported,
            fmt::format("compose: dimension {} of the {} nest {}", j, which, negative ? "does not run forwards" : "is indexed")};
  }
  return ok_status();
}

}  // namespace

Result<StridedCopy> compose(const StridedCopy& first, const StridedCopy& second) {
  LoopNest a(first);
  LoopNest b(second);
  a.merge();
  b.merge();
  HEADRACE_RETURN_IF_ERROR(check_composable(a, "first", false));
  HEADRACE_RETURN_IF_ERROR(check_composable(b, "second", !b.indexed_source));
  LoopNest out(a.src_offset, b.dst_offset, 1);
  out.slots = b.slots;
  Composition composition(a);
  HEADRACE_RETURN_IF_ERROR(composition.start(b.src_offset - a.dst_offset, out));
  // The run first: its pieces take the lowest digits.
  HEADRACE_RETURN_IF_ERROR(composition.add({b.run, 1, 1, false}, b.size, out));
  for (std::size_t j = b.size; j-- > 0;) HEADRACE_RETURN_IF_ERROR(composition.add(b.loops[j], j, out));
  std::reverse(out.loops.begin(), out.loops.begin() + static_cast<std::ptrdiff_t>(out.size));
  out.merge();
  return out.to_copy(second.slots);
}

}  // namespace headrace
