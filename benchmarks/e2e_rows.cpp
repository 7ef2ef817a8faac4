#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "benchmarks/bare_pipeline.h"
#include "benchmarks/measure.h"
#include "benchmarks/receiver_process.h"
#include "benchmarks/rows.h"
#include "benchmarks/statistics.h"
#include "benchmarks/trainer.h"
#include "core/wire/limits.h"

// From process to process through the public SDK. This process is the trainer; each rank is a process of its own. An update is timed from
// open() to the return of finish(), when every rank has committed. The first update of a connection compiles the plan and is not counted.

namespace headrace::bench {
namespace {

constexpr std::size_t kRounds = 5;

struct Kind {
  bool in_place = false;
  bool fingerprints = true;
  std::string run() const { return fmt::format("{}-{}", in_place ? "registered" : "shm", fingerprints ? "proven" : "bare"); }
  std::string name() const { return std::string(in_place ? "e2e/registered" : "e2e/shm") + (fingerprints ? "" : "/nofp"); }
};

/// One of the four ways beside its bare pipeline.
Row transfer_row(const Kind& kind, const std::string& job, const Source& source, BareSender& bare, Device& device) {
  Trainer trainer(job, kind.run(), source, kind.fingerprints);
  if (kind.in_place) trainer.register_source(device);
  const std::array<TimedWork, 2> works{[&] { return trainer.update(); },
                                       [&] { return bare.run(source.memory->bytes(), kind.in_place, kind.fingerprints); }};
  const std::vector<std::vector<double>> seconds = interleave(kind.name(), kRounds, works);
  const auto bytes = static_cast<double>(source.bytes);
  const std::string pipeline = kind.in_place ? "bare apply" : "bare pipeline";
  return Row{.name = kind.name(), .value = gigabytes_per_second(bytes, median(seconds[0])), .unit = "GB/s"}
      .against(pipeline + (kind.fingerprints ? " with read-back" : ""), gigabytes_per_second(bytes, median(seconds[1])))
      .ratio_at_least(0.90)
      .remark(fmt::format("{:.2f} GB, {}; spread {:.0f} %", bytes / 1e9, phases_text(trainer.report()), spread(seconds[0]) * 100));
}

/// The four ways from one sender to one receiver. Rows that others are compared with are measured even if nobody asked for them.
void transfer_rows(const Selection& selection, const Source& source, Device& device, std::vector<Row>& rows) {
  const bool gain = selection.wants("e2e/registered/gain");
  std::vector<Kind> kinds;
  for (const Kind& kind : {Kind{false, true}, Kind{false, false}, Kind{true, true}, Kind{true, false}}) {
    const bool compared = (gain && !kind.fingerprints) || (selection.wants("e2e/fanout") && kind.name() == "e2e/shm");
    if (compared || selection.wants(kind.name())) kinds.push_back(kind);
  }
  if (kinds.empty()) return;
  const std::string job = job_name("one");
  const ReceiverProcess receiver({job, "v41"});
  BareSender bare("v41", receiver, device);
  const UniqueFd descriptor = device.export_memory(*source.memory).value_or_throw();
  bare.attach_source(descriptor.get(), source.memory->size());
  std::optional<double> packed;
  std::optional<double> registered;
  for (const Kind& kind : kinds) {
    rows.push_back(transfer_row(kind, job, source, bare, device));
    if (!kind.fingerprints) (kind.in_place ? registered : packed) = rows.back().value;
  }
  if (gain) {
    rows.push_back(Row{.name = "e2e/registered/gain", .value = registered.value(), .unit = "GB/s"}
                       .against("e2e/shm/nofp", packed.value())
                       .ratio_at_least(1.5)
                       .remark("both without fingerprints"));
  }
}

void fanout_rows(const Selection& selection, const Source& source, std::vector<Row>& rows) {
  if (!selection.wants("e2e/fanout")) return;
  constexpr std::int32_t kRanks = 4;
  const auto shm = std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.name == "e2e/shm"; });
  const double shm_ms_per_gb = 1000 / shm->value;
  const std::string job = job_name("four");
  std::vector<std::unique_ptr<ReceiverProcess>> receivers;
  for (std::int32_t r = 0; r < kRanks; ++r) {
    receivers.push_back(std::make_unique<ReceiverProcess>(ReceiverProcess::Options{job, "v41", r, kRanks}));
  }
  Trainer trainer(job, "bench", source, true);
  const std::array<TimedWork, 1> works{[&] { return trainer.update(); }};
  const double seconds = median(interleave("e2e/fanout", kRounds, works).front());
  const UpdateReport& report = trainer.report();
  rows.push_back(Row{.name = "e2e/fanout", .value = seconds * 1e12 / static_cast<double>(report.applied_bytes), .unit = "ms"}
                     .against("e2e/shm", shm_ms_per_gb)
                     .ratio_at_most(1.20)
                     .remark(fmt::format("a GB applied, {:.2f} GB in {} ranks; {}", static_cast<double>(report.applied_bytes) / 1e9, kRanks,
                                         phases_text(report))));
  rows.push_back(Row{.name = "e2e/fanout/wire", .value = static_cast<double>(report.wire_bytes), .unit = "bytes"}
                     .against("wanted", static_cast<double>(source.bytes))
                     .ratio_exactly_one()
                     .remark("packed once, however many ranks read it"));
}

constexpr double kMiB = 1 << 20;

