#pragma once

#include "core/checkpoint/json.h"
#include "sender_sdk/sender.h"

namespace headrace {

/// A receipt as JSON, under the keys that it has on the wire.
JsonValue receipt_json(const wire::Receipt& receipt);
/// A report with all its receipts.
JsonValue report_json(const UpdateReport& report);

}  // namespace headrace
