#pragma once

#include "core/checkpoint/json_text.h"
#include "sender_sdk/sender.h"

namespace headrace {

/// Adds what a receipt counts of tensors, bytes and work, under the keys that they have on the wire.
JsonObject& add_counts(JsonObject& object, const wire::Receipt& receipt);
/// A receipt as JSON, under the keys that it has on the wire.
JsonValue receipt_json(const wire::Receipt& receipt);
/// A report with all its receipts.
JsonValue report_json(const UpdateReport& report);

}  // namespace headrace
