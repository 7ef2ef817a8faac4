#include "cli/picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/output.h"
#include "cli/svg.h"

namespace headrace::cli {
namespace {

constexpr std::size_t kLanesMax = 1'024;
constexpr std::size_t kBandsMax = 16'384;
constexpr std::size_t kNameMax = 20;  // characters that have room beside a lane or a sender
constexpr double kPhaseMsMax = 1e12;  // of what is no slip: thirty years

struct PhaseStyle {
  std::string_view name;
  std::string_view fill;
  std::string_view edge;
};
constexpr std::array<PhaseStyle, 4> kPhases{{{"manifest", "#fff3d6", "#a8761a"},
                                             {"transfer", "#ddeeff", "#2f6fb0"},
                                             {"prepare", "#ddf4e0", "#2c8a46"},
                                             {"commit", "#ffe3e3", "#b23b3b"}}};

/// One line of a timeline.
struct Lane {
  std::string name;
  std::array<double, kPhases.size()> phases_ms{};
  std::string beside;

  double total_ms() const {
    double sum = 0;
    for (const double ms : phases_ms) sum += ms;
    return sum;
  }
};

/// One end of a flow.
struct Node {
  std::string name;
  std::string beside;
  double bytes = 0;
};

/// Fields of a document. The first that is not as it must be sticks and is named with its place; what is read afterwards means nothing.
class Fields {
 public:
  const Status& status() const noexcept { return status_; }

  const JsonValue& at(const JsonValue& object, std::string_view key) {
    static const JsonValue kNone;
    const JsonValue* value = object.find(key);
    if (value != nullptr) return *value;
    refuse(key, "a field", object.as_object() != nullptr ? "nothing" : object.kind());
    return kNone;
  }
  std::string text(const JsonValue& object, std::string_view key) {
    const JsonValue& value = at(object, key);
    if (value.as_string() != nullptr) return *value.as_string();
    refuse(key, "text", value.kind());
    return {};
  }
  std::uint64_t count(const JsonValue& value, std::string_view key) {
    if (const auto number = value.as_uint64()) return *number;
    refuse(key, "a whole number from 0 on", value.kind());
    return 0;
  }
  std::uint64_t count_at(const JsonValue& object, std::string_view key) { return count(at(object, key), key); }
  double ms(const JsonValue& object, std::string_view key) {
    const auto number = at(object, key).as_double();
    if (number && *number >= 0 && *number <= kPhaseMsMax) return *number;
    refuse(key, "milliseconds", number ? fmt::format("{}", *number) : std::string(at(object, key).kind()));
    return 0;
  }
  /// At most so many items.
  const JsonValue::Array& list(const JsonValue& object, std::string_view key, std::size_t items_max) {
    static const JsonValue::Array kNone;
    const JsonValue& value = at(object, key);
    const JsonValue::Array* items = value.as_array();
    if (items != nullptr && items->size() <= items_max) return *items;
    refuse(key, fmt::format("a list of at most {}", items_max),
           items != nullptr ? std::to_string(items->size()) : std::string(value.kind()));
    return kNone;
  }
  void refuse(std::string_view key, std::string_view expected, std::string_view actual) {
    if (status_.ok()) status_ = Status(Code::kInvalidArgument, fmt::format("{}{}: expected {}, not {}", place_, key, expected, actual));
  }
  /// Where the next fields stand, for errors.
  void enter(std::string place) { place_ = std::move(place); }

