#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/receiver_client.h"
#include "core/base/dtype.h"
#include "core/base/fingerprint_sum.h"
#include "core/base/shape.h"
#include "core/base/status.h"
#include "core/checkpoint/checkpoint.h"

namespace headrace::cli {

/// The fingerprint of one whole checkpoint tensor.
struct TensorValue {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;
  FingerprintSum sum;
};

/// A part of a tensor and the receivers that hold it, as indices into the clients.
struct HeldPart {
  Box box;
  std::vector<std::size_t> clients;
};

/// What a job serves: whole values, sorted by name, and who holds which part.
struct JobValues {
  struct Defect {
    std::string name;  // of the tensor
    std::string what;
  };
  std::vector<TensorValue> tensors;
  std::vector<std::vector<HeldPart>> parts;  // one entry for each of `tensors`
  std::vector<Defect> defects;               // replicas that differ, tensors of which a part is missing; such tensors are left out above
};

/// Sorted by name. Uses `threads` threads; shows progress.
Result<std::vector<TensorValue>> checkpoint_values(const Checkpoint& checkpoint, std::uint32_t threads);
/// Asks every receiver; equal boxes must have equal values, others are added up to the whole.
Result<JobValues> job_values(std::vector<ReceiverClient>& clients);
/// The pure part of it: `per_client[i]` is what client i said.
Result<JobValues> merge_values(const std::vector<std::vector<wire::TensorFingerprint>>& per_client);
/// The bytes of a checkpoint tensor as storage of dtype `kept` holds them. kInvalidArgument when there is no such conversion.
Result<std::vector<std::byte>> converted_bytes(const CheckpointTensor& tensor, std::span<const std::byte> bytes, Dtype kept);
/// 32 hexadecimal digits.
std::string fingerprint_text(const FingerprintSum& sum);

}  // namespace headrace::cli
