#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "core/base/digest.h"
#include "core/base/status.h"
#include "core/wire/messages.h"

namespace headrace::wire {

/// msgpack: ["HR", protocol, type, session, incarnation, {fields}].
std::vector<std::byte> encode(const Message& message);

/// kInvalidArgument says which field of which message is missing, of the wrong kind or beyond which limit; kUnsupported names the protocol
/// versions. No length is trusted: nothing is allocated for bytes that did not arrive.
Result<Message> decode(std::span<const std::byte> bytes);

/// A manifest's entries as the exact bytes that are hashed: an array of [name, dtype, shape] or [name, dtype, shape, lo, hi].
std::vector<std::byte> encode_entries(std::span<const ManifestEntry> entries);
Result<std::vector<ManifestEntry>> decode_entries(std::span<const std::byte> bytes);

/// The keys of every message in wire order, for the test that holds docs/protocol.md to the code.
struct MessageKeys {
  MessageType type;
  std::vector<std::string> keys;
};
std::vector<MessageKeys> all_message_keys();

}  // namespace headrace::wire
