#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace headrace::python {

/// Throws the subclass of headrace.Error for this failure, with `cause` as its __cause__ when there is one. Needs the GIL, as all below.
[[noreturn]] void raise(const Status& status, nanobind::handle cause = {});
inline void raise_if_error(const Status& status, nanobind::handle cause = {}) {
  if (!status.ok()) raise(status, cause);
}
template <class T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}
[[noreturn]] void refuse(std::string_view name, std::string_view why);
/// Throws headrace.InvalidArgument for an argument, or a part of one, that is of another kind: its name, what was expected, what it is.
[[noreturn]] void refuse_kind(std::string_view name, std::string_view expected, nanobind::handle actual);

/// Text of an object that str() and UTF-8 may fail for: it is for errors, and raises none.
std::string plain_text(nanobind::handle object);
/// repr() of an object, cut where it is long.
std::string short_repr(nanobind::handle object);
/// A name as UTF-8, throws headrace.InvalidArgument where it is none.
std::string name_text(nanobind::handle name);

/// What a caller gave as `name`, as a T; refuse_kind() where it is none. nanobind::cast, which names nothing, is for what is known already.
template <class T>
T given(nanobind::handle object, std::string_view name, std::string_view expected) {
  T value{};
  if (nanobind::try_cast(object, value)) return value;
  refuse_kind(name, expected, object);
}
/// The items of a tuple or a list of so many; refuse_kind() otherwise.
std::vector<nanobind::object> given_row(nanobind::handle object, std::string_view name, std::size_t items, std::string_view expected);
/// What can be iterated; refuse_kind() otherwise.
nanobind::object given_iterable(nanobind::handle object, std::string_view name, std::string_view expected);
/// Names: anything that can be iterated but a text.
std::vector<std::string> given_names(nanobind::handle object, std::string_view name);
/// A path: text, or what os.fspath() makes text of.
std::string given_path(nanobind::handle object, std::string_view name, std::string_view expected);

/// What a Python exception says, as the failure of `what`: a headrace.Error keeps its code, others are kInternal with their type.
Status status_of(const nanobind::python_error& error, std::string_view what);

}  // namespace headrace::python
