#include "python/src/layout.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/checkpoint/checkpoint.h"
#include "python/src/dtypes.h"
#include "python/src/errors.h"
#include "python/src/placing.h"
#include "python/src/table.h"
#include "python/src/tensors.h"
#include "receiver/layout_join.h"
#include "receiver/staged_groups.h"
#include "receiver/weight_index.h"

namespace nb = nanobind;

namespace headrace::python {
namespace {

nb::tuple numbers(std::span<const std::int64_t> values) {
  nb::list list;
  for (const std::int64_t value : values) list.append(value);
  return nb::tuple(list);
}

nb::object text_or_none(const std::string& text) {
  return text.empty() ? nb::none() : nb::object(nb::str(text.c_str(), text.size()));
}

std::optional<JsonValue> read_config(nb::handle config) {
  constexpr std::string_view kExpected = "config.json as a dict, its path, its folder, or None";
  if (config.is_none()) return std::nullopt;
  if (nb::isinstance<nb::dict>(config)) {
    const auto text = nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(config));
    return value_or_raise(parse_json(text));
  }
  std::filesystem::path path = given_path(config, "config", kExpected);
  if (std::filesystem::is_directory(path)) path /= "config.json";
  return value_or_raise(read_json_file(path.string()));
}

bool is_path(nb::handle object) {
  return nb::isinstance<nb::str>(object) || nb::hasattr(object, "__fspath__");
}

std::vector<CheckpointTensor> listed_tensors(nb::handle listed) {
  std::vector<CheckpointTensor> tensors;
  std::int64_t begin = 0;
  constexpr std::string_view kExpected = "a checkpoint's path, or (name, dtype, shape) of each tensor";
  if (PyBytes_Check(listed.ptr())) refuse_kind("tensors", kExpected, listed);
  for (const nb::handle item : given_iterable(listed, "tensors", kExpected)) {
    const std::vector<nb::object> row = given_row(item, "tensors", 3, "(name, dtype, shape)");
    CheckpointTensor tensor;
    tensor.name = name_text(row[0]);
    tensor.dtype = dtype_from_object(row[1]);
    tensor.shape = shape_from(row[2], tensor.name);
    tensor.begin = begin;
    tensor.end = begin += byte_count(tensor.dtype, tensor.shape).value_or(0);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::set<std::string> name_set(nb::handle names, std::string_view argument) {
  std::set<std::string> set;
  for (const nb::handle name : given_iterable(names, argument, "names")) set.insert(name_text(name));
  return set;
}

/// A field of a record of headrace.records, or of what has the same.
nb::object field(nb::handle record, const char* name, std::string_view argument, std::string_view expected) {
  nb::object value = nb::getattr(record, name, nb::handle());
  if (!value.is_valid()) refuse_kind(argument, expected, record);
  return value;
}

/// The storages that a rule writes, as names.
nb::tuple storage_names(const ModelLayout& layout, const TensorRule& rule) {
  nb::list names;
  std::set<std::uint32_t> seen;
  each_written(layout, rule, [&](std::uint32_t s) {
    if (seen.insert(s).second) names.append(layout.storages[s].name);
  });
  return nb::tuple(names);
}

/// A group's entries have no rule of their own until place_groups() gives them one.
ModelLayout with_group_rules(const ModelLayout& layout) {
  ModelLayout placed = layout;
  raise_if_error(place_groups(placed));
  return placed;
}

/// Without maps of layers that have no rule: what an engine tells of its experts is one map for each layer that it has.
void drop_unused_maps(ModelLayout& layout) {
  std::vector<bool> used(layout.experts.size());
  for (const ExpertRule& rule : layout.expert_rules) used[rule.map] = true;
  for (const PairedValues& pair : layout.paired_values) used[pair.map] = true;
  for (const LaunchConstant& constant : layout.launch_constants) used[constant.map] = true;
  std::vector<std::uint32_t> moved;
  std::vector<ExpertMap> kept;
  for (std::size_t m = 0; m < used.size(); ++m) {
    moved.push_back(static_cast<std::uint32_t>(kept.size()));
    if (used[m]) kept.push_back(std::move(layout.experts[m]));
  }
  layout.experts = std::move(kept);
  for (ExpertRule& rule : layout.expert_rules) rule.map = moved[rule.map];
  for (PairedValues& pair : layout.paired_values) pair.map = moved[pair.map];
  for (LaunchConstant& constant : layout.launch_constants) constant.map = moved[constant.map];
}

/// A storage of the layout by its name, or a new one by its spec.
std::uint32_t output_storage(ModelLayout& layout, nb::handle output) {
  constexpr std::string_view kExpected = "a storage's name, or a headrace.StorageSpec";
  const bool named = nb::isinstance<nb::str>(output);
  const auto its = [&](const char* key) { return field(output, key, "outputs", kExpected); };
  const std::string name = name_text(named ? nb::borrow(output) : its("name"));
  for (std::uint32_t s = 0; s < layout.storages.size(); ++s)
    if (layout.storages[s].name == name) return s;
  if (named) raise(Status(Code::kInvalidArgument, fmt::format("output {} is no storage of the layout: give its StorageSpec", name)));
  StorageSpec spec;
  spec.name = name;
  spec.dtype = dtype_from_object(its("dtype"));
  spec.shape = shape_from(its("shape"), name);
  spec.strides = shape_from(its("strides"), name);
  spec.bytes = given<std::int64_t>(its("bytes"), "bytes", "a number of bytes");
  if (spec.bytes == 0) spec.bytes = byte_count(spec.dtype, spec.shape).value_or(0);
  layout.storages.push_back(std::move(spec));
  return static_cast<std::uint32_t>(layout.storages.size() - 1);
}

}  // namespace

nb::object storage_spec(const StorageSpec& spec) {
  nb::list owners;
  for (const std::string& owner : spec.owners) owners.append(owner);
  return nb::module_::import_("headrace.records")
      .attr("StorageSpec")(spec.name, std::string(dtype_name(spec.dtype)), numbers(spec.shape), numbers(spec.strides), spec.bytes,
                           spec.optional, text_or_none(spec.alias_of), nb::tuple(owners));
}

PyLayout PyLayout::build(nb::handle config, const std::string& family, const std::string& layout, std::int32_t rank,
                         const std::string& variant, std::vector<std::string> scopes, std::int32_t redundant_experts, nb::handle dtype,
                         nb::handle tensors) {
  ModelRequest request;
  request.family = family;
  request.variant = variant;
  request.parallel = value_or_raise(parse_layout(layout));
  request.rank = rank;
  request.redundant_experts = redundant_experts;
  request.scopes = std::move(scopes);
  if (!dtype.is_none()) request.dtype = dtype_from_object(dtype);
  std::optional<JsonValue> parsed = read_config(config);
  if (!tensors.is_none() && is_path(tensors)) {
    const std::string path = given_path(tensors, "tensors", "a checkpoint's path");
    const Checkpoint checkpoint = value_or_raise(Checkpoint::open(path, ParseMode::kStrict, DataPart::kIgnored));
    return PyLayout(value_or_raise(build_model(request, parsed ? &*parsed : checkpoint.config(), checkpoint.tensors())));
  }
  const std::vector<CheckpointTensor> listed = tensors.is_none() ? std::vector<CheckpointTensor>() : listed_tensors(tensors);
  return PyLayout(value_or_raise(build_model(request, parsed ? &*parsed : nullptr, listed)));
}

PyLayout PyLayout::identity(const PyTable& table) {
  ModelLayout layout;
  layout.family = "identity";
  layout.variant = "plain";
  std::set<std::string, std::less<>> aliases;
  std::map<std::string, std::vector<std::string>> tied;  // names of the same memory, by the first
  for (const Storage& storage : table.table().all()) {
    const auto index = static_cast<std::uint32_t>(layout.storages.size());
    layout.storages.push_back({.name = storage.name,
                               .dtype = storage.dtype,
                               .shape = storage.shape,
                               .strides = storage.strides,
                               .bytes = storage.bytes,
                               .owners = storage.owners,
                               .optional = storage.optional,
                               .alias_of = storage.alias_of});
    // An alias is written by what its original gets; what comes under its own name must be the same.
    if (!storage.alias_of.empty()) {
      aliases.insert(storage.name);
      tied.try_emplace(storage.alias_of, std::vector{storage.alias_of}).first->second.push_back(storage.name);
      continue;
    }
    const std::int64_t elem = dtype_bytes(storage.dtype);
    std::vector<std::int64_t> steps = packed_strides(storage.shape, elem);
    for (std::size_t d = 0; d < storage.strides.size(); ++d) steps[d] = storage.strides[d] * elem;
    NamedRule named{storage.name, {}};
    named.rule.param = storage.name;
    named.rule.dtypes = {storage.dtype};
    named.rule.shape = storage.shape;
    named.rule.optional = storage.optional;
    const StridedCopy copy = inverse(value_or_raise(pack_nest(storage.shape, elem, steps)));
    named.rule.placements = {{.storage = index, .box = Box::whole(storage.shape), .copy = copy}};
    layout.named.push_back(std::move(named));
  }
  for (auto& [first, names] : tied) layout.tied.push_back(std::move(names));
  layout.scan = [aliases = std::move(aliases)](std::string_view name) {
    ScanAnswer answer;
    if (aliases.contains(name)) answer.kind = ScanAnswer::Kind::kDropped;
    return answer;
  };
  return PyLayout(std::move(layout));
}

nb::tuple PyLayout::storages() const {
  nb::list specs;
  for (const StorageSpec& spec : layout_.storages) specs.append(storage_spec(spec));
  return nb::tuple(specs);
}

nb::tuple PyLayout::tensors() const {
  const nb::object info = nb::module_::import_("headrace.records").attr("TensorInfo");
  ModelLayout placed = with_group_rules(layout_);
  // All that a rank wants, also what an update may leave out.
  std::vector<bool> optional;
  for (NamedRule& named : placed.named) optional.push_back(std::exchange(named.rule.optional, false));
  for (ExpertRule& expert : placed.expert_rules) optional.push_back(std::exchange(expert.rule.optional, false));
  const WeightIndex index(std::move(placed));
  const std::vector<std::string> scopes = index.scopes();
  std::unordered_map<std::uint32_t, nb::tuple> storages;
  nb::list tensors;
  for (const WeightIndex::Needed& needed : index.needed(scopes)) {
    const TensorRule& rule = index.rule(needed.rule);
    auto names = storages.find(needed.rule);
    if (names == storages.end()) names = storages.emplace(needed.rule, storage_names(index.layout(), rule)).first;
    const nb::object group =
        rule.group < 0 ? nb::none() : nb::object(nb::str(index.layout().groups[static_cast<std::size_t>(rule.group)].name.c_str()));
    tensors.append(info(needed.name, std::string(dtype_name(rule.dtypes.front())), numbers(rule.shape), names->second, rule.scope, group,
                        bool{optional[needed.rule]}));
  }
  return nb::tuple(tensors);
}

nb::dict PyLayout::group_shapes() const {
  nb::dict shapes;
  for (const StagedGroup& group : layout_.groups) {
    nb::list entries;
    for (const NamedRule& entry : group.entries) {
      const Shape shape = entry.rule.placements.empty() ? entry.rule.shape : entry.rule.placements.front().box.shape();
      entries.append(nb::make_tuple(entry.name, std::string(dtype_name(entry.rule.dtypes.front())), numbers(shape)));
    }
    nb::list outputs;
    for (const std::uint32_t output : group.outputs) {
      const StorageSpec& spec = layout_.storages[output];
      outputs.append(nb::make_tuple(spec.name, std::string(dtype_name(spec.dtype)), numbers(spec.shape)));
    }
    shapes[nb::str(group.name.c_str(), group.name.size())] = nb::make_tuple(entries, outputs);
  }
  return shapes;
}

PyLayout PyLayout::renamed(const nb::dict& names) const {
  ModelLayout layout = layout_;
  std::unordered_map<std::string, std::string> others;
  for (const auto [ours, theirs] : names) others.emplace(name_text(ours), name_text(theirs));
  std::set<std::string> used;
  for (StorageSpec& spec : layout.storages) {
    if (const auto found = others.find(spec.name); found != others.end()) {
      used.insert(found->first);
      spec.name = found->second;
    }
    if (const auto found = others.find(spec.alias_of); found != others.end()) spec.alias_of = found->second;
  }
  for (const auto& [ours, theirs] : others)
    if (!used.contains(ours))
      raise(Status(Code::kInvalidArgument, fmt::format("storage {} to be renamed {} is not in the layout", ours, theirs)));
  return PyLayout(std::move(layout));
}

PyLayout PyLayout::only(nb::handle names, bool drop_maps) const {
  const std::set<std::string> wanted = name_set(names, "storages");
  ModelLayout layout = layout_;
  std::vector<std::uint32_t> moved(layout.storages.size(), kScratchStorage);
  std::vector<StorageSpec> kept;
  for (std::uint32_t s = 0; s < layout.storages.size(); ++s) {
    if (!wanted.contains(layout.storages[s].name)) continue;
    moved[s] = static_cast<std::uint32_t>(kept.size());
    kept.push_back(layout.storages[s]);
  }
  if (kept.size() != wanted.size()) {
    std::set<std::string> unknown = wanted;
    for (const StorageSpec& spec : kept) unknown.erase(spec.name);
    raise(Status(Code::kInvalidArgument, fmt::format("storage {} is not in the layout", *unknown.begin())));
  }
  for (StorageSpec& spec : kept)
    if (!spec.alias_of.empty() && !wanted.contains(spec.alias_of)) spec.alias_of.clear();
  layout.storages = std::move(kept);
  const auto lands_nowhere = [&](TensorRule& rule) {
    const bool landed = !rule.placements.empty();
    std::erase_if(rule.placements, [&](const Placement& placement) { return moved[placement.storage] == kScratchStorage; });
    for (Placement& placement : rule.placements) placement.storage = moved[placement.storage];
    return landed && rule.placements.empty();
  };
  std::erase_if(layout.named, [&](NamedRule& named) { return lands_nowhere(named.rule); });
  std::erase_if(layout.expert_rules, [&](ExpertRule& expert) { return lands_nowhere(expert.rule); });
  std::erase_if(layout.constants, [&](const ConstantRule& constant) { return moved[constant.storage] == kScratchStorage; });
  for (ConstantRule& constant : layout.constants) constant.storage = moved[constant.storage];
  std::erase_if(layout.groups, [&](StagedGroup& group) {
    std::erase_if(group.outputs, [&](std::uint32_t output) { return moved[output] == kScratchStorage; });
    for (std::uint32_t& output : group.outputs) output = moved[output];
    return group.outputs.empty();
  });
  if (drop_maps) drop_unused_maps(layout);
  return PyLayout(std::move(layout));
}

PyLayout PyLayout::with_groups(nb::handle groups) const {
  ModelLayout layout = layout_;
  for (const nb::handle item : given_iterable(groups, "groups", "headrace.Group of each")) {
    const auto its = [&](const char* key) { return field(item, key, "groups", "a headrace.Group"); };
    StagedGroup group;
    group.name = name_text(its("name"));
    group.hook = name_text(its("hook"));
    group.work_bytes = given<std::int64_t>(its("work_bytes"), "work_bytes", "a number of bytes");
    const std::string scope = name_text(its("scope"));
    for (const nb::handle entry : given_iterable(its("entries"), "entries", "(name, dtype, shape) of each")) {
      const std::vector<nb::object> row = given_row(entry, "entries", 3, "(name, dtype, shape)");
      NamedRule named{name_text(row[0]), {}};
      named.rule.dtypes = {dtype_from_object(row[1])};
      named.rule.shape = shape_from(row[2], named.name);
      named.rule.scope = scope;
      group.entries.push_back(std::move(named));
    }
    for (const nb::handle output : given_iterable(its("outputs"), "outputs", "storages of each"))
      group.outputs.push_back(output_storage(layout, output));
    layout.groups.push_back(std::move(group));
  }
  with_group_rules(layout);
  return PyLayout(std::move(layout));
}

PyLayout PyLayout::dropping(nb::handle names) const {
  ModelLayout layout = layout_;
  layout.scan = [dropped = name_set(names, "names"), scan = layout_.scan](std::string_view name) {
    if (dropped.contains(std::string(name))) return ScanAnswer{.kind = ScanAnswer::Kind::kDropped};
    return scan ? scan(name) : ScanAnswer{};
  };
  return PyLayout(std::move(layout));
}

PyLayout PyLayout::join(const PyLayout& other, const std::string& prefix) const {
  return PyLayout(value_or_raise(join_layouts(layout_, other.layout_, prefix)));
}

std::int64_t PyLayout::place(const PyTable& table, nb::handle named, bool constants) const {
  return place_tensors(layout_, table, named, constants);
}

void init_layout(nb::module_& module) {
  nb::class_<PyLayout>(module, "Layout",
                       "Where every checkpoint tensor lands in the live storage of one rank. A value: what changes it gives another one.")
      .def_static(
          "build", &PyLayout::build, nb::kw_only(), nb::arg("config") = nb::none(), nb::arg("family") = "auto", nb::arg("layout") = "tp1",
          nb::arg("rank") = 0, nb::arg("variant") = "plain", nb::arg("scopes") = std::vector<std::string>{"target"},
          nb::arg("redundant_experts") = 0, nb::arg("dtype") = nb::none(), nb::arg("tensors") = nb::none(),
          nb::sig("def build(*, config: object = None, family: str = \"auto\", layout: str = \"tp1\", rank: int = 0, variant: str = "
                  "\"plain\", scopes: Sequence[str] = (\"target\",), redundant_experts: int = 0, dtype: object = None, tensors: object "
                  "= None) -> Layout"),
          "What a family knows of a model. config: config.json as a dict, its path or its folder. layout: how ranks divide the model,\n"
          "such as tp2, ep4 or tp2,ep4. tensors: for families that take names from a checkpoint, its path (headers are read, no\n"
          "weights), or [(name, dtype, shape)]. dtype: what floating-point tensors are kept as; None: as the checkpoint has them.")
      .def_static("identity", &PyLayout::identity, nb::arg("table"),
                  "Every storage is a checkpoint tensor of its own name, dtype and shape.")
      .def_prop_ro("family", [](const PyLayout& self) { return self.model().family; })
      .def_prop_ro("storages", &PyLayout::storages, nb::sig("def storages(self) -> tuple[StorageSpec, ...]"))
      .def_prop_ro("tensors", &PyLayout::tensors, nb::sig("def tensors(self) -> tuple[TensorInfo, ...]"),
                   "Every checkpoint tensor that this rank wants a part of, experts by their names.")
      .def_prop_ro("group_shapes", &PyLayout::group_shapes, nb::sig("def group_shapes(self) -> dict[str, tuple[list, list]]"),
                   "{group: (entries, outputs)} with (name, dtype, shape) of what its hook is lent.")
      .def("renamed", &PyLayout::renamed, nb::arg("names"), nb::sig("def renamed(self, names: dict[str, str]) -> Layout"),
           "With other names for storages: {ours: theirs}.")
      .def("only", &PyLayout::only, nb::arg("storages"), nb::kw_only(), nb::arg("drop_maps") = false,
           nb::sig("def only(self, storages: Iterable[str], *, drop_maps: bool = False) -> Layout"),
           "Without all other storages, and without the tensors that land nowhere else. drop_maps: also without the expert maps of layers "
           "of\n"
           "which no tensor is left, so that the hook expert_map tells none for them.")
      .def("with_groups", &PyLayout::with_groups, nb::arg("groups"), nb::sig("def with_groups(self, groups: Iterable[Group]) -> Layout"),
           "With tensors that land by computation. Outputs that the layout has not are appended to its storages.")
      .def("dropping", &PyLayout::dropping, nb::arg("names"), nb::sig("def dropping(self, names: Iterable[str]) -> Layout"),
           "An update may bring tensors of these names, and they are left aside: what the engine's own loader does nothing with.")
      .def("join", &PyLayout::join, nb::arg("other"), nb::kw_only(), nb::arg("prefix"),
           nb::sig("def join(self, other: Layout, *, prefix: str) -> Layout"),
           "For two models that are updated together: a tensor that both take lands in the places of both. Storages and groups of `other`\n"
           "are called prefix and their name, its expert maps come behind this layout's. Raises Unsupported, by name, for a tensor that\n"
           "both take and that is not the same to both: in dtype, shape or scope, in a staged group of one, or an expert.")
      .def(
          "place", &PyLayout::place, nb::arg("table"), nb::arg("tensors"), nb::kw_only(), nb::arg("constants") = true,
          nb::sig("def place(self, table: StorageTable, tensors: Iterable[tuple[str, object]], *, constants: bool = True) -> int"),
          "Writes these tensors (whole ones) and, if asked, the layout's constants, through the placements, without a session. Any subset\n"
          "will do. Returns the bytes written. Tensors of staged groups are refused.");
}

}  // namespace headrace::python