double resident_bytes(const ReceiverProcess& receiver) {
  return static_cast<double>(receiver.status_bytes("RssAnon") + receiver.status_bytes("RssShmem"));
}

void memory_rows(const Selection& selection, const Source& source, std::vector<Row>& rows) {
  if (!selection.wants("e2e/memory")) return;
  const std::string job = job_name("memory");
  const ReceiverProcess receiver({job, "v41"});
  const double before = resident_bytes(receiver);
  Trainer trainer(job, "bench", source, true);
  trainer.update();
  const double first = resident_bytes(receiver);
  const auto extra = static_cast<double>(receiver.memory_extra_bytes_max());
  constexpr double kAllowed = 2.0 * static_cast<double>(limits::kBucketBytesDefault) / kMiB + 64;
  rows.push_back(Row{.name = "e2e/memory", .value = extra / kMiB, .unit = "MiB"}.value_at_most(kAllowed).remark(
      fmt::format("the receiver's own figure; of the kernel: {:.1f} MiB more resident after the first update than before, peak of the "
                  "process {:.0f} MiB",
                  (first - before) / kMiB, static_cast<double>(receiver.status_bytes("VmHWM")) / kMiB)));
}

/// What fifty updates add to a receiver. ZeroMQ's queues are made of blocks of 256 messages, and the second block of each is touched when
/// the first is full: that is over after the updates that do not count. Then a heap still moves by some pages now and then. Over many times
/// fifty updates that is less than a page in fifty, and what is lost in each update is more from 82 bytes on.
void growth_row(const Selection& selection, Device& device, std::vector<Row>& rows) {
  if (!selection.wants("e2e/memory/growth")) return;
  constexpr std::size_t kSettled = 100;
  constexpr std::size_t kUpdates = 500;
  constexpr std::ptrdiff_t kEnd = 50;
  constexpr double kPage = 4096;
  const std::string model = "flat-experts:8";
  const std::string job = job_name("growth");
  const Source source(model, 1, device);
  const ReceiverProcess receiver({job, model});
  Trainer trainer(job, "bench", source, true);
  std::vector<double> after;  // each update
  for (std::size_t i = 0; i < kSettled + kUpdates; ++i) {
    trainer.update();
    after.push_back(resident_bytes(receiver));
  }
  const double early = median({after.begin() + kSettled, after.begin() + kSettled + kEnd});
  const double late = median({after.end() - kEnd, after.end()});
  const double of_fifty = (late - early) * 50 / static_cast<double>(kUpdates - kEnd);
  rows.push_back(
      Row{.name = "e2e/memory/growth", .value = std::trunc(of_fifty / kPage) * kPage / kMiB, .unit = "MiB"}.value_at_most(0).remark(
          fmt::format(
              "whole pages in fifty updates; from the median of the first {} to that of the last {} of {} updates it is {:+.0f} KiB", kEnd,
              kEnd, kUpdates, (late - early) / 1024)));
}

void tiny_rows(const Selection& selection, Device& device, std::vector<Row>& rows) {
  if (selection.wants("e2e/tiny")) {
    constexpr std::size_t kTensors = 100'000;
    const std::string model = fmt::format("tiny:{}", kTensors);
    const std::string job = job_name("tiny");
    const Source source(model, 1, device);
    const ReceiverProcess receiver({job, model});
    Trainer trainer(job, "bench", source, true);
    const std::array<TimedWork, 1> works{[&] { return trainer.update(); }};
    const std::vector<double> seconds = interleave("e2e/tiny", 9, works).front();
    rows.push_back(
        Row{.name = "e2e/tiny", .value = median(seconds) * 1e6 / static_cast<double>(kTensors), .unit = "us"}.value_at_most(1.5).remark(
            fmt::format("a tensor of 4 KiB, {} of them; {}", kTensors, phases_text(trainer.report()))));
  }
  if (selection.wants("e2e/idle")) {
    const std::string job = job_name("idle");
    const Source source("tiny:1", 1, device);
    const ReceiverProcess receiver({job, "tiny:1"});
    Trainer trainer(job, "bench", source, true);
    const std::array<TimedWork, 1> works{[&] { return trainer.update(); }};
    const std::vector<double> seconds = interleave("e2e/idle", 199, works).front();
    rows.push_back(Row{.name = "e2e/idle", .value = median(seconds) * 1e3, .unit = "ms"}.value_at_most(1).remark(
        fmt::format("an update of one tensor of 4 KiB; {}", phases_text(trainer.report()))));
  }
}

}  // namespace

void e2e_rows(const Selection& selection, std::vector<Row>& rows) {
  const std::unique_ptr<Device> device = make_host_device();
  std::vector<Row> measured;
  if (std::any_of(row_names().begin(), row_names().end(), [&](const std::string& name) {
        const bool small = name == "e2e/tiny" || name == "e2e/idle" || name == "e2e/memory/growth";
        return name.starts_with("e2e/") && !small && selection.wants(name);
      })) {
    const Source source("v41", 1, *device);
    transfer_rows(selection, source, *device, measured);
    fanout_rows(selection, source, measured);
    memory_rows(selection, source, measured);
  }
  growth_row(selection, *device, measured);
  tiny_rows(selection, *device, measured);
  std::copy_if(measured.begin(), measured.end(), std::back_inserter(rows), [&](const Row& row) { return selection.wants(row.name); });
}

}  // namespace headrace::bench
