#include "cli/fingerprints.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "cli/progress.h"
#include "core/base/worker_pool.h"
#include "kernels/element_cast.h"
#include "kernels/fingerprint.h"

namespace headrace::cli {
namespace {

constexpr std::size_t kTensorsAtATime = 256;

struct Gathered {
  Dtype dtype = Dtype::kU8;
  Shape shape;
  FingerprintSum sum;
  std::int64_t elements = 0;
  std::vector<HeldPart> parts;
  std::vector<FingerprintSum> sums;  // one for each part
  std::string defect;
};

/// Adds what one client holds of a tensor. The first defect of a tensor is kept.
void gather(Gathered& gathered, const wire::TensorFingerprint& value, std::size_t client) {
  if (!gathered.defect.empty()) return;
  if (gathered.parts.empty()) {
    gathered.dtype = value.dtype;
    gathered.shape = value.shape;
  }
  if (!value.equal) {
    gathered.defect = fmt::format("the {} copies of {} on receiver {} differ", value.copies, to_string(value.box), client);
    return;
  }
  if (gathered.dtype != value.dtype || gathered.shape != value.shape) {
    gathered.defect = fmt::format("{} {} on one receiver, {} {} on receiver {}", dtype_name(gathered.dtype), to_string(gathered.shape),
                                  dtype_name(value.dtype), to_string(value.shape), client);
    return;
  }
  for (std::size_t i = 0; i < gathered.parts.size(); ++i) {
    HeldPart& part = gathered.parts[i];
    if (part.box == value.box) {
      part.clients.push_back(client);
      if (!(gathered.sums[i] == value.sum)) {
        gathered.defect = fmt::format("receivers {} and {} hold different bytes of {}: {} and {}", part.clients.front(), client,
                                      to_string(value.box), fingerprint_text(gathered.sums[i]), fingerprint_text(value.sum));
      }
      return;
    }
    if (!intersect(part.box, value.box).empty()) {
      gathered.defect = fmt::format("parts {} and {} overlap, so their values cannot be added", to_string(part.box), to_string(value.box));
      return;
    }
  }
  gathered.parts.push_back(HeldPart{value.box, {client}});
  gathered.sums.push_back(value.sum);
  gathered.sum += value.sum;
  gathered.elements += value.box.elements();
}

}  // namespace

std::string fingerprint_text(const FingerprintSum& sum) {
  return fmt::format("{:016x}{:016x}", sum.lanes[0], sum.lanes[1]);
}

Result<std::vector<TensorValue>> checkpoint_values(const Checkpoint& checkpoint, std::uint32_t threads) {
  std::vector<const CheckpointTensor*> tensors;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) tensors.push_back(&tensor);
  std::sort(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  std::vector<TensorValue> values(tensors.size());
  std::vector<Status> failures(tensors.size());
  WorkerPool pool(threads);
  Progress progress("fingerprints", static_cast<std::uint64_t>(checkpoint.total_bytes()));
  std::uint64_t done = 0;
  for (std::size_t first = 0; first < tensors.size(); first += kTensorsAtATime) {
    const std::size_t count = std::min(kTensorsAtATime, tensors.size() - first);
    pool.run(count, [&](std::size_t i) {
      const CheckpointTensor& tensor = *tensors[first + i];
      const Result<std::span<const std::byte>> bytes = checkpoint.bytes(tensor);
      if (!bytes.ok()) {
        failures[first + i] = bytes.status();
        return;
      }
      const FingerprintSum sum = headrace::fingerprint(tensor_key(tensor.name, tensor.dtype, tensor.shape), 0, bytes.value());
      values[first + i] = TensorValue{tensor.name, tensor.dtype, tensor.shape, sum};
    });
    for (std::size_t i = first; i < first + count; ++i) {
      if (!failures[i].ok()) return failures[i];
      done += static_cast<std::uint64_t>(tensors[i]->bytes());
    }
    progress.update(done);
  }
  return values;
}

Result<std::vector<std::byte>> converted_bytes(const CheckpointTensor& tensor, std::span<const std::byte> bytes, Dtype kept) {
  const ElementCast cast{tensor.dtype, kept};
  if (cast.none() || !castable(cast.from, cast.to)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: no conversion from {} to {}", tensor.name, dtype_name(tensor.dtype), dtype_name(kept)));
  }
  const auto elements = static_cast<std::int64_t>(bytes.size()) / cast.from_bytes();
  std::vector<std::byte> result(static_cast<std::size_t>(elements * cast.to_bytes()));
  cast_rows(cast, bytes.data(), result.data(), 1, 0, 0, elements);
  return result;
}

Result<JobValues> merge_values(const std::vector<std::vector<wire::TensorFingerprint>>& per_client) {
  std::map<std::string, Gathered> tensors;
  for (std::size_t client = 0; client < per_client.size(); ++client) {
    for (const wire::TensorFingerprint& value : per_client[client]) {
      if (value.box.rank() != value.shape.size() || !box_fits(value.box, value.shape)) {
        return Status(Code::kCorruption, fmt::format("{}: receiver {} answered with a box {} of a tensor {}", value.name, client,
                                                     to_string(value.box), to_string(value.shape)));
      }
      gather(tensors[value.name], value, client);
    }
  }
  JobValues job;
  for (auto& [name, gathered] : tensors) {
    const std::int64_t elements = element_count(gathered.shape).value_or(-1);
    if (gathered.defect.empty() && gathered.elements != elements) {
      gathered.defect = fmt::format("the receivers hold {} of {} elements", gathered.elements, elements);
    }
    if (!gathered.defect.empty()) {
      job.defects.push_back({name, gathered.defect});
      continue;
    }
    job.tensors.push_back(TensorValue{name, gathered.dtype, gathered.shape, gathered.sum});
    job.parts.push_back(std::move(gathered.parts));
  }
  return job;
}

Result<JobValues> job_values(std::vector<ReceiverClient>& clients) {
  std::vector<std::vector<wire::TensorFingerprint>> per_client;
  for (ReceiverClient& client : clients) {
    Result<std::vector<wire::TensorFingerprint>> values = client.fingerprints();
    if (!values.ok()) return values.status();
    per_client.push_back(std::move(values).value());
  }
  return merge_values(per_client);
}

}  // namespace headrace::cli
