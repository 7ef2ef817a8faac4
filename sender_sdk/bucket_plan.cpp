#include "sender_sdk/bucket_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace headrace {
namespace {

constexpr std::size_t kNamesListedMax = 100;

/// Receivers that want the same boxes of an entry.
struct Demand {
  const std::vector<Box>* boxes = nullptr;
  std::vector<std::uint32_t> receivers;
  std::vector<std::int64_t> granule;  // where all of them can be cut
};

/// A demand and the one of its boxes that is looked at.
struct Claim {
  std::size_t demand = 0;
  const Box* box = nullptr;
};

struct Piece {
  Box box;
  std::vector<Claim> claims;
};

/// Cuts `area` until every claim covers each piece wholly. Dimensions before `dim` are settled.
void cut(const Box& area, const std::vector<Claim>& claims, std::size_t dim, std::vector<Piece>& pieces) {
  if (claims.empty()) return;
  if (std::all_of(claims.begin(), claims.end(), [&](const Claim& claim) { return claim.box->contains(area); })) {
    pieces.push_back(Piece{area, claims});
    return;
  }
  std::vector<std::int64_t> edges{area.lo[dim], area.hi[dim]};
  for (const Claim& claim : claims) {
    edges.push_back(std::clamp(claim.box->lo[dim], area.lo[dim], area.hi[dim]));
    edges.push_back(std::clamp(claim.box->hi[dim], area.lo[dim], area.hi[dim]));
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  Box slab = area;
  std::vector<Claim> inside;
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
    slab.lo[dim] = edges[i];
    slab.hi[dim] = edges[i + 1];
    inside.clear();
    for (const Claim& claim : claims) {
      if (claim.box->lo[dim] <= slab.lo[dim] && claim.box->hi[dim] >= slab.hi[dim]) inside.push_back(claim);
    }
    cut(slab, inside, dim + 1, pieces);
  }
}

/// The least step that is a multiple of both, or the whole dimension where that is smaller: only its ends are left as cuts then.
std::int64_t common_step(std::int64_t a, std::int64_t b, std::int64_t dimension) {
  if (a >= dimension || b >= dimension) return std::max<std::int64_t>(dimension, 1);
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a / std::gcd(a, b), b, &product)) return dimension;
  return std::min(product, dimension);
}

void narrow(std::vector<std::int64_t>& granule, const std::vector<std::int64_t>& other, const Shape& shape) {
  for (std::size_t d = 0; d < shape.size(); ++d) granule[d] = common_step(granule[d], other[d], shape[d]);
}

/// Whether a receiver can take the piece by itself: its edges are edges of what was asked for, of the tensor, or multiples of the granule.
bool takes(const Demand& demand, const Box& wanted, const Box& piece, const Shape& shape) {
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (piece.lo[d] != wanted.lo[d] && piece.lo[d] % demand.granule[d] != 0) return false;
    if (piece.hi[d] != wanted.hi[d] && piece.hi[d] != shape[d] && piece.hi[d] % demand.granule[d] != 0) return false;
  }
  return true;
}

class Planner {
 public:
  explicit Planner(const BucketPlanInput& input) : input_(input) {}

  Result<BucketPlan> run() {
    plan_.entries.reserve(input_.entries.size());
    plan_.cells.reserve(input_.entries.size());
    for (std::size_t r = 0; r < input_.wanted.size(); ++r) {
      if (input_.wanted[r].size() == input_.entries.size()) continue;
      return Status(Code::kCorruption, fmt::format("{}: ACCEPT answers {} entries, the manifest has {}", input_.receivers[r],
                                                   input_.wanted[r].size(), input_.entries.size()));
    }
    for (std::size_t e = 0; e < input_.entries.size(); ++e) {
      const auto first = static_cast<std::uint32_t>(plan_.cells.size());
      HEADRACE_RETURN_IF_ERROR(plan_entry(e));
      plan_.entries.push_back({first, static_cast<std::uint32_t>(plan_.cells.size()) - first});
    }
    if (incomplete_count_ != 0) {
      return Status(Code::kInvalidArgument,
                    fmt::format("{} of {} entries are neither wanted as a whole nor ignored by all receivers: {}{}", incomplete_count_,
                                input_.entries.size(), incomplete_, incomplete_count_ > kNamesListedMax ? ", ..." : ""));
    }
    return std::move(plan_);
  }

