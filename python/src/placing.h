#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "receiver/models/family.h"

namespace headrace::python {

class PyTable;

/// Layout.place(): a plan of these tensors alone, and one run of the executor.
std::int64_t place_tensors(const ModelLayout& layout, const PyTable& table, nanobind::handle named, bool constants);

}  // namespace headrace::python
