#include "receiver/sync_plan.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <numeric>

#include "core/wire/limits.h"
#include "receiver/staged_groups.h"

namespace headrace {
namespace {

Status at_rule(const TensorRule& rule, const Status& status) {
  return Status(status.code(), fmt::format("parameter {} {}: {}", rule.param, rule.shard, status.message()));
}

/// The destination of a placement must lie in its storage at the first slot and at the last.
Status check_placement(const Placement& placement, const StridedCopy& packed, const TensorGeometry& source, std::int64_t slots,
                       std::int64_t storage_bytes) {
  const std::int64_t box_bytes = placement.box.elements() * source.elem_bytes;
  const std::int64_t last = (slots - 1) * placement.slot_stride;
  HEADRACE_RETURN_IF_ERROR(validate(packed, box_bytes, storage_bytes - last));
  const std::int64_t covered = packed.src_bytes();
  if (covered != box_bytes)
    return Status(Code::kInvalidArgument, fmt::format("the nest reads {} bytes of a box of {}", covered, box_bytes));
  return ok_status();
}

/// A cast moves whole elements: every number of the nest is a multiple of their size.
Status check_casts(const TensorRule& rule) {
  const Dtype kept = rule.dtypes.front();
  for (const Dtype dtype : rule.casts) {
    if (castable(dtype, kept) && dtype != kept) continue;
    return Status(Code::kInvalidArgument, fmt::format("no conversion from {} to {}", dtype_name(dtype), dtype_name(kept)));
  }
  if (rule.casts.empty()) return ok_status();
  const std::int64_t elem = dtype_bytes(kept);
  for (const Placement& placement : rule.placements) {
    const StridedCopy& copy = placement.copy;
    std::int64_t odd = copy.src_offset % elem | copy.dst_offset % elem | copy.run_bytes % elem | placement.slot_stride % elem;
    for (const CopyDim& dim : copy.loops()) odd |= dim.src_stride % elem | dim.dst_stride % elem;
    if (odd != 0) return Status(Code::kInvalidArgument, fmt::format("a nest that cuts elements of {} cannot convert", dtype_name(kept)));
  }
  return ok_status();
}

/// `slots`: local slots of the rule's layer, 1 for a tensor that is no expert.
Result<RuleGeometry> geometry_of(const TensorRule& rule, std::int64_t slots, std::span<const std::int64_t> storage_bytes,
                                 std::int64_t scratch) {
  RuleGeometry geometry;
  geometry.source = TensorGeometry{rule.shape, dtype_bytes(rule.dtypes.front())};
  geometry.granule.assign(rule.shape.size(), 1);
  HEADRACE_RETURN_IF_ERROR(check_casts(rule));
  if (rule.placements.size() > kPlacementsMax) return Status(Code::kInternal, fmt::format("{} placements", rule.placements.size()));
  for (const Placement& placement : rule.placements) {
    Result<std::vector<std::int64_t>> cut = granule(placement.copy, geometry.source);
    if (!cut.ok()) return cut.status();
    for (std::size_t d = 0; d < cut.value().size(); ++d) geometry.granule[d] = std::lcm(geometry.granule[d], cut.value()[d]);
    const Shape box_shape = placement.box.shape();
    Result<StridedCopy> packed =
        slice(placement.copy, geometry.source, placement.box, 0, packed_strides(box_shape, geometry.source.elem_bytes));
    if (!packed.ok()) return packed.status();
    HEADRACE_RETURN_IF_ERROR(check_placement(placement, packed.value(), geometry.source, slots,
                                             placement.storage == kScratchStorage ? scratch : storage_bytes[placement.storage]));
    geometry.packed.push_back(std::move(packed).value());
    if (std::find(geometry.boxes.begin(), geometry.boxes.end(), placement.box) != geometry.boxes.end()) continue;
    for (const Box& box : geometry.boxes) {
      if (!intersect(box, placement.box).empty()) {
        return Status(Code::kInternal,
                      fmt::format("placements {} and {} overlap without being equal", to_string(box), to_string(placement.box)));
      }
    }
    geometry.boxes.push_back(placement.box);
    geometry.wanted_bytes += placement.box.elements() * geometry.source.elem_bytes;
  }
  return geometry;
}

}  // namespace

Result<PlanGeometry> PlanGeometry::build(const WeightIndex& index, const StorageTable& table) {
  PlanGeometry result;
  std::vector<std::int64_t> bytes;
  const ModelLayout& layout = index.layout();
  for (const StorageSpec& spec : layout.storages) {
    const Storage* storage = table.find(spec.name);
    if (storage == nullptr) return Status(Code::kInvalidArgument, fmt::format("the table has no storage {}", spec.name));
    if (storage->bytes != spec.bytes) {
      return Status(Code::kInvalidArgument, fmt::format("storage {}: {} bytes, the layout has {}", spec.name, storage->bytes, spec.bytes));
    }
    result.storages_.push_back(storage->address);
    bytes.push_back(storage->bytes);
  }
  for (std::uint32_t i = 0; i < index.rule_count(); ++i) {
    const TensorRule& rule = index.rule(i);
    const std::int64_t scratch = rule.group < 0 ? 0 : scratch_bytes(layout, layout.groups.at(static_cast<std::size_t>(rule.group)));
    Result<RuleGeometry> geometry = geometry_of(rule, index.slots_of(i), bytes, scratch);
    if (!geometry.ok()) return at_rule(rule, geometry.status());
    result.rules_.push_back(std::move(geometry).value());
  }
  return result;
}

bool matches_any(std::span<const std::string> patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0; });
}

