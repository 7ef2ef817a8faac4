#include "benchmarks/trainer.h"

#include <fmt/format.h>

#include <cstring>
#include <span>
#include <utility>

#include "benchmarks/measure.h"
#include "benchmarks/receiver_process.h"
#include "benchmarks/v41_model.h"

namespace headrace::bench {
namespace {

/// Random words, so that no page and no line is like another.
void fill(std::span<std::byte> bytes) {
  std::uint64_t state = 41;
  for (std::size_t i = 0; i + sizeof(state) <= bytes.size(); i += sizeof(state)) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    std::memcpy(bytes.data() + i, &state, sizeof(state));
  }
}

}  // namespace

Source::Source(const std::string& model, std::int32_t ranks, Device& device)
    : entries(sender_order(e2e_layout(model, ranks, 0), 1, false)),
      map(entries),
      memory(device.allocate({.bytes = static_cast<std::size_t>(map.bytes), .exportable = true, .touch = true, .label = "bench-source"})
                 .value_or_throw()),
      bytes(total_bytes(entries)) {
  fill(memory->bytes());
}

Trainer::Trainer(const std::string& job, std::string run, const Source& source, bool fingerprints)
    : source_(&source), fingerprints_(fingerprints) {
  SenderOptions options;
  options.job = job;
  options.fingerprints = fingerprints;
  sender_ = Sender::connect(options).value_or_throw();
  base_ = source.memory->data();
  update_.version.run = std::move(run);
  for (const wire::ManifestEntry& entry : source.entries) update_.entries.push_back({entry.name, entry.dtype, entry.shape, {}});
}

void Trainer::register_source(Device& device) {
  base_ = sender_->adopt(device.export_memory(*source_->memory).value_or_throw(), source_->memory->size()).value_or_throw().data();
}

double Trainer::update() {
  ++update_.version.step;
  const double seconds = seconds_of([&] {
    throw_if_error(sender_->open(update_));
    for (std::size_t e = 0; e < source_->entries.size(); ++e) {
      throw_if_error(sender_->add(source_->entries[e].name, {base_ + source_->map.offsets[e], {}}));
    }
    report_ = sender_->finish().value_or_throw();
  });
  if (report_.proven != fingerprints_) throw Error(Status(Code::kInternal, "an update is proven exactly when it has fingerprints"));
  return seconds;
}

std::string phases_text(const UpdateReport& report) {
  const wire::Phases& p = report.phases_ms;
  return fmt::format("{} buckets by {}; manifest {:.1f}, transfer {:.1f}, prepare {:.1f}, commit {:.1f} ms of the last", report.buckets,
                     report.data_path, p.manifest, p.transfer, p.prepare, p.commit);
}

}  // namespace headrace::bench