 private:
  Status plan_entry(std::size_t e) {
    const wire::ManifestEntry& entry = input_.entries[e];
    HEADRACE_RETURN_IF_ERROR(collect_demands(e));
    std::vector<Piece> pieces;
    cut(entry.box, claims_of([](std::size_t) { return true; }), 0, pieces);
    HEADRACE_RETURN_IF_ERROR(check_pieces(e, pieces));
    note_coverage(e, pieces);

    // A single demand is packed box by box: the cuts above would only add edges between its own boxes.
    std::vector<bool> alone(demands_.size(), demands_.size() == 1);
    if (demands_.size() == 1) pieces.clear();
    while (mark_broken(entry.shape, pieces, alone)) {
      pieces.clear();
      cut(entry.box, claims_of([&](std::size_t d) { return !alone[d]; }), 0, pieces);
    }
    for (const Piece& piece : pieces) HEADRACE_RETURN_IF_ERROR(add_piece(entry, piece));
    for (std::size_t d = 0; d < demands_.size(); ++d) {
      if (!alone[d]) continue;
      for (const Box& box : *demands_[d].boxes) HEADRACE_RETURN_IF_ERROR(add_piece(entry, Piece{box, {Claim{d, &box}}}));
    }
    return ok_status();
  }

  Status collect_demands(std::size_t e) {
    const wire::ManifestEntry& entry = input_.entries[e];
    demands_.clear();
    if (entry.box.empty()) return ok_status();
    for (std::size_t r = 0; r < input_.wanted.size(); ++r) {
      const wire::Wanted& wanted = input_.wanted[r][e];
      if (wanted.boxes.empty()) continue;
      HEADRACE_RETURN_IF_ERROR(check_answer(entry, wanted, r));
      const auto same = std::find_if(demands_.begin(), demands_.end(), [&](const Demand& demand) { return *demand.boxes == wanted.boxes; });
      if (same == demands_.end()) {
        demands_.push_back(Demand{&wanted.boxes, {static_cast<std::uint32_t>(r)}, wanted.granule});
      } else {
        same->receivers.push_back(static_cast<std::uint32_t>(r));
        narrow(same->granule, wanted.granule, entry.shape);
      }
    }
    return ok_status();
  }

  Status check_answer(const wire::ManifestEntry& entry, const wire::Wanted& wanted, std::size_t r) const {
    const bool granule_fits = wanted.granule.size() == entry.shape.size() &&
                              std::all_of(wanted.granule.begin(), wanted.granule.end(), [](std::int64_t step) { return step >= 1; });
    if (!granule_fits) {
      return Status(Code::kCorruption, fmt::format("{}: granule {} for tensor {} of shape {}", input_.receivers[r],
                                                   to_string(wanted.granule), entry.name, to_string(entry.shape)));
    }
    for (const Box& box : wanted.boxes) {
      if (box_fits(box, entry.shape) && !box.empty() && entry.box.contains(box)) continue;
      return Status(Code::kCorruption, fmt::format("{}: wants box {} of tensor {}, of which this sender has {}", input_.receivers[r],
                                                   to_string(box), entry.name, to_string(entry.box)));
    }
    return ok_status();
  }

  template <class Predicate>
  std::vector<Claim> claims_of(const Predicate& takes_part) const {
    std::vector<Claim> claims;
    for (std::size_t d = 0; d < demands_.size(); ++d) {
      if (!takes_part(d)) continue;
      for (const Box& box : *demands_[d].boxes) claims.push_back(Claim{d, &box});
    }
    return claims;
  }

  /// A receiver that asks for the same bytes twice would get them, and their fingerprint, twice.
  Status check_pieces(std::size_t e, const std::vector<Piece>& pieces) const {
    for (const Piece& piece : pieces) {
      for (std::size_t i = 1; i < piece.claims.size(); ++i) {
        if (piece.claims[i].demand != piece.claims[i - 1].demand) continue;
        return Status(Code::kCorruption, fmt::format("{}: wants box {} of tensor {} twice",
                                                     input_.receivers[demands_[piece.claims[i].demand].receivers.front()],
                                                     to_string(piece.box), input_.entries[e].name));
      }
    }
    return ok_status();
  }