/// Resolves the parts entry by entry, then tensor by tensor.
class PlanCompiler {
 public:
  PlanCompiler(const WeightIndex& index, const PlanGeometry& geometry, const PlanOptions& options)
      : index_(index), geometry_(geometry), options_(options), seen_(index.rule_count()) {}

  SyncPlan::Outcome compile(const Digest& table, std::vector<SenderPart> parts) {
    plan_.index_ = &index_;
    plan_.geometry_ = &geometry_;
    plan_.key_ = SyncPlan::key_of(index_, table, parts, options_);
    plan_.experts_ = options_.experts != nullptr ? options_.experts : index_.experts_at_load();
    plan_.parts_ = std::move(parts);
    resolve_entries();
    for (PlanTensor& tensor : plan_.tensors_) divide(tensor);
    gather_groups();
    if (options_.check_coverage) find_missing();
    summarize();
    SyncPlan::Outcome outcome;
    outcome.defects_total = defects_total_;
    outcome.defects = std::move(defects_);
    if (defects_total_ == 0) outcome.plan = std::make_shared<const SyncPlan>(std::move(plan_));
    return outcome;
  }

 private:
  wire::Failure* defect(Code code, std::string name, std::string message) {
    ++defects_total_;
    if (defects_.size() >= limits::kDefectsMax) return nullptr;
    wire::Failure failure = wire::make_failure(Status(code, std::move(message)), "manifest");
    failure.name = std::move(name);
    defects_.push_back(std::move(failure));
    return &defects_.back();
  }

  /// What a session asks of the whole plan at every step is found once here.
  void summarize() {
    const ModelLayout& layout = index_.layout();
    std::vector<std::optional<StorageProof>> proofs(layout.storages.size());
    for (const PlanTensor& tensor : plan_.tensors_) {
      const TensorRule& rule = index_.rule(tensor.rule);
      const StorageProof proof = rule.group >= 0      ? StorageProof::kInputs
                                 : tensor.cast.none() ? StorageProof::kBytes
                                                      : StorageProof::kConverted;
      each_written(layout, rule, [&](std::uint32_t s) { proofs[s] = std::max(proofs[s].value_or(proof), proof); });
      if (tensor.expert >= 0) ++plan_.expert_tensors_;
      plan_.brings_tables_ = plan_.brings_tables_ || rule.scope == kTablesScope;
    }
    for (std::uint32_t s = 0; s < proofs.size(); ++s)
      if (proofs[s]) plan_.written_.push_back({s, *proofs[s]});
  }

