#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "python/src/tensors.h"
#include "receiver/storage_table.h"

namespace headrace::python {

/// A sealed StorageTable over tensors of Python, whose memory it holds.
class PyTable {
 public:
  /// `module` is asked by locate() where its tensors are; invalid: the tensors themselves.
  PyTable(const nanobind::dict& tensors, nanobind::handle owners, std::vector<std::string> optional, nanobind::object module);

  const StorageTable& table() const noexcept { return table_; }
  nanobind::tuple storages() const;
  /// Where the tensors' memory is now. Throws Python errors.
  std::vector<StorageLocation> locate() const;
  /// Where a storage is when `tensor` is what holds it now.
  static StorageLocation location(StorageId id, const Tensor& tensor);

 private:
  Storage make_storage(const std::string& name, const Tensor& tensor, const std::vector<std::string>& optional) const;

  TensorReader reader_{TensorReader::Hold::kOwner};
  std::vector<nanobind::object> tensors_;  // by StorageId
  nanobind::object module_;
  StorageTable table_;
};

void init_table(nanobind::module_& module);

}  // namespace headrace::python
