#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/bare_pipeline.h"
#include "core/device/device.h"
#include "sender_sdk/sender.h"

namespace headrace::bench {

/// A model's tensors in a trainer's memory: a memfd, which a sender packs from unless it was told of it, and reads in place if it was.
struct Source {
  Source(const std::string& model, std::int32_t ranks, Device& device);

  std::vector<wire::ManifestEntry> entries;
  SourceMap map;
  std::unique_ptr<DeviceMemory> memory;
  std::int64_t bytes;  // of the tensors, without gaps
};

/// A connection that sends the whole source again and again.
class Trainer {
 public:
  /// `run` names its versions: steps may not go back within one run.
  Trainer(const std::string& job, std::string run, const Source& source, bool fingerprints);

  /// From now on the receivers read the source where it is.
  void register_source(Device& device);
  /// Seconds from open() to the return of finish().
  double update();
  const UpdateReport& report() const noexcept { return report_; }

 private:
  const Source* source_;
  bool fingerprints_;
  std::unique_ptr<Sender> sender_;
  const std::byte* base_ = nullptr;
  UpdateOptions update_;
  UpdateReport report_;
};

/// Buckets, data path and times of the phases, for a row's note.
std::string phases_text(const UpdateReport& report);

}  // namespace headrace::bench