  void resolve_entries() {
    std::size_t total = 0;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> unknown;
    plan_.entries_.resize(plan_.parts_.size());
    plan_.ignored_.resize(plan_.parts_.size());
    for (std::uint32_t s = 0; s < plan_.parts_.size(); ++s) {
      const auto& entries = plan_.parts_[s].entries;
      plan_.entries_[s].resize(entries.size());
      total += entries.size();
      for (std::uint32_t e = 0; e < entries.size(); ++e) {
        const Resolution resolution = index_.resolve(entries[e].name, *plan_.experts_);
        switch (resolution.kind) {
          case Resolution::Kind::kUnknown: unknown.emplace_back(s, e); break;
          case Resolution::Kind::kDropped:
            plan_.entries_[s][e].ignored = true;
            ++plan_.ignored_[s];
            break;
          case Resolution::Kind::kNotLocal:
          case Resolution::Kind::kPlaced: place(s, e, resolution); break;
        }
      }
    }
    if (!unknown.empty() && unknown.size() == total) {
      const std::string& name = plan_.parts_[unknown[0].first].entries[unknown[0].second].name;
      defect(Code::kInvalidArgument, name, fmt::format("0 of {} names matched; nearest to the first: {}", total, nearest(name)));
      return;
    }
    for (const auto& [s, e] : unknown) {
      const std::string& name = plan_.parts_[s].entries[e].name;
      if (defects_.size() >= limits::kDefectsMax) {
        ++defects_total_;
        continue;
      }
      defect(Code::kInvalidArgument, name, fmt::format("{}: unknown name; nearest: {}", name, nearest(name)))->sender =
          plan_.parts_[s].sender;
    }
  }

  std::string nearest(const std::string& name) const { return fmt::format("{}", fmt::join(index_.nearest(name, 3), ", ")); }

  void place(std::uint32_t s, std::uint32_t e, const Resolution& resolution) {
    const wire::ManifestEntry& entry = plan_.parts_[s].entries[e];
    const TensorRule& rule = index_.rule(resolution.rule);
    std::int32_t& seen = seen_of(resolution.rule, resolution.expert);
    // After a defect the tensor is not missing too: one line says it.
    const bool wanted = agrees(entry, rule, plan_.parts_[s].sender) && resolution.kind != Resolution::Kind::kNotLocal &&
                        !rule.placements.empty() && !entry.box.empty();
    if (!wanted) {
      if (seen == kUnseen) seen = kNothingWanted;
      return;
    }
    if (seen < 0) {
      seen = static_cast<std::int32_t>(plan_.tensors_.size());
      PlanTensor tensor{resolution.rule, resolution.expert, resolution.slots, tensor_key(entry.name, entry.dtype, entry.shape), {}, {}};
      tensor.elem_bytes = dtype_bytes(entry.dtype);
      tensor.live_key = tensor.key;
      if (std::find(rule.dtypes.begin(), rule.dtypes.end(), entry.dtype) == rule.dtypes.end()) {
        tensor.cast = {entry.dtype, rule.dtypes.front()};
        plan_.converts_ = true;
        tensor.live_key = tensor_key(entry.name, rule.dtypes.front(), entry.shape);
      }
      plan_.tensors_.push_back(std::move(tensor));
    } else if (!same_name(plan_.tensors_[static_cast<std::size_t>(seen)], s, e)) {
      return;
    } else if (const auto& [s0, e0] = plan_.tensors_[static_cast<std::size_t>(seen)].entries.front();
               plan_.entry(s0, e0).dtype != entry.dtype) {
      defect(Code::kInvalidArgument, entry.name,
             fmt::format("{}: {} from sender {}, {} from sender {}", entry.name, dtype_name(plan_.entry(s0, e0).dtype),
                         plan_.parts_[s0].sender, dtype_name(entry.dtype), plan_.parts_[s].sender));
      return;
    }
    plan_.tensors_[static_cast<std::size_t>(seen)].entries.emplace_back(s, e);
    plan_.entries_[s][e].tensor = seen;
  }

