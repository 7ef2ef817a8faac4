#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

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

/// Text of an object that str() and UTF-8 may fail for: it is for errors, and raises none.
std::string plain_text(nanobind::handle object);
/// repr() of an object, cut where it is long.
std::string short_repr(nanobind::handle object);
/// A name as UTF-8, throws headrace.InvalidArgument where it is none.
std::string name_text(nanobind::handle name);

/// What a Python exception says, as the failure of `what`: a headrace.Error keeps its code, others are kInternal with their type.
Status status_of(const nanobind::python_error& error, std::string_view what);

}  // namespace headrace::python
