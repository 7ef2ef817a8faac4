#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "receiver/models/family.h"
#include "receiver/storage_table.h"

namespace headrace::python {

class PyTable;

/// A ModelLayout as a Python value: what changes it gives another one.
class PyLayout {
 public:
  explicit PyLayout(ModelLayout layout) : layout_(std::move(layout)) {}

  static PyLayout build(nanobind::handle config, const std::string& family, const std::string& layout, std::int32_t rank,
                        const std::string& variant, std::vector<std::string> scopes, std::int32_t redundant_experts, nanobind::handle dtype,
                        nanobind::handle tensors);
  static PyLayout identity(const PyTable& table);

  const ModelLayout& model() const noexcept { return layout_; }
  nanobind::tuple storages() const;
  nanobind::tuple tensors() const;
  nanobind::dict group_shapes() const;
  PyLayout renamed(const nanobind::dict& names) const;
  PyLayout only(nanobind::handle names, bool drop_maps) const;
  PyLayout with_groups(nanobind::handle groups) const;
  PyLayout dropping(nanobind::handle names) const;
  PyLayout join(const PyLayout& other, const std::string& prefix) const;
  /// Bytes written.
  std::int64_t place(const PyTable& table, nanobind::handle named, bool constants) const;

 private:
  ModelLayout layout_;
};

nanobind::object storage_spec(const StorageSpec& spec);
void init_layout(nanobind::module_& module);

}  // namespace headrace::python
