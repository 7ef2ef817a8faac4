#include "python/src/pictures.h"

#include <nanobind/stl/string.h>

#include <string>

#include "cli/picture.h"
#include "python/src/errors.h"

namespace nb = nanobind;

namespace headrace::python {

void init_pictures(nb::module_& module) {
  module.def(
      "draw", [](const std::string& document) { return value_or_raise(cli::draw(value_or_raise(parse_json(document)))); },
      nb::arg("document"), "The SVG that the program's plot makes of a document, as JSON.");
}

}  // namespace headrace::python
