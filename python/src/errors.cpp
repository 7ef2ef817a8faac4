#include "python/src/errors.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;

namespace headrace::python {
namespace {

nb::object text_or_none(const std::string& text) {
  return text.empty() ? nb::none() : nb::object(nb::str(text.c_str(), text.size()));
}

}  // namespace

void raise(const Status& status, nb::handle cause) {
  const StatusDetail none;
  const StatusDetail& detail = status.detail() != nullptr ? *status.detail() : none;
  const nb::object rank = detail.rank >= 0 ? nb::object(nb::int_(detail.rank)) : nb::none();
  const nb::object bucket = detail.bucket >= 0 ? nb::object(nb::int_(detail.bucket)) : nb::none();
  const nb::object error =
      nb::module_::import_("headrace.errors")
          .attr("make_error")(std::string(code_name(status.code())), status.message(), rank, text_or_none(detail.phase), bucket,
                              text_or_none(detail.name), text_or_none(detail.expected), text_or_none(detail.actual),
                              text_or_none(detail.engine), text_or_none(detail.sender));
  if (cause.is_valid() && !cause.is_none()) PyException_SetCause(error.ptr(), nb::borrow(cause).release().ptr());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

void refuse(std::string_view name, std::string_view why) {
  StatusDetail detail;
  detail.name = name;
  raise(Status(Code::kInvalidArgument, fmt::format("{}: {}", name, why)).with(std::move(detail)));
}

Status status_of(const nb::python_error& error, std::string_view what) {
  const nb::handle value = error.value();
  const std::string type = nb::cast<std::string>(nb::type_name(value.type()));
  std::string text = nb::cast<std::string>(nb::str(value));
  Code code = Code::kInternal;
  if (nb::hasattr(value, "headrace_code")) {
    const std::string name = nb::cast<std::string>(value.attr("headrace_code"));
    for (int c = 1; c <= static_cast<int>(Code::kInternal); ++c)
      if (code_name(static_cast<Code>(c)) == name) code = static_cast<Code>(c);
  } else {
    text = text.empty() ? type : fmt::format("{}: {}", type, text);
  }
  return Status(code, fmt::format("{}: {}", what, text));
}

}  // namespace headrace::python
