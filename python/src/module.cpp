// The extension module headrace._core. One init_x for each file; the package around it is python/headrace.
#include <nanobind/nanobind.h>

#include "python/src/bucket.h"
#include "python/src/hooks.h"
#include "python/src/layout.h"
#include "python/src/pictures.h"
#include "python/src/receiver.h"
#include "python/src/sender.h"
#include "python/src/table.h"

NB_MODULE(_core, module) {
  // What is alive at the end of the interpreter is closed by the package; the rest is the caller's.
  nanobind::set_leak_warnings(false);
  module.attr("__version__") = HEADRACE_VERSION;
  headrace::python::init_table(module);
  headrace::python::init_layout(module);
  headrace::python::init_hooks(module);
  headrace::python::init_bucket(module);
  headrace::python::init_receiver(module);
  headrace::python::init_sender(module);
  headrace::python::init_pictures(module);
}
