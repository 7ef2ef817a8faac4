#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "core/base/shape.h"
#include "python/src/tensors.h"
#include "receiver/receiver.h"

namespace headrace::python {

/// Many packed tensors in one buffer, by a table of what lies where.
class Bucket {
 public:
  Bucket(nanobind::handle buffer, nanobind::handle metas);
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;
  const std::vector<NamedView>& views() const noexcept { return views_; }

 private:
  TensorReader reader_{TensorReader::Hold::kOwner};
  std::vector<nanobind::object> names_;  // whose text the views have
  std::vector<std::int64_t> dims_;       // of all shapes, one after the other
  std::vector<NamedView> views_;
};

void init_bucket(nanobind::module_& module);

}  // namespace headrace::python
