#pragma once

#include <nanobind/nanobind.h>

#include "core/wire/reports.h"
#include "sender_sdk/sender.h"

namespace headrace::python {

// Values of the library as the dataclasses of headrace.records. Need the GIL.
nanobind::object receipt_record(const wire::Receipt& receipt);
nanobind::object report_record(const UpdateReport& report);
nanobind::object status_record(const wire::StatusReply& status);
nanobind::object fingerprint_record(const wire::TensorFingerprint& value);
nanobind::object receiver_record(const ReceiverInfo& info);

}  // namespace headrace::python