  std::int32_t& seen_of(std::uint32_t rule, std::int32_t expert) {
    std::vector<std::int32_t>& seen = seen_[rule];
    if (seen.empty()) seen.assign(static_cast<std::size_t>(index_.experts_of(rule)), kUnseen);
    return seen[static_cast<std::size_t>(std::max(expert, 0))];
  }

  /// The engine knows some tensors by more than one name; two of them in one update would write the same bytes twice.
  bool same_name(const PlanTensor& tensor, std::uint32_t s, std::uint32_t e) {
    const auto& [s0, e0] = tensor.entries.front();
    const std::string& name = plan_.entry(s, e).name;
    const std::string& first = plan_.entry(s0, e0).name;
    if (name == first) return true;
    if (auto* failure = defect(Code::kInvalidArgument, name,
                               fmt::format("{}: the same tensor as {} from sender {}", name, first, plan_.parts_[s0].sender))) {
      failure->sender = plan_.parts_[s].sender;
    }
    return false;
  }

  bool agrees(const wire::ManifestEntry& entry, const TensorRule& rule, const std::string& sender) {
    const auto say = [&](std::string what, std::string expected, std::string actual) {
      if (auto* failure =
              defect(Code::kInvalidArgument, entry.name, fmt::format("{}: {} {}, table has {}", entry.name, what, actual, expected))) {
        failure->sender = sender;
        failure->expected = std::move(expected);
        failure->actual = std::move(actual);
      }
      return false;
    };
    if (entry.shape != rule.shape) return say("shape", to_string(rule.shape), to_string(entry.shape));
    const auto among = [&](const std::vector<Dtype>& list) { return std::find(list.begin(), list.end(), entry.dtype) != list.end(); };
    if (!among(rule.dtypes) && !among(rule.casts)) {
      return say("dtype", std::string(dtype_name(rule.dtypes.front())), std::string(dtype_name(entry.dtype)));
    }
    if (!rule.placements.empty() && std::find(options_.scopes.begin(), options_.scopes.end(), rule.scope) == options_.scopes.end()) {
      return say("scope", fmt::format("{}", fmt::join(options_.scopes, ",")), rule.scope);
    }
    return true;
  }

  /// Settles who brings which part of a tensor, and that the parts make up exactly what is wanted.
  void divide(PlanTensor& tensor) {
    const RuleGeometry& geometry = geometry_.of(tensor.rule);
    settle_overlaps(tensor);
    std::int64_t covered = 0;
    for (const auto& [s, e] : tensor.entries) {
      const wire::ManifestEntry& entry = plan_.entry(s, e);
      PlanEntry& planned = plan_.entries_[s][e];
      for (const Box& box : geometry.boxes) {
        Box part = intersect(box, entry.box);
        if (part.empty()) continue;
        if (!cut_at_granule(part, box, geometry.granule)) {
          defect(Code::kInvalidArgument, entry.name,
                 fmt::format("{}: box {} of sender {} is not cut at multiples of {}", entry.name, to_string(entry.box),
                             plan_.parts_[s].sender, to_string(geometry.granule)));
          return;
        }
        covered += part.elements();
        planned.wanted.push_back(std::move(part));
      }
      if (planned.wanted.empty()) planned.tensor = -1;
    }
    const std::int64_t wanted = geometry.wanted_bytes / geometry.source.elem_bytes;
    if (covered != wanted) {
      const auto& [s, e] = tensor.entries.front();
      const std::string& name = plan_.entry(s, e).name;
      defect(Code::kInvalidArgument, name,
             fmt::format("{}: the senders bring {} of {} elements that this rank needs", name, covered, wanted));
    }
  }

