#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/measure.h"
#include "benchmarks/receiver_process.h"
#include "benchmarks/rows.h"
#include "benchmarks/statistics.h"
#include "benchmarks/trainer.h"
#include "core/checkpoint/json.h"

// Beside other projects' released packages: benchmarks/peers/peers.py has measured them just before on the same machine, with the same
// tensors, each moved by the package's own code from one process into live tensors of another.

namespace headrace::bench {
namespace {

constexpr std::size_t kRounds = 5;

/// One line of what peers.py has written.
struct PeerFigure {
  std::string peer;
  std::string work;
  std::int64_t bucket_mib = 0;
  double bytes = 0;
  double tensors = 0;
  double seconds = 0;
};

double number_of(const JsonValue& row, std::string_view key) {
  const JsonValue* value = row.find(key);
  const auto number = value != nullptr ? value->as_double() : std::nullopt;
  if (!number) throw Error(Status(Code::kInvalidArgument, fmt::format("peers' figures: a row has no number {}", key)));
  return *number;
}

std::string text_of(const JsonValue& row, std::string_view key) {
  const JsonValue* value = row.find(key);
  const std::string* text = value != nullptr ? value->as_string() : nullptr;
  if (text == nullptr) throw Error(Status(Code::kInvalidArgument, fmt::format("peers' figures: a row has no text {}", key)));
  return *text;
}

std::vector<PeerFigure> read_figures(const std::string& path) {
  const JsonValue document = read_json_file(path).value_or_throw();
  const JsonValue* rows = document.find("rows");
  const JsonValue::Array* array = rows != nullptr ? rows->as_array() : nullptr;
  if (array == nullptr) throw Error(Status(Code::kInvalidArgument, fmt::format("peers' figures: {} has no rows", path)));
  std::vector<PeerFigure> figures;
  for (const JsonValue& row : *array) {
    figures.push_back({.peer = text_of(row, "peer"),
                       .work = text_of(row, "work"),
                       .bucket_mib = static_cast<std::int64_t>(number_of(row, "bucket_mib")),
                       .bytes = number_of(row, "bytes"),
                       .tensors = number_of(row, "tensors"),
                       .seconds = number_of(row, "seconds")});
  }
  return figures;
}

/// Ours with the tensors of one workload, proven as always. Seconds of the median update.
double our_seconds(const std::string& work, const std::string& model, const std::vector<PeerFigure>& figures, Device& device) {
  const std::string job = job_name("peers-" + work);
  const Source source(model, 1, device);
  for (const PeerFigure& figure : figures) {
    if (figure.work != work) continue;
    if (figure.bytes != static_cast<double>(source.bytes) || figure.tensors != static_cast<double>(source.entries.size())) {
      throw Error(Status(Code::kInvalidArgument,
                         fmt::format("peers' figures: {} moved {} tensors of {} bytes for {}, we have {} of {}", figure.peer,
                                     figure.tensors, figure.bytes, work, source.entries.size(), source.bytes)));
    }
  }
  const ReceiverProcess receiver({job, model});
  Trainer trainer(job, work, source, true);
  const std::array<TimedWork, 1> works{[&] { return trainer.update(); }};
  return median(interleave("peers/" + work, kRounds, works).front());
}

/// One row for each peer, at its best bucket. What verl's own bucket sender takes is the measure; the others stand beside it.
void add_rows(const std::string& work, double seconds, const std::vector<PeerFigure>& figures, std::vector<Row>& rows) {
  std::map<std::string, PeerFigure> best;
  std::map<std::string, std::string> all;
  for (const PeerFigure& figure : figures) {
    if (figure.work != work) continue;
    const auto [entry, added] = best.try_emplace(figure.peer, figure);
    if (!added && figure.seconds < entry->second.seconds) entry->second = figure;
    all[figure.peer] += fmt::format("{}{} MiB: {:.3f} s", all[figure.peer].empty() ? "" : ", ", figure.bucket_mib, figure.seconds);
  }
  const bool tiny = work == "tiny";
  for (const auto& [peer, figure] : best) {
    const auto in_unit = [&](double s) { return tiny ? s * 1e6 / figure.tensors : gigabytes_per_second(figure.bytes, s); };
    Row row{.name = fmt::format("peers/{}/{}", work, peer), .value = in_unit(seconds), .unit = tiny ? "us" : "GB/s"};
    row.against(fmt::format("{}, buckets of {} MiB", peer, figure.bucket_mib), in_unit(figure.seconds));
    if (peer == "verl") tiny ? row.ratio_at_most(0.1) : row.ratio_at_least(2);
    rows.push_back(row.remark(fmt::format("{:.0f} tensors, {:.2f} GB, ours in {:.3f} s and proven; {}: {}", figure.tensors,
                                          figure.bytes / 1e9, seconds, peer, all[peer])));
  }
}

}  // namespace

void peer_rows(const std::string& figures_path, std::vector<Row>& rows) {
  const std::vector<PeerFigure> figures = read_figures(figures_path);
  const std::unique_ptr<Device> device = make_host_device();
  for (const auto& [work, model] : {std::pair<std::string, std::string>{"large", "flat-experts:64"}, {"tiny", "tiny:20000"}}) {
    const bool measured = std::any_of(figures.begin(), figures.end(), [&](const PeerFigure& figure) { return figure.work == work; });
    if (measured) add_rows(work, our_seconds(work, model, figures, *device), figures, rows);
  }
}

}  // namespace headrace::bench
