#include <fmt/format.h>

#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "benchmarks/measure.h"
#include "benchmarks/reference_copy.h"
#include "benchmarks/rows.h"
#include "benchmarks/statistics.h"
#include "core/device/device.h"
#include "kernels/fingerprint.h"
#include "sender_sdk/packer.h"

namespace headrace::bench {
namespace {

constexpr std::size_t kRounds = 9;
constexpr std::size_t kTensors = 192;
constexpr std::array<std::int64_t, 2> kShape{2304, 2560};  // w1 of one expert
constexpr std::size_t kTensorBytes = std::size_t{2304} * 2560;
constexpr TensorKey kKey{0x5eed};

std::unique_ptr<DeviceMemory> touched(Device& device, bool exportable, int value) {
  auto memory =
      device.allocate({.bytes = kTensors * kTensorBytes, .exportable = exportable, .touch = true, .label = "bench"}).value_or_throw();
  std::memset(memory->data(), value, memory->size());
  return memory;
}

std::span<std::byte> tensor(const DeviceMemory& memory, std::size_t i) {
  return memory.bytes().subspan(i * kTensorBytes, kTensorBytes);
}

Row read_row(const DeviceMemory& memory) {
  std::uint64_t kept = 0;  // so that no sum can be left out
  const std::array<TimedWork, 2> works{[&] {
                                         return seconds_of([&] {
                                           for (std::size_t i = 0; i < kTensors; ++i)
                                             kept += fingerprint(kKey, 0, tensor(memory, i)).lanes[0];
                                         });
                                       },
                                       [&] {
                                         return seconds_of([&] {
                                           for (std::size_t i = 0; i < kTensors; ++i) kept += read_sum(tensor(memory, i));
                                         });
                                       }};
  const std::vector<std::vector<double>> seconds = interleave("fingerprint/read", kRounds, works);
  const auto bytes = static_cast<double>(memory.size());
  return Row{.name = "fingerprint/read", .value = gigabytes_per_second(bytes, median(seconds[0])), .unit = "GB/s"}
      .against("read-only sum", gigabytes_per_second(bytes, median(seconds[1])))
      .ratio_at_least(0.90)
      .remark(fmt::format("{} tensors of {} bytes, one thread (sum {:016x})", kTensors, kTensorBytes, kept));
}

Row fused_row(const DeviceMemory& source, const DeviceMemory& staging) {
  Packer with(1, true);
  Packer without(1, false);
  const Shape shape(kShape.begin(), kShape.end());
  const Box box = Box::whole(shape);
  const std::vector<std::int64_t> strides = packed_strides(shape, 1);
  FingerprintSum kept;
  const auto pack = [&](Packer& packer) {
    return seconds_of([&] {
      for (std::size_t i = 0; i < kTensors; ++i) {
        kept += packer.pack({kKey, 1, shape, &box, tensor(source, i).data(), strides}, tensor(staging, i).data());
      }
    });
  };
  std::vector<TimedWork> works{[&] { return pack(with); }, [&] { return pack(without); }};
  const std::vector<CopyKind> kinds = copy_kinds();
  for (const CopyKind kind : kinds) {
    works.emplace_back([&, kind] {
      return seconds_of([&] {
        for (std::size_t i = 0; i < kTensors; ++i) plain_copy(kind, tensor(source, i), tensor(staging, i));
      });
    });
  }
  const std::vector<std::vector<double>> seconds = interleave("fingerprint/fused", kRounds, works);
  const auto bytes = static_cast<double>(source.size());
  std::string copies;
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    copies += fmt::format("{}{} {:.1f}", k == 0 ? "" : ", ", copy_kind_name(kinds[k]), gigabytes_per_second(bytes, median(seconds[k + 2])));
  }
  return Row{.name = "fingerprint/fused", .value = gigabytes_per_second(bytes, median(seconds[0])), .unit = "GB/s"}
      .against("the packing copy alone", gigabytes_per_second(bytes, median(seconds[1])))
      .ratio_at_least(0.85)
      .remark(fmt::format("one thread; plain copies of the same bytes in GB/s: {}", copies));
}

}  // namespace

void fingerprint_rows(const Selection& selection, std::vector<Row>& rows) {
  const bool read = selection.wants("fingerprint/read");
  const bool fused = selection.wants("fingerprint/fused");
  if (!read && !fused) return;
  const std::unique_ptr<Device> device = make_host_device();
  const std::unique_ptr<DeviceMemory> source = touched(*device, false, 0x5a);
  if (read) rows.push_back(read_row(*source));
  if (!fused) return;
  const std::unique_ptr<DeviceMemory> staging = touched(*device, true, 1);
  rows.push_back(fused_row(*source, *staging));
}

}  // namespace headrace::bench
