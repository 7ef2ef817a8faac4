#include "sender_sdk/packer.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/wire/limits.h"

namespace headrace {
namespace {

constexpr std::int64_t kBytesPerPartMin = 256 << 10;  // less is not worth a hand-over between threads
constexpr std::int64_t kPartsPerThread = 4;
constexpr std::int64_t kRunPartAlignment = 4096;  // a fingerprint block

static_assert(limits::kDimsMax <= kCopyDimsMax, "the dimensions of any entry fit one nest");

struct PackLoop {
  std::int64_t count = 1;
  std::int64_t memory = 0;
  std::int64_t packed = 0;
  std::int64_t tensor = 0;
};

/// Part `i` of `parts` of a walk: a range of its outermost loop, or of its only run.
PackNests part_of(const PackNests& whole, std::int64_t i, std::int64_t parts) {
  PackNests part = whole;
  if (whole.copy.dim_count == 0) {
    const std::int64_t blocks = (whole.copy.run_bytes + kRunPartAlignment - 1) / kRunPartAlignment;
    const std::int64_t begin = blocks * i / parts * kRunPartAlignment;
    const std::int64_t end = std::min(blocks * (i + 1) / parts * kRunPartAlignment, whole.copy.run_bytes);
    for (StridedCopy* nest : {&part.copy, &part.tensor_offsets}) {
      nest->src_offset += begin;
      nest->dst_offset += begin;
      nest->run_bytes = end - begin;
    }
    return part;
  }
  const std::int64_t count = whole.copy.dims[0].count;
  const std::int64_t begin = count * i / parts;
  const std::int64_t end = count * (i + 1) / parts;
  for (StridedCopy* nest : {&part.copy, &part.tensor_offsets}) {
    CopyDim& outer = nest->dims[0];
    nest->src_offset += begin * outer.src_stride;
    nest->dst_offset += begin * outer.dst_stride;
    outer.count = end - begin;
  }
  return part;
}

std::int64_t parts_for(const PackNests& nests, std::size_t threads) {
  const std::int64_t bytes = nests.copy.dst_bytes();
  const std::int64_t steps = nests.copy.dim_count == 0 ? std::max<std::int64_t>(bytes / kRunPartAlignment, 1) : nests.copy.dims[0].count;
  const std::int64_t wanted = std::min(static_cast<std::int64_t>(threads) * kPartsPerThread, bytes / kBytesPerPartMin);
  return threads == 1 ? 1 : std::clamp<std::int64_t>(wanted, 1, steps);
}

}  // namespace

PackNests make_pack_nests(const CellSource& source) {
  // From the innermost dimension outwards; what lies in one piece on every side becomes the run. Nothing is allocated: this is done for
  // each of perhaps a hundred thousand small tensors.
  std::array<PackLoop, kCopyDimsMax> loops;
  std::size_t count = 0;
  std::int64_t run = source.elem_bytes;
  std::int64_t packed = source.elem_bytes;
  std::int64_t tensor = source.elem_bytes;
  std::int64_t tensor_offset = 0;
  for (std::size_t d = source.shape.size(); d-- > 0;) {
    const std::int64_t extent = source.box->hi[d] - source.box->lo[d];
    tensor_offset += source.box->lo[d] * tensor;
    if (extent != 1) {
      if (count == 0 && source.strides[d] == run && packed == run && tensor == run) {
        run *= extent;
      } else {
        loops[count++] = {extent, source.strides[d], packed, tensor};
      }
    }
    packed *= extent;
    tensor *= source.shape[d];
  }
  PackNests nests{StridedCopy::flat(0, 0, run), StridedCopy::flat(0, tensor_offset, run)};
  nests.copy.dim_count = nests.tensor_offsets.dim_count = static_cast<std::uint8_t>(count);
  for (std::size_t i = 0; i < count; ++i) {
    const PackLoop& loop = loops[count - 1 - i];
    nests.copy.dims[i] = {loop.count, loop.memory, loop.packed};
    nests.tensor_offsets.dims[i] = {loop.count, loop.memory, loop.tensor};
  }
  return nests;
}

bool readable_in_place(const CellSource& source) {
  std::int64_t innermost = source.elem_bytes;  // of a single element
  for (std::size_t d = 0; d < source.box->rank(); ++d) {
    if (source.box->hi[d] - source.box->lo[d] == 1) continue;
    if (source.strides[d] == 0) return false;
    innermost = source.strides[d];
  }
  return innermost == source.elem_bytes;
}

Packer::Packer(std::uint32_t threads, bool fingerprints) : pool_(thread_count(threads)), executor_(pool_), fingerprints_(fingerprints) {}

FingerprintSum Packer::pack(const CellSource& source, std::byte* packed) {
  const PackNests nests = make_pack_nests(source);
  if (!fingerprints_) {
    const CopyJob job{nests.copy, source.data, packed};
    executor_.run({&job, 1});
    return {};
  }
  const std::int64_t parts = parts_for(nests, pool_.threads());
  if (parts == 1) return copy_and_fingerprint(source.key, nests.copy, nests.tensor_offsets, source.data, packed);
  std::vector<FingerprintSum> sums(static_cast<std::size_t>(parts));
  pool_.run(sums.size(), [&](std::size_t i) {
    const PackNests part = part_of(nests, static_cast<std::int64_t>(i), parts);
    sums[i] = copy_and_fingerprint(source.key, part.copy, part.tensor_offsets, source.data, packed);
  });
  FingerprintSum sum;
  for (const FingerprintSum& each : sums) sum += each;
  return sum;
}

FingerprintSum Packer::sum(const CellSource& source) {
  if (!fingerprints_) return {};
  const PackNests nests = make_pack_nests(source);
  const auto sum_part = [&](const PackNests& part) { return fingerprint_nest(source.key, inverse(part.tensor_offsets), source.data); };
  const std::int64_t parts = parts_for(nests, pool_.threads());
  if (parts == 1) return sum_part(nests);
  std::vector<FingerprintSum> sums(static_cast<std::size_t>(parts));
  pool_.run(sums.size(), [&](std::size_t i) { sums[i] = sum_part(part_of(nests, static_cast<std::int64_t>(i), parts)); });
  FingerprintSum sum;
  for (const FingerprintSum& each : sums) sum += each;
  return sum;
}

}  // namespace headrace