  void note_coverage(std::size_t e, const std::vector<Piece>& pieces) {
    const wire::ManifestEntry& entry = input_.entries[e];
    if (input_.unwanted == Unwanted::kAllow || (input_.unwanted == Unwanted::kAllowEntirely && pieces.empty())) return;
    std::int64_t covered = 0;
    for (const Piece& piece : pieces) covered += piece.box.elements();
    if (covered == entry.box.elements()) return;
    const bool ignored = std::all_of(input_.wanted.begin(), input_.wanted.end(), [&](const auto& wanted) { return wanted[e].ignored; });
    if (ignored && pieces.empty()) return;
    if (++incomplete_count_ > kNamesListedMax) return;
    incomplete_ +=
        fmt::format("{}{} ({} of {} elements wanted)", incomplete_.empty() ? "" : ", ", entry.name, covered, entry.box.elements());
  }

  bool mark_broken(const Shape& shape, const std::vector<Piece>& pieces, std::vector<bool>& alone) const {
    bool found = false;
    for (const Piece& piece : pieces) {
      for (const Claim& claim : piece.claims) {
        if (alone[claim.demand] || takes(demands_[claim.demand], *claim.box, piece.box, shape)) continue;
        alone[claim.demand] = true;
        found = true;
      }
    }
    return found;
  }

  Status add_piece(const wire::ManifestEntry& entry, const Piece& piece) {
    std::vector<std::int64_t> granule = demands_[piece.claims.front().demand].granule;
    std::vector<std::uint32_t> receivers;
    for (const Claim& claim : piece.claims) {
      const Demand& demand = demands_[claim.demand];
      narrow(granule, demand.granule, entry.shape);
      receivers.insert(receivers.end(), demand.receivers.begin(), demand.receivers.end());
    }
    std::sort(receivers.begin(), receivers.end());
    return split(entry, piece.box, granule, group_of(std::move(receivers)), 0);
  }

  std::uint32_t group_of(std::vector<std::uint32_t> receivers) {
    const auto [place, added] = group_numbers_.try_emplace(std::move(receivers), static_cast<std::uint32_t>(plan_.groups.size()));
    if (added) plan_.groups.push_back(place->first);
    return place->second;
  }

  /// Emits `box`, cut along dimensions from `dim` on where it is larger than a bucket.
  Status split(const wire::ManifestEntry& entry, const Box& box, const std::vector<std::int64_t>& granule, std::uint32_t group,
               std::size_t dim) {
    const std::int64_t bytes = box.elements() * dtype_bytes(entry.dtype);
    if (bytes <= input_.bucket_bytes_max) {
      plan_.cells.push_back(Cell{box, group});
      plan_.bytes += bytes;
      return ok_status();
    }
    if (dim == box.rank()) {
      return Status(Code::kInvalidArgument, fmt::format("tensor {}: {} bytes at {} cannot be cut further (granule {}), a bucket has {}",
                                                        entry.name, bytes, to_string(box), to_string(granule), input_.bucket_bytes_max));
    }
    const std::int64_t step = granule[dim];
    const std::int64_t steps_fit = input_.bucket_bytes_max / (bytes / (box.hi[dim] - box.lo[dim]));
    Box part = box;
    while (part.lo[dim] < box.hi[dim]) {
      const std::int64_t next = (part.lo[dim] / step + 1) * step;
      const std::int64_t furthest = (part.lo[dim] + steps_fit) / step * step;
      const bool rest_fits = steps_fit >= box.hi[dim] - part.lo[dim];
      part.hi[dim] = rest_fits ? box.hi[dim] : std::min(std::max(next, furthest), box.hi[dim]);
      HEADRACE_RETURN_IF_ERROR(split(entry, part, granule, group, dim + 1));
      part.lo[dim] = part.hi[dim];
    }
    return ok_status();
  }

  const BucketPlanInput& input_;
  BucketPlan plan_;
  std::vector<Demand> demands_;  // of the entry that is being planned
  std::map<std::vector<std::uint32_t>, std::uint32_t> group_numbers_;
  std::string incomplete_;
  std::size_t incomplete_count_ = 0;
};

}  // namespace

Result<BucketPlan> make_bucket_plan(const BucketPlanInput& input) {
  return Planner(input).run();
}

}  // namespace headrace
