#pragma once

#include <nanobind/nanobind.h>

namespace headrace::python {

void init_sender(nanobind::module_& module);

}  // namespace headrace::python