  /// The edges of what is wanted need not be multiples of the granule.
  /// A group comes from one sender, and as a whole or not at all.
  void gather_groups() {
    const auto& layout = index_.layout();
    plan_.groups_.resize(plan_.parts_.size());
    std::vector<std::pair<std::int32_t, PlanGroup>> found(layout.groups.size(), {-1, {}});  // sender, what it brings
    for (std::uint32_t t = 0; t < plan_.tensors_.size(); ++t) {
      const PlanTensor& tensor = plan_.tensors_[t];
      const std::int32_t g = index_.rule(tensor.rule).group;
      if (g < 0) continue;
      const StagedGroup& declared = layout.groups[static_cast<std::size_t>(g)];
      auto& [sender, group] = found[static_cast<std::size_t>(g)];
      group.group = static_cast<std::uint32_t>(g);
      group.tensors.push_back(t);
      for (const auto& [s, e] : tensor.entries) {
        const std::string& name = plan_.entry(s, e).name;
        if (sender >= 0 && sender != static_cast<std::int32_t>(s)) {
          const std::string& other = plan_.parts_[static_cast<std::size_t>(sender)].sender;
          if (auto* failure = defect(Code::kInvalidArgument, name,
                                     fmt::format("{}: staged group {} comes from senders {} and {}, expected from one", name, declared.name,
                                                 other, plan_.parts_[s].sender))) {
            failure->sender = plan_.parts_[s].sender;
          }
          return;
        }
        sender = static_cast<std::int32_t>(s);
        group.entries.push_back(e);
        for (const Box& box : plan_.entries_[s][e].wanted) group.elements += box.elements();
      }
    }
    for (auto& [sender, group] : found) {
      if (sender < 0) continue;
      const StagedGroup& declared = layout.groups[group.group];
      if (group.tensors.size() != declared.entries.size()) {
        const auto comes = [&](const NamedRule& entry) {
          return std::any_of(group.entries.begin(), group.entries.end(),
                             [&](std::uint32_t e) { return plan_.entry(static_cast<std::uint32_t>(sender), e).name == entry.name; });
        };
        const std::string& name = std::find_if_not(declared.entries.begin(), declared.entries.end(), comes)->name;
        defect(Code::kInvalidArgument, name,
               fmt::format("{}: it is missing: staged group {} needs {} entries, {} come", name, declared.name, declared.entries.size(),
                           group.tensors.size()));
        continue;
      }
      plan_.groups_[static_cast<std::size_t>(sender)].push_back(std::move(group));
    }
  }

  static bool cut_at_granule(const Box& part, const Box& wanted, std::span<const std::int64_t> granule) {
    for (std::size_t d = 0; d < part.rank(); ++d) {
      if (part.lo[d] != wanted.lo[d] && part.lo[d] % granule[d] != 0) return false;
      if (part.hi[d] != wanted.hi[d] && part.hi[d] % granule[d] != 0) return false;
    }
    return true;
  }

  void settle_overlaps(PlanTensor& tensor) {
    if (tensor.entries.size() < 2) return;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> owners;
    for (const auto& [s, e] : tensor.entries) {
      const wire::ManifestEntry& entry = plan_.entry(s, e);
      bool owned_before = false;
      for (const auto& [s0, e0] : owners) {
        const wire::ManifestEntry& other = plan_.entry(s0, e0);
        if (intersect(entry.box, other.box).empty()) continue;
        if (options_.overlap == wire::OverlapRule::kFirstSenderOwns && s0 != s && entry.box == other.box) {
          owned_before = true;
          break;
        }
        defect(Code::kInvalidArgument, entry.name,
               fmt::format("{}: box {} of sender {} and box {} of sender {} overlap", entry.name, to_string(other.box),
                           plan_.parts_[s0].sender, to_string(entry.box), plan_.parts_[s].sender));
        owned_before = true;
        break;
      }
      if (owned_before) {
        plan_.entries_[s][e].tensor = -1;
      } else {
        owners.emplace_back(s, e);
      }
    }
    tensor.entries = std::move(owners);
  }