 private:
  Status status_;
  std::string place_;
};

Lane lane_of(Fields& fields, const JsonValue& value, std::string name, std::string beside) {
  Lane lane{std::move(name), {}, std::move(beside)};
  const JsonValue& phases = fields.at(value, "phases_ms");
  for (std::size_t p = 0; p < kPhases.size(); ++p) lane.phases_ms[p] = fields.ms(phases, kPhases[p].name);
  return lane;
}

Lane receipt_lane(Fields& fields, const JsonValue& receipt) {
  const std::string engine = shortened(fields.text(receipt, "engine"), kNameMax);
  const std::string name = fmt::format("{} rank {}", engine, fields.count_at(receipt, "rank"));
  return lane_of(fields, receipt, name, human_bytes(fields.count_at(receipt, "applied_bytes")));
}

std::string title_of(Fields& fields, const JsonValue& update) {
  const std::string version = fields.text(update, "version");
  return fmt::format("{}, {}", version, fields.text(update, "data_path"));
}

/// Phases follow one another; all lanes begin where the update was opened.
std::string timeline(const std::vector<Lane>& lanes, const std::string& title) {
  constexpr double kLeft = 190;
  constexpr double kRoom = 520;
  constexpr double kWidth = kLeft + kRoom + 190;
  constexpr double kRow = 30;
  const double foot = 66 + kRow * static_cast<double>(lanes.size());
  Svg picture(kWidth, foot + 28, title);
  double longest = 0;
  for (const Lane& lane : lanes) longest = std::max(longest, lane.total_ms());
  const double scale = longest > 0 ? kRoom / longest : 0;
  double x = kLeft;
  for (const PhaseStyle& phase : kPhases) {
    picture.box(x, 40, 12, 12, phase.fill, phase.edge);
    picture.text(x + 17, 50, phase.name);
    x += 90;
  }
  double y = 66;
  for (const Lane& lane : lanes) {
    picture.text(kLeft - 12, y + 15, lane.name, Svg::Anchor::kEnd);
    x = kLeft;
    for (std::size_t p = 0; p < kPhases.size(); ++p) {
      const double width = lane.phases_ms[p] * scale;
      if (width > 0)
        picture.box(x, y, width, kRow - 8, kPhases[p].fill, kPhases[p].edge,
                    fmt::format("{}: {:.3g} ms", kPhases[p].name, lane.phases_ms[p]));
      x += width;
    }
    picture.text(x + 8, y + 15, fmt::format("{:.3g} ms{}{}", lane.total_ms(), lane.beside.empty() ? "" : ", ", lane.beside));
    y += kRow;
  }
  picture.text(kLeft, foot + 14, "0");
  picture.text(kLeft + kRoom, foot + 14, fmt::format("{:.3g} ms", longest), Svg::Anchor::kEnd);
  return std::move(picture).done();
}

/// Node by node downwards, in the middle of the height: where each begins.
std::vector<double> tops(const std::vector<Node>& nodes, double scale, double gap, double top, double height) {
  double used = gap * static_cast<double>(nodes.size() - 1);
  for (const Node& node : nodes) used += node.bytes * scale;
  std::vector<double> begins;
  double y = top + (height - used) / 2;
  for (const Node& node : nodes) {
    begins.push_back(y);
    y += node.bytes * scale + gap;
  }
  return begins;
}

/// `bytes` is [sender][receiver]. Bands stand at both ends as wide as the bytes that go through them.
std::string flows(std::vector<Node> senders, std::vector<Node> receivers, const std::vector<std::vector<std::uint64_t>>& bytes,
                  const std::string& title) {
  constexpr double kWidth = 860;
  constexpr double kLeft = 200;
  constexpr double kRight = 560;
  constexpr double kBar = 12;
  constexpr double kRow = 48;
  constexpr double kWidest = 34;  // of a receiver; with the gap it stays below a row, and so all senders together do
  constexpr double kGap = 14;
  constexpr double kTop = 44;
  double most = 0;
  for (std::size_t s = 0; s < senders.size(); ++s) {
    for (std::size_t r = 0; r < receivers.size(); ++r) {
      const auto share = static_cast<double>(bytes[s][r]);
      senders[s].bytes += share;
      receivers[r].bytes += share;
    }
  }
  for (const Node& receiver : receivers) most = std::max(most, receiver.bytes);
  const double scale = most > 0 ? kWidest / most : 0;
  const double height = kRow * static_cast<double>(std::max(senders.size(), receivers.size()));
  Svg picture(kWidth, kTop + height + 16, title);
  const std::vector<double> lefts = tops(senders, scale, kGap, kTop, height);
  const std::vector<double> rights = tops(receivers, scale, kGap, kTop, height);
  std::vector<double> at_right = rights;
  for (std::size_t s = 0; s < senders.size(); ++s) {
    double at_left = lefts[s];
    for (std::size_t r = 0; r < receivers.size(); ++r) {
      const double width = static_cast<double>(bytes[s][r]) * scale;
      if (width <= 0) continue;
      picture.band(kLeft + kBar, at_left + width / 2, kRight, at_right[r] + width / 2, width,
                   fmt::format("{} to {}: {}", senders[s].name, receivers[r].name, human_bytes(bytes[s][r])));
      at_left += width;
      at_right[r] += width;
    }
  }
  const auto draw_nodes = [&](const std::vector<Node>& nodes, const std::vector<double>& begins, double x, bool left) {
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      const double middle = begins[n] + nodes[n].bytes * scale / 2;
      picture.box(x, begins[n], kBar, nodes[n].bytes * scale, left ? "#fff3d6" : "#ddf4e0", left ? "#a8761a" : "#2c8a46");
      picture.text(left ? x - 10 : x + kBar + 10, middle + 4, nodes[n].name + nodes[n].beside,
                   left ? Svg::Anchor::kEnd : Svg::Anchor::kStart);
    }
  };
  draw_nodes(senders, lefts, kLeft, true);
  draw_nodes(receivers, rights, kRight, false);
  return std::move(picture).done();
}

Result<std::string> draw_plan(const JsonValue& plan) {
  Fields fields;
  std::vector<Node> receivers;
  std::vector<std::uint64_t> wanted;
  const JsonValue::Array& ranks = fields.list(plan, "ranks", kLanesMax);
  if (ranks.empty()) fields.refuse("ranks", "at least one", "none");
  for (const JsonValue& rank : ranks) {
    fields.enter(fmt::format("ranks[{}].", receivers.size()));
    const std::uint64_t number = fields.count_at(rank, "rank");
    const std::uint64_t tensors = fields.count_at(rank, "tensors");
    wanted.push_back(fields.count_at(rank, "wire_bytes"));
    receivers.push_back({fmt::format("rank {}", number), fmt::format(": {}, {} tensors", human_bytes(wanted.back()), tensors), 0});
  }
  fields.enter("");
  std::vector<Node> senders;
  std::vector<std::vector<std::uint64_t>> bytes;
  std::vector<std::uint64_t> brought(wanted.size());
  const JsonValue::Array& listed = fields.list(plan, "senders", kBandsMax / std::max<std::size_t>(ranks.size(), 1));
  if (listed.empty()) fields.refuse("senders", "at least one", "none");
  for (const JsonValue& sender : listed) {
    fields.enter(fmt::format("senders[{}].", senders.size()));
    senders.push_back({shortened(fields.text(sender, "name"), kNameMax), "", 0});
    const JsonValue::Array& shares = fields.list(sender, "wire_bytes", ranks.size());
    if (shares.size() != ranks.size()) fields.refuse("wire_bytes", fmt::format("{} of them", ranks.size()), std::to_string(shares.size()));
    std::vector<std::uint64_t>& row = bytes.emplace_back(ranks.size());
    for (std::size_t r = 0; r < shares.size(); ++r) {
      row[r] = fields.count(shares[r], "wire_bytes");
      if (__builtin_add_overflow(brought[r], row[r], &brought[r])) fields.refuse("wire_bytes", "a size", "one without end");
    }
  }
  fields.enter("");
  for (std::size_t r = 0; r < wanted.size(); ++r) {
    if (brought[r] != wanted[r])
      fields.refuse("senders", fmt::format("{} bytes for {}", wanted[r], receivers[r].name), std::to_string(brought[r]));
  }
  const std::string family = fields.text(plan, "family");
  const std::string layout = fields.text(plan, "layout");
  const std::uint64_t tensors = fields.count_at(plan, "tensors");
  const std::string title =
      fmt::format("{} {}: {} tensors, {} on the wire", family, layout, tensors, human_bytes(fields.count_at(plan, "wire_bytes")));
  if (!fields.status().ok()) return fields.status();
  return flows(std::move(senders), std::move(receivers), bytes, title);
}

Result<std::string> draw_report(const JsonValue& report) {
  Fields fields;
  const std::string title = title_of(fields, report);
  const std::string amount = human_bytes(fields.count_at(report, "wire_bytes"));
  std::vector<Lane> lanes{lane_of(fields, report, "sender", amount + " on the wire")};
  for (const JsonValue& receipt : fields.list(report, "receipts", kLanesMax)) {
    fields.enter(fmt::format("receipts[{}].", lanes.size() - 1));
    lanes.push_back(receipt_lane(fields, receipt));
  }
  if (!fields.status().ok()) return fields.status();
  return timeline(lanes, title);
}

Result<std::string> draw_receipt(const JsonValue& receipt) {
  Fields fields;
  const std::string title = title_of(fields, receipt);
  const std::vector<Lane> lanes{receipt_lane(fields, receipt)};
  if (!fields.status().ok()) return fields.status();
  return timeline(lanes, title);
}

}  // namespace

Result<std::string> draw(const JsonValue& document) {
  const JsonValue* report = document.find("report");
  const JsonValue& drawn = report != nullptr ? *report : document;
  if (report == nullptr && document.find("ranks") != nullptr && document.find("family") != nullptr) return draw_plan(document);
  if (drawn.find("receipts") != nullptr) return draw_report(drawn);
  if (drawn.find("phases_ms") != nullptr) return draw_receipt(drawn);
  return Status(Code::kInvalidArgument, "expected the JSON of a push, a plan, a report or a receipt");
}

}  // namespace headrace::cli
