#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include "cli/box_bytes.h"
#include "cli/commands.h"
#include "cli/fingerprints.h"
#include "cli/output.h"
#include "cli/receiver_client.h"
#include "core/checkpoint/checkpoint.h"
#include "kernels/element_cast.h"
#include "kernels/fingerprint.h"

namespace headrace::cli {
namespace {

constexpr std::int64_t kReadBytes = std::int64_t{1} << 20;

struct Difference {
  std::string name;
  std::string what;                    // for people
  std::optional<std::int64_t> offset;  // of the first byte that differs, within the tensor
};

struct Comparison {
  std::size_t equal = 0;
  std::vector<std::string> converted;  // compared after the conversion that the job makes on arrival
  std::vector<Difference> differences;
  std::vector<std::string> not_served;  // in the checkpoint, not in the job
};

/// What a checkpoint tensor sums to once it is converted to what the job holds.
Result<FingerprintSum> converted_sum(const Checkpoint& checkpoint, const TensorValue& live) {
  const CheckpointTensor& tensor = *checkpoint.find(live.name);
  const Result<std::span<const std::byte>> bytes = checkpoint.bytes(tensor);
  if (!bytes.ok()) return bytes.status();
  const Result<std::vector<std::byte>> converted = converted_bytes(tensor, bytes.value(), live.dtype);
  if (!converted.ok()) return converted.status();
  return headrace::fingerprint(tensor_key(live.name, live.dtype, live.shape), 0, converted.value());
}

/// Both sorted by name.
Result<Comparison> compare(const Checkpoint& checkpoint, const std::vector<TensorValue>& disk, const JobValues& job,
                           std::vector<std::size_t>& unequal) {
  Comparison result;
  std::size_t d = 0;
  for (std::size_t j = 0; j < job.tensors.size(); ++j) {
    const TensorValue& live = job.tensors[j];
    for (; d < disk.size() && disk[d].name < live.name; ++d) result.not_served.push_back(disk[d].name);
    if (d == disk.size() || disk[d].name != live.name) {
      result.differences.push_back({live.name, "is served but not in the checkpoint", std::nullopt});
      continue;
    }
    const TensorValue& file = disk[d++];
    FingerprintSum expected = file.sum;
    const bool converted = file.dtype != live.dtype && castable(file.dtype, live.dtype);
    if (converted && file.shape == live.shape) {
      const Result<FingerprintSum> sum = converted_sum(checkpoint, live);
      if (!sum.ok()) return sum.status();
      expected = sum.value();
      result.converted.push_back(live.name);
    }
    if ((file.dtype != live.dtype && !converted) || file.shape != live.shape) {
      result.differences.push_back({live.name,
                                    fmt::format("checkpoint has {} {}, the job has {} {}", dtype_name(file.dtype), to_string(file.shape),
                                                dtype_name(live.dtype), to_string(live.shape)),
                                    std::nullopt});
    } else if (expected == live.sum) {
      ++result.equal;
    } else {
      unequal.push_back(j);
    }
  }
  for (; d < disk.size(); ++d) result.not_served.push_back(disk[d].name);
  return result;
}

/// Reads a tensor back until the first byte that differs.
Result<std::optional<std::int64_t>> locate(const TensorValue& tensor, const std::vector<HeldPart>& parts,
                                           std::span<const std::byte> expected, std::vector<ReceiverClient>& clients) {
  const std::int64_t element_bytes = dtype_bytes(tensor.dtype);
  std::optional<std::int64_t> first;
  for (const HeldPart& part : parts) {
    for (const Box& box : cut_box(part.box, std::max<std::int64_t>(1, kReadBytes / element_bytes))) {
      const Result<std::vector<std::byte>> live = clients[part.clients.front()].read(tensor.name, box);
      if (!live.ok()) return live.status();
      if (static_cast<std::int64_t>(live.value().size()) != box.elements() * element_bytes) {
        return Status(Code::kCorruption, fmt::format("read {} {}: {} bytes expected, {} came", tensor.name, to_string(box),
                                                     box.elements() * element_bytes, live.value().size()));
      }
      const std::optional<std::int64_t> offset = first_difference(expected, tensor.shape, element_bytes, box, live.value());
      if (!offset) continue;
      first = std::min(first.value_or(*offset), *offset);
      break;
    }
  }
  return first;
}

Difference describe(const TensorValue& tensor, const std::vector<HeldPart>& parts, const Checkpoint& checkpoint,
                    std::vector<ReceiverClient>& clients) {
  Difference difference{tensor.name, {}, std::nullopt};
  const CheckpointTensor& file = *checkpoint.find(tensor.name);
  const Result<std::span<const std::byte>> bytes = checkpoint.bytes(file);
  Result<std::vector<std::byte>> converted = std::vector<std::byte>();
  if (bytes.ok() && file.dtype != tensor.dtype) converted = converted_bytes(file, bytes.value(), tensor.dtype);
  if (!bytes.ok() || !converted.ok()) {
    difference.what = (bytes.ok() ? converted.status() : bytes.status()).to_string();
    return difference;
  }
  const std::span<const std::byte> expected = file.dtype == tensor.dtype ? bytes.value() : std::span<const std::byte>(converted.value());
  const Result<std::optional<std::int64_t>> offset = locate(tensor, parts, expected, clients);
  if (!offset.ok()) {
    difference.what = fmt::format("fingerprints differ; the place was not found: {}", offset.status().to_string());
  } else if (!offset.value()) {
    difference.what = "fingerprints differ, but the bytes that were read back do not: an update came in between";
  } else {
    difference.offset = offset.value();
    difference.what = fmt::format("first difference at byte {} of {}{}", *difference.offset, expected.size(),
                                  file.dtype == tensor.dtype
                                      ? std::string()
                                      : fmt::format(", converted from {} to {}", dtype_name(file.dtype), dtype_name(tensor.dtype)));
  }
  return difference;
}

ExitCode report(const Comparison& result, const VerifyOptions& options, const JsonOutput& json) {
  const bool same = result.differences.empty();
  if (json.text_allowed()) {
    std::size_t printed = 0;
    for (const Difference& difference : result.differences) {
      if (printed++ == options.differences_max) break;
      fmt::print("{}: {}\n", difference.name, difference.what);
    }
    fmt::print("{} tensors equal, {} different{}{}\n", result.equal, result.differences.size(),
               result.converted.empty() ? std::string() : fmt::format(", {} of them converted", result.converted.size()),
               result.not_served.empty() ? std::string() : fmt::format(", {} of the checkpoint not served", result.not_served.size()));
  }
  JsonValue::Array differences;
  for (const Difference& difference : result.differences) {
    JsonObject item;
    item.set("name", difference.name).set("what", difference.what);
    if (difference.offset) item.set("offset", *difference.offset);
    differences.push_back(item.done());
  }
  return finish_done(json,
                     json.document()
                         .set("equal", result.equal)
                         .set("differences", differences)
                         .set("converted", json_array(result.converted))
                         .set("not_served", json_array(result.not_served)),
                     same ? ExitCode::kDone : ExitCode::kDifference);
}

}  // namespace

ExitCode verify(const VerifyOptions& options) {
  const JsonOutput json(options.json, "verify");
  const Result<Target> target = parse_target(options.to, options.job);
  if (!target.ok()) return finish_failed(target.status(), json);
  const Result<Checkpoint> checkpoint = Checkpoint::open(options.checkpoint);
  if (!checkpoint.ok()) return finish_failed(checkpoint.status(), json);
  Result<std::vector<ReceiverClient>> clients = connect_target(target.value());
  if (!clients.ok()) return finish_failed(clients.status(), json);
  const Result<JobValues> job = job_values(clients.value());
  if (!job.ok()) return finish_failed(job.status(), json);
  const Result<std::vector<TensorValue>> disk = checkpoint_values(checkpoint.value(), options.threads);
  if (!disk.ok()) return finish_failed(disk.status(), json);
  std::vector<std::size_t> unequal;
  Result<Comparison> compared = compare(checkpoint.value(), disk.value(), job.value(), unequal);
  if (!compared.ok()) return finish_failed(compared.status(), json);
  Comparison result = std::move(compared).value();
  for (const JobValues::Defect& defect : job.value().defects) result.differences.push_back({defect.name, defect.what, std::nullopt});
  for (const std::size_t j : unequal) {
    result.differences.push_back(result.differences.size() < options.differences_max
                                     ? describe(job.value().tensors[j], job.value().parts[j], checkpoint.value(), clients.value())
                                     : Difference{job.value().tensors[j].name, "fingerprints differ", std::nullopt});
  }
  return report(result, options, json);
}

}  // namespace headrace::cli