  void find_missing() {
    // One line says it all when nothing matched.
    if (defects_total_ > 0 && std::all_of(seen_.begin(), seen_.end(), [](const auto& seen) { return seen.empty(); })) return;
    index_.visit_needed(options_.scopes, *plan_.experts_, [&](std::uint32_t rule, std::int32_t expert) {
      if (seen_of(rule, expert) != kUnseen || index_.rule(rule).placements.empty() || geometry_.of(rule).wanted_bytes == 0) return;
      const std::string name = index_.name_of(rule, expert);
      if (!matches_any(options_.optional_names, name)) defect(Code::kInvalidArgument, name, fmt::format("{}: no sender brings it", name));
    });
  }

  const WeightIndex& index_;
  const PlanGeometry& geometry_;
  const PlanOptions& options_;
  SyncPlan plan_;
  static constexpr std::int32_t kUnseen = -2;
  static constexpr std::int32_t kNothingWanted = -1;  // it came, and nothing of it is wanted here
  // Per rule and expert: the tensor's number among the plan's, or one of the above. Numbers instead of names, which need no hashing; a rule
  // that nothing asked for yet has none.
  std::vector<std::vector<std::int32_t>> seen_;
  std::vector<wire::Failure> defects_;
  std::uint64_t defects_total_ = 0;
};

SyncPlan::Outcome SyncPlan::compile(const WeightIndex& index, const PlanGeometry& geometry, const Digest& table,
                                    std::vector<SenderPart> parts, const PlanOptions& options) {
  return PlanCompiler(index, geometry, options).compile(table, std::move(parts));
}

Digest SyncPlan::key_of(const WeightIndex& index, const Digest& table, std::span<const SenderPart> parts, const PlanOptions& options) {
  Hasher hasher;
  hasher.bytes(std::as_bytes(std::span(table.bytes)));
  const Digest& experts = (options.experts != nullptr ? options.experts : index.experts_at_load())->digest();
  hasher.bytes(std::as_bytes(std::span(experts.bytes)));
  hasher.number(static_cast<std::uint64_t>(options.overlap)).number(options.scopes.size());
  for (const std::string& scope : options.scopes) hasher.text(scope);
  hasher.number(options.optional_names.size());
  for (const std::string& name : options.optional_names) hasher.text(name);
  hasher.number(parts.size());
  for (const SenderPart& part : parts) hasher.text(part.sender).bytes(std::as_bytes(std::span(part.digest.bytes)));
  return hasher.finish();
}

wire::Accept SyncPlan::accept_for(std::uint32_t sender, bool known) const {
  wire::Accept accept;
  accept.digest = parts_.at(sender).digest;
  accept.plan_key = key_;
  accept.ignored = ignored_[sender];
  accept.known = known;
  for (const PlanGroup& group : groups_[sender]) accept.groups.push_back({index_->layout().groups[group.group].name, group.entries});
  if (known) return accept;
  accept.wanted.resize(entries_[sender].size());
  for (std::size_t e = 0; e < accept.wanted.size(); ++e) {
    const PlanEntry& entry = entries_[sender][e];
    accept.wanted[e].ignored = entry.ignored;
    if (entry.tensor < 0) continue;
    accept.wanted[e].granule = geometry_->of(tensors_[static_cast<std::size_t>(entry.tensor)].rule).granule;
    accept.wanted[e].boxes = entry.wanted;
  }
  return accept;
}

