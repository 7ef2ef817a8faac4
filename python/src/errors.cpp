#include "python/src/errors.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;

namespace headrace::python {
namespace {

/// Words of a peer, or cut ones, may be no UTF-8.
nb::object text(const std::string& words) {
  nb::object decoded = nb::steal(PyUnicode_DecodeUTF8(words.data(), static_cast<Py_ssize_t>(words.size()), "backslashreplace"));
  if (!decoded.is_valid()) throw nb::python_error();
  return decoded;
}

nb::object text_or_none(const std::string& words) {
  return words.empty() ? nb::none() : text(words);
}

/// `made` as UTF-8, escaped where it is none; takes the reference.
std::string encoded(PyObject* made) {
  const nb::object unicode = nb::steal(made);
  const nb::object bytes = nb::steal(made == nullptr ? nullptr : PyUnicode_AsEncodedString(made, "utf-8", "backslashreplace"));
  if (bytes.is_valid()) return {PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr()))};
  PyErr_Clear();
  return "<what cannot be written>";
}

}  // namespace

void raise(const Status& status, nb::handle cause) {
  const StatusDetail none;
  const StatusDetail& detail = status.detail() != nullptr ? *status.detail() : none;
  const nb::object rank = detail.rank >= 0 ? nb::object(nb::int_(detail.rank)) : nb::none();
  const nb::object bucket = detail.bucket >= 0 ? nb::object(nb::int_(detail.bucket)) : nb::none();
  const nb::object error =
      nb::module_::import_("headrace.errors")
          .attr("make_error")(std::string(code_name(status.code())), text(status.message()), rank, text_or_none(detail.phase), bucket,
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

void refuse_kind(std::string_view name, std::string_view expected, nb::handle actual) {
  StatusDetail detail;
  detail.name = name;
  detail.expected = expected;
  detail.actual = short_repr(actual);
  raise(Status(Code::kInvalidArgument, fmt::format("{}: expected {}, not {}", name, expected, detail.actual)).with(detail));
}

std::vector<nb::object> given_row(nb::handle object, std::string_view name, std::size_t items, std::string_view expected) {
  const bool row = nb::isinstance<nb::tuple>(object) || nb::isinstance<nb::list>(object);
  if (!row || nb::len(object) != items) refuse_kind(name, expected, object);
  std::vector<nb::object> all;
  for (std::size_t i = 0; i < items; ++i) all.push_back(object[i]);
  return all;
}

nb::object given_iterable(nb::handle object, std::string_view name, std::string_view expected) {
  nb::object iterator = nb::steal(PyObject_GetIter(object.ptr()));
  if (iterator.is_valid()) return iterator;
  // What an __iter__ of the caller's own raises is the caller's.
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
  PyErr_Clear();
  refuse_kind(name, expected, object);
}

std::vector<std::string> given_names(nb::handle object, std::string_view name) {
  constexpr std::string_view kExpected = "names, each a text of UTF-8";
  if (nb::isinstance<nb::str>(object) || nb::isinstance<nb::bytes>(object)) refuse_kind(name, kExpected, object);
  std::vector<std::string> names;
  for (const nb::handle item : given_iterable(object, name, kExpected)) names.push_back(given<std::string>(item, name, kExpected));
  return names;
}

std::string given_path(nb::handle object, std::string_view name, std::string_view expected) {
  nb::object path = nb::borrow(object);
  if (!nb::isinstance<nb::str>(object)) {
    if (!nb::hasattr(object, "__fspath__")) refuse_kind(name, expected, object);
    path = nb::module_::import_("os").attr("fspath")(object);
  }
  return given<std::string>(path, name, expected);
}

std::string plain_text(nb::handle object) {
  return encoded(PyObject_Str(object.ptr()));
}

std::string short_repr(nb::handle object) {
  constexpr Py_ssize_t kCharactersMax = 400;
  PyObject* whole = PyObject_Repr(object.ptr());
  if (whole == nullptr || PyUnicode_GetLength(whole) <= kCharactersMax) return encoded(whole);
  const nb::object long_one = nb::steal(whole);
  return encoded(PyUnicode_Substring(whole, 0, kCharactersMax)) + "...";
}

std::string name_text(nb::handle name) {
  Py_ssize_t size = 0;
  const char* characters = PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8AndSize(name.ptr(), &size) : nullptr;
  if (characters != nullptr) return {characters, static_cast<std::size_t>(size)};
  PyErr_Clear();
  raise(Status(Code::kInvalidArgument, fmt::format("expected a name, text of UTF-8, not {}", short_repr(name))));
}

Status status_of(const nb::python_error& error, std::string_view what) {
  const nb::handle value = error.value();
  const std::string type = nb::cast<std::string>(nb::type_name(value.type()));
  std::string text = plain_text(value);
  Code code = Code::kInternal;
  if (nb::hasattr(value, "headrace_code")) {
    const std::string name = plain_text(value.attr("headrace_code"));
    for (int c = 1; c <= static_cast<int>(Code::kInternal); ++c)
      if (code_name(static_cast<Code>(c)) == name) code = static_cast<Code>(c);
  } else {
    text = text.empty() ? type : fmt::format("{}: {}", type, text);
  }
  return Status(code, fmt::format("{}: {}", what, text));
}

}  // namespace headrace::python
