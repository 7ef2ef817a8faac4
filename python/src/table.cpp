#include "python/src/table.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <utility>

#include "python/src/errors.h"
#include "python/src/layout.h"
#include "receiver/sync_plan.h"

namespace nb = nanobind;

namespace headrace::python {
namespace {

/// Bytes from the first to behind the last element.
std::int64_t extent_of(const Tensor& tensor) {
  if (tensor.elements() == 0) return 0;
  std::int64_t bytes = dtype_bytes(tensor.dtype);
  for (std::size_t d = 0; d < tensor.shape().size(); ++d) bytes += (tensor.dims[d] - 1) * tensor.strides[d];
  return bytes;
}

/// Parameters and buffers by their runtime names, the same tensor under each of its names. Those without elements have no place.
nb::dict tensors_of_module(nb::handle module) {
  nb::dict tensors;
  for (const char* list : {"named_parameters", "named_buffers"}) {
    for (const nb::handle item : nb::object(module.attr(list)(nb::arg("remove_duplicate") = false))) {
      const std::vector<nb::object> named = given_row(item, list, 2, "pairs of name and tensor");
      const auto elements = given<std::int64_t>(named[1].attr("numel")(), "numel", "a number of elements");
      if (elements != 0) tensors[named[0]] = named[1];
    }
  }
  return tensors;
}

std::vector<std::string> owners_of(nb::handle owners, const std::string& name) {
  nb::object mine = nb::borrow(owners);
  if (nb::isinstance<nb::dict>(owners)) mine = owners.attr("get")(name);
  if (mine.is_none()) return {"target"};
  if (nb::isinstance<nb::str>(mine)) return {given<std::string>(mine, "owners", "a name, a text of UTF-8")};
  return given_names(mine, "owners");
}

}  // namespace

Storage PyTable::make_storage(const std::string& name, const Tensor& tensor, const std::vector<std::string>& optional) const {
  if (!tensor.writable) refuse(name, "its memory is read-only, live storage is written to");
  Storage storage;
  storage.name = name;
  storage.dtype = tensor.dtype;
  storage.shape.assign(tensor.shape().begin(), tensor.shape().end());
  storage.address = tensor.data;
  storage.bytes = extent_of(tensor);
  storage.captured = true;
  storage.optional = matches_any(optional, name);
  if (tensor.packed()) return storage;
  const std::int64_t elem = dtype_bytes(tensor.dtype);
  for (const std::int64_t step : tensor.steps()) {
    if (step % elem != 0 || step < 0) refuse(name, fmt::format("a step of {} bytes between elements of {}", step, elem));
    storage.strides.push_back(step / elem);
  }
  return storage;
}

PyTable::PyTable(const nb::dict& tensors, nb::handle owners, std::vector<std::string> optional, nb::object module)
    : module_(std::move(module)) {
  std::map<std::pair<const std::byte*, std::int64_t>, std::string> by_place;
  for (const auto [key, value] : tensors) {
    const std::string name = name_text(key);
    Storage storage = make_storage(name, reader_.read(value, name), optional);
    storage.owners = owners_of(owners, name);
    const auto [place, first] = by_place.emplace(std::pair(storage.address, storage.bytes), name);
    if (!first) storage.alias_of = place->second;
    value_or_raise(table_.add(std::move(storage)));
    tensors_.push_back(nb::borrow(value));
  }
  raise_if_error(table_.seal());
}

nb::tuple PyTable::storages() const {
  nb::list specs;
  for (const Storage& storage : table_.all()) {
    specs.append(storage_spec({.name = storage.name,
                               .dtype = storage.dtype,
                               .shape = storage.shape,
                               .strides = storage.strides,
                               .bytes = storage.bytes,
                               .owners = storage.owners,
                               .optional = storage.optional,
                               .alias_of = storage.alias_of}));
  }
  return nb::tuple(specs);
}

std::vector<StorageLocation> PyTable::locate() const {
  std::vector<StorageLocation> locations;
  TensorReader reader(TensorReader::Hold::kLook);
  if (module_.is_valid()) {
    // A parameter may have been replaced as a whole.
    const nb::dict present = tensors_of_module(module_);
    for (std::uint32_t i = 0; i < tensors_.size(); ++i) {
      const std::string& name = table_.at(StorageId{i}).name;
      const nb::str key(name.c_str(), name.size());
      if (present.contains(key)) locations.push_back(location(StorageId{i}, reader.read(present[key], name)));
    }
    return locations;
  }
  for (std::uint32_t i = 0; i < tensors_.size(); ++i) {
    locations.push_back(location(StorageId{i}, reader.read(tensors_[i], table_.at(StorageId{i}).name)));
  }
  return locations;
}

StorageLocation PyTable::location(StorageId id, const Tensor& tensor) {
  return {id, tensor.data, extent_of(tensor)};
}

void init_table(nb::module_& module) {
  nb::class_<PyTable>(
      module, "StorageTable",
      "The live storage of one rank: sealed, over tensors whose memory it holds. Live storage is written in place, never moved.")
      .def_static(
          "from_tensors",
          [](const nb::dict& tensors, nb::handle owners, std::vector<std::string> optional) {
            return new PyTable(tensors, owners, std::move(optional), nb::object());
          },
          nb::arg("tensors"), nb::kw_only(), nb::arg("owners") = nb::none(), nb::arg("optional") = std::vector<std::string>(),
          nb::sig("def from_tensors(tensors: dict[str, object], *, owners: object = None, optional: Sequence[str] = ()) -> StorageTable"),
          "From {storage name: tensor}. Tensors may be torch's (parameters too), numpy's, or have DLPack or a writable buffer; they may "
          "have\n"
          "strides. Those with the same address and bytes as an earlier one are its aliases. owners: a name, a list of names, or a dict "
          "of\n"
          "those by storage: which models use it (default: target). optional: fnmatch patterns of storages that may stay unwritten.\n"
          "Packed FP4 counts as U8, one element a byte.")
      .def_static(
          "from_module",
          [](nb::handle module, nb::handle owners, std::vector<std::string> optional) {
            return new PyTable(tensors_of_module(module), owners, std::move(optional), nb::borrow(module));
          },
          nb::arg("module"), nb::kw_only(), nb::arg("owners") = nb::none(), nb::arg("optional") = std::vector<std::string>(),
          nb::sig("def from_module(module: object, *, owners: object = None, optional: Sequence[str] = ()) -> StorageTable"),
          "From the parameters and buffers of what has named_parameters and named_buffers, as torch modules have, by their runtime names "
          "and\n"
          "detached. Those without elements are left out. Arguments as those of from_tensors.")
      .def_prop_ro("storages", &PyTable::storages, nb::sig("def storages(self) -> tuple[StorageSpec, ...]"), "In the order of the tensors.")
      .def_prop_ro(
          "digest", [](const PyTable& self) { return self.table().digest().hex(); },
          "Hash of names, dtypes, shapes, strides, sizes, aliases and owners, not of addresses.")
      .def_prop_ro(
          "total_bytes", [](const PyTable& self) { return self.table().total_bytes(); }, "Aliases counted once.")
      .def("__len__", [](const PyTable& self) { return self.table().size(); })
      .def("__contains__", [](const PyTable& self, const std::string& name) { return self.table().find(name) != nullptr; });
}

}  // namespace headrace::python