namespace {

/// Byte strides of a source over elements of `cast.from`, in bytes of the type that storage holds.
Result<std::vector<std::int64_t>> strides_as_kept(ElementCast cast, std::span<const std::int64_t> strides) {
  std::vector<std::int64_t> kept(strides.begin(), strides.end());
  for (std::int64_t& stride : kept) {
    if (stride % cast.from_bytes() != 0) {
      return Status(Code::kInvalidArgument,
                    fmt::format("strides {}: those of a tensor that is converted are multiples of its {} bytes an element",
                                to_string(strides), cast.from_bytes()));
    }
    stride = stride / cast.from_bytes() * cast.to_bytes();
  }
  return kept;
}

/// The same nest with its source side in elements of `cast.from`.
StridedCopy with_cast_source(StridedCopy copy, ElementCast cast) {
  copy.src_offset = cast.source_bytes(copy.src_offset);
  for (std::size_t j = 0; j < copy.dim_count; ++j) copy.dims[j].src_stride = cast.source_bytes(copy.dims[j].src_stride);
  return copy;
}

}  // namespace

void SyncPlan::describe(wire::Receipt& receipt) const {
  receipt.tensors = tensors_.size();
  receipt.expert_tensors = expert_tensors_;
  for (const WrittenStorage& written : written_) {
    if (written.proof == StorageProof::kBytes) {
      ++receipt.proved_bytes;
      continue;
    }
    const bool converted = written.proof == StorageProof::kConverted;
    ++(converted ? receipt.proved_converted : receipt.proved_inputs);
    if (receipt.outputs.size() < limits::kOutputsMax)
      receipt.outputs.push_back({index_->layout().storages[written.storage].name, converted ? "converted" : "inputs"});
  }
}

Result<StridedCopy> SyncPlan::tensor_nest(const PlanTensor& tensor, const Box& box, std::span<const std::int64_t> strides) const {
  const TensorGeometry source{index_->rule(tensor.rule).shape, tensor.elem_bytes};
  const std::int64_t bytes = element_count(source.shape).value_or(0) * source.elem_bytes;
  const auto packed = packed_strides(box.shape(), source.elem_bytes);
  return slice(StridedCopy::flat(0, 0, bytes), source, box, 0, strides.empty() ? std::span<const std::int64_t>(packed) : strides);
}

Status SyncPlan::append_jobs(const PlanTensor& tensor, const Box& box, const std::byte* source, std::span<const std::int64_t> strides,
                             std::vector<KeyedJob>& jobs, std::byte* scratch) const {
  const TensorRule& rule = index_->rule(tensor.rule);
  const RuleGeometry& geometry = geometry_->of(tensor.rule);
  const std::size_t before = jobs.size();
  for (std::uint32_t p = 0; p < rule.placements.size(); ++p) {
    const Placement& placement = rule.placements[p];
    if (!placement.box.contains(box)) continue;
    // A nest is some hundred bytes long: the usual one is copied into its job and nowhere else.
    const StridedCopy* copy = &geometry.packed[p];
    StridedCopy made;
    if (!strides.empty() || box != placement.box) {
      std::vector<std::int64_t> steps(strides.begin(), strides.end());
      if (strides.empty()) {
        steps = packed_strides(box.shape(), geometry.source.elem_bytes);
      } else if (!tensor.cast.none()) {
        Result<std::vector<std::int64_t>> kept = strides_as_kept(tensor.cast, strides);
        if (!kept.ok()) return kept.status();
        steps = std::move(kept).value();
      }
      Result<StridedCopy> cut = slice(placement.copy, geometry.source, box, 0, steps);
      if (!cut.ok()) return cut.status();
      made = std::move(cut).value();
      copy = &made;
    }
    if (!tensor.cast.none()) {
      made = with_cast_source(*copy, tensor.cast);
      copy = &made;
    }
    for (const std::int32_t slot : tensor.slots) {
      jobs.push_back({tensor.rule * kPlacementsMax + p, tensor.expert >= 0,
                      CopyJob{*copy, source, rule.group < 0 ? geometry_->storage(placement.storage) : scratch, 0, tensor.cast}});
      jobs.back().job.copy.dst_offset += slot * placement.slot_stride;
    }
  }
  if (jobs.size() == before) return Status(Code::kInvalidArgument, fmt::format("box {} lies in no wanted region", to_string(box)));
  return ok_status();
}

}  // namespace headrace
