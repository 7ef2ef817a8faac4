#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "benchmarks/measure.h"
#include "benchmarks/rows.h"
#include "benchmarks/statistics.h"
#include "benchmarks/v41_model.h"
#include "receiver/weight_index.h"

namespace headrace::bench {
namespace {

constexpr std::size_t kRounds = 9;
constexpr std::size_t kScanEvery = 100;  // a scan takes so long that every hundredth name has to do

/// What the engines' loaders do: a list of (piece of a name, expert, shard), searched from the start for each name.
class LinearScan {
 public:
  explicit LinearScan(std::int64_t experts) {
    for (std::int64_t e = 0; e < experts; ++e)
      for (const char* shard : {"w1", "w2", "w3"}) pieces_.push_back(fmt::format("experts.{}.{}.", e, shard));
  }
  std::size_t entries() const noexcept { return pieces_.size(); }
  /// The entry's number, or how many there are.
  std::size_t find(std::string_view name) const {
    for (std::size_t i = 0; i < pieces_.size(); ++i)
      if (name.find(pieces_[i]) != std::string_view::npos) return i;
    return pieces_.size();
  }

 private:
  std::vector<std::string> pieces_;
};

}  // namespace

void index_rows(const Selection& selection, std::vector<Row>& rows) {
  if (!selection.wants("index/v41")) return;
  const ModelLayout layout = v41_layout({}, 4, 0);
  const std::vector<wire::ManifestEntry> entries = sender_order(layout, 1, true);
  const LinearScan scan(384);
  std::size_t placed = 0;
  std::size_t indexes = 0;
  std::size_t passes = 0;
  std::size_t scanned = 0;
  std::size_t scan_hits = 0;
  double building = 0;
  const std::vector<TimedWork> works{[&] {
                                       ModelLayout copy = layout;
                                       std::optional<WeightIndex> index;
                                       building = seconds_of([&] { index.emplace(std::move(copy)); });
                                       ++indexes;
                                       ++passes;
                                       placed = 0;
                                       return seconds_of([&] {
                                         for (const wire::ManifestEntry& entry : entries)
                                           if (index->resolve(entry.name).kind == Resolution::Kind::kPlaced) ++placed;
                                       });
                                     },
                                     [&] {
                                       scanned = 0;
                                       return seconds_of([&] {
                                         for (std::size_t i = 0; i < entries.size(); i += kScanEvery, ++scanned)
                                           if (scan.find(entries[i].name) != scan.entries()) ++scan_hits;
                                       });
                                     }};
  const std::vector<std::vector<double>> seconds = interleave("index/v41", kRounds, works);
  if (placed == 0 || scan_hits == 0) throw Error(Status(Code::kInternal, "index/v41: nothing was found"));
  rows.push_back(
      Row{.name = "index/v41", .value = median(seconds[0]) * 1e9 / static_cast<double>(entries.size()), .unit = "ns"}
          .against(fmt::format("linear scan of {}", scan.entries()), median(seconds[1]) * 1e9 / static_cast<double>(scanned))
          .value_at_most(120)
          .remark(fmt::format("a name; {} names, {} with a place on this rank; unplanned: {} passes, {} new indexes (the last built in "
                              "{:.2f} ms), {} cache hits",
                              entries.size(), placed, passes, indexes, building * 1e3, passes - indexes)));
}

}  // namespace headrace::bench
