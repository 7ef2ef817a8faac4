#pragma once

#include <nanobind/nanobind.h>

namespace headrace::python {

void init_pictures(nanobind::module_& module);

}  // namespace headrace::python
