#include "receiver/models/moe_axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace headrace {
namespace {

MoeAxis refuse(LayoutWriter& writer, const std::string& message) {
  writer.fail(Status(Code::kInvalidArgument, fmt::format("layout of {}: {}", writer.layout().family, message)));
  return {};
}

}  // namespace

std::vector<MoeAxis::Piece> MoeAxis::pieces() const {
  std::vector<Piece> pieces;
  for (std::int64_t c = first / repeat; c * repeat < last; ++c) {
    const std::int64_t from = std::max(first, c * repeat);
    const std::int64_t copies = std::min(last, (c + 1) * repeat) - from;
    if (!pieces.empty() && pieces.back().copies == copies) {
      pieces.back().hi = c + 1;
    } else {
      pieces.push_back({c, c + 1, from - first, copies});
    }
  }
  return pieces;
}

MoeAxis moe_axis(LayoutWriter& writer, const MoeDivision& division, std::int64_t count, bool scale, std::int64_t block,
                 std::string_view what) {
  const std::int64_t whole = division.intermediate;
  if (count <= 0 || count > whole) return refuse(writer, fmt::format("{}: {} along an intermediate size of {}", what, count, whole));
  const std::int64_t local = writer.divide(whole, division.tp, fmt::format("{}: intermediate size", what));
  if (!scale) {
    // Two packed elements have one byte, which cannot be cut.
    const std::int64_t part = writer.divide(count, division.tp, what);
    const std::int64_t per = writer.divide(whole, count, fmt::format("{}: intermediate size", what));
    if (per == 0) return {};
    return {count, 1, division.rank * part, (division.rank + 1) * part,
            writer.divide(division.padded, per, fmt::format("{}: padded", what))};
  }
  // Two scales along 12 elements may stand for blocks of 8 as well as of 6: what config.json says comes first where it fits.
  const bool given = block > 0 && (whole + block - 1) / block == count;
  if (!given && whole % count == 0) block = whole / count;
  if (block <= 0 || (whole + block - 1) / block != count)
    return refuse(writer, fmt::format("{}: {} scales for an intermediate size of {} in blocks of {}", what, count, whole, block));
  if (local == 0) return {};
  if (division.tp == 1 && division.padded == whole) return {count, 1, 0, count, count};
  const std::int64_t fine = std::gcd(block, local);
  const std::int64_t part = local / fine;
  return {count, block / fine, division.rank * part, (division.rank + 1) * part,
          writer.divide(division.padded, fine, fmt::format("{}: padded intermediate size by blocks:", what))};
}

}  // namespace headrace
