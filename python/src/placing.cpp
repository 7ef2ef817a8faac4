#include "python/src/placing.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "kernels/executor.h"
#include "python/src/errors.h"
#include "python/src/table.h"
#include "python/src/tensors.h"
#include "receiver/sync_plan.h"
#include "receiver/weight_index.h"

namespace nb = nanobind;

namespace headrace::python {
namespace {

Status append_constants(const ModelLayout& layout, const PlanGeometry& geometry, std::vector<CopyJob>& jobs) {
  for (const ConstantRule& rule : layout.constants) {
    const StorageSpec& spec = layout.storages.at(rule.storage);
    HEADRACE_RETURN_IF_ERROR(validate(rule.copy, rule.copy.run_bytes, spec.bytes));
    jobs.push_back({rule.copy, nullptr, geometry.storage(rule.storage), rule.constant});
  }
  return ok_status();
}

/// The nests of one tensor; `at` is its packed bytes.
Status append_tensor(const SyncPlan& plan, std::uint32_t entry, const std::byte* at, std::vector<SyncPlan::KeyedJob>& jobs) {
  const PlanEntry& planned = plan.entries(0)[entry];
  if (planned.tensor < 0) return ok_status();
  const PlanTensor& tensor = plan.tensors()[static_cast<std::size_t>(planned.tensor)];
  const std::vector<std::int64_t> strides = packed_strides(plan.entry(0, entry).shape, tensor.elem_bytes);
  for (const Box& box : planned.wanted) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < strides.size(); ++d) offset += box.lo[d] * strides[d];
    HEADRACE_RETURN_IF_ERROR(plan.append_jobs(tensor, box, at + offset, strides, jobs));
  }
  return ok_status();
}

}  // namespace

std::int64_t place_tensors(const ModelLayout& layout, const PyTable& table, nb::handle named, bool constants) {
  TensorReader reader(TensorReader::Hold::kCall);
  SenderPart part{"place", {}, {}};
  std::vector<const std::byte*> bytes;
  const nb::list items(given_iterable(named, "tensors", "pairs of name and tensor"));
  for (const nb::handle item : items) {
    const auto [name, text, object] = named_item(item);
    const Tensor tensor = reader.read(object, name);
    bytes.push_back(reader.packed(tensor, name).data());
    const Shape shape(tensor.shape().begin(), tensor.shape().end());
    part.entries.push_back({std::string(name), tensor.dtype, shape, Box::whole(shape)});
  }
  const nb::gil_scoped_release without_gil;
  const auto fail = [](const Status& status) {
    const nb::gil_scoped_acquire with_gil;
    raise(status);
  };
  const WeightIndex index(layout);
  Result<PlanGeometry> geometry = PlanGeometry::build(index, table.table());
  if (!geometry.ok()) fail(geometry.status());
  PlanOptions options{.scopes = index.scopes()};
  options.check_coverage = false;
  std::vector<CopyJob> jobs;
  std::vector<SyncPlan::KeyedJob> keyed;
  SyncPlan::Outcome outcome;
  if (!part.entries.empty()) {
    outcome = SyncPlan::compile(index, geometry.value(), table.table().digest(), {std::move(part)}, options);
    if (outcome.plan == nullptr) fail(wire::to_status(outcome.defects.front()));
    for (std::uint32_t e = 0; e < bytes.size(); ++e)
      if (const Status status = append_tensor(*outcome.plan, e, bytes[e], keyed); !status.ok()) fail(status);
  }
  if (constants)
    if (const Status status = append_constants(layout, geometry.value(), jobs); !status.ok()) fail(status);
  for (SyncPlan::KeyedJob& job : keyed) jobs.push_back(std::move(job.job));
  WorkerPool pool(1);
  return static_cast<std::int64_t>(HostExecutor(pool).run(jobs).bytes);
}

}  // namespace headrace::python
