#include "receiver/inspection.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/wire/limits.h"

namespace headrace {

Inspection::Inspection(const WeightIndex& index, const PlanGeometry& geometry, const StorageTable& table)
    : index_(&index), geometry_(&geometry), table_(&table) {
  set_experts(index.experts_at_load());
}

void Inspection::set_experts(std::shared_ptr<const ExpertMaps> experts) {
  if (experts_ != nullptr && experts_->digest() == experts->digest()) return;
  experts_ = std::move(experts);
  held_ = index_->needed(index_->scopes(), *experts_);
  std::erase_if(held_, [&](const WeightIndex::Needed& needed) {
    return geometry_->of(needed.rule).boxes.empty() || index_->rule(needed.rule).group >= 0;
  });
}

wire::FingerprintReply Inspection::fingerprints(std::uint64_t from, std::uint64_t count) const {
  wire::FingerprintReply reply;
  reply.total = held_.size();
  const std::uint64_t end = from < held_.size() ? from + std::min<std::uint64_t>(count, held_.size() - from) : from;
  for (std::uint64_t i = from; i < end; ++i) {
    const WeightIndex::Needed& needed = held_[i];
    const TensorRule& rule = index_->rule(needed.rule);
    const Resolution resolution = index_->resolve(needed.name, *experts_);
    for (const Box& box : geometry_->of(needed.rule).boxes) {
      const LiveFingerprint live =
          live_fingerprint(rule, *geometry_, resolution.slots, tensor_key(needed.name, rule.dtypes.front(), rule.shape), box);
      reply.tensors.push_back(
          {needed.name, rule.dtypes.front(), rule.shape, box, static_cast<std::uint32_t>(live.copies), live.equal, live.sum});
    }
  }
  return reply;
}

Result<wire::ReadReply> Inspection::read(const wire::ReadRequest& request) const {
  const auto refuse = [&](const std::string& why) { return Status(Code::kInvalidArgument, fmt::format("read {}: {}", request.name, why)); };
  const Resolution resolution = index_->resolve(request.name, *experts_);
  if (resolution.kind == Resolution::Kind::kNotLocal) return refuse("it lives on another rank");
  if (resolution.kind != Resolution::Kind::kPlaced) return refuse("unknown name");
  const TensorRule& rule = index_->rule(resolution.rule);
  if (rule.group >= 0) return refuse("it is computed with, in a staged group, and not kept");
  const TensorGeometry& source = geometry_->of(resolution.rule).source;
  if (!box_fits(request.box, source.shape) || request.box.empty()) {
    return refuse(fmt::format("box {} of shape {}", to_string(request.box), to_string(source.shape)));
  }
  const std::int64_t bytes = request.box.elements() * source.elem_bytes;
  if (bytes > static_cast<std::int64_t>(limits::kReadBytesMax))
    return refuse(fmt::format("{} bytes, the limit is {}", bytes, limits::kReadBytesMax));
  for (const Placement& placement : rule.placements) {
    if (!placement.box.contains(request.box)) continue;
    Result<StridedCopy> cut = slice(placement.copy, source, request.box, 0, packed_strides(request.box.shape(), source.elem_bytes));
    if (!cut.ok()) return refuse(cut.status().message());
    StridedCopy back = inverse(cut.value());
    back.src_offset += resolution.slots.front() * placement.slot_stride;
    wire::ReadReply reply;
    reply.bytes.resize(static_cast<std::size_t>(bytes));
    WorkerPool pool(1);
    const CopyJob job{back, geometry_->storage(placement.storage), reply.bytes.data(), 0};
    HostExecutor(pool).run({&job, 1});
    return reply;
  }
  return refuse(fmt::format("box {} lies in no local region", to_string(request.box)));
}

wire::StorageReply Inspection::storages() const {
  wire::StorageReply reply;
  reply.pid = static_cast<std::uint64_t>(::getpid());
  for (const Storage& storage : table_->all()) {
    reply.storages.push_back({storage.name, storage.dtype, storage.shape, reinterpret_cast<std::uint64_t>(storage.address),
                              static_cast<std::uint64_t>(storage.bytes)});
  }
  return reply;
}

}  // namespace headrace
