#include "core/transport/control.h"

#include <cstring>

namespace headrace {

std::string PeerId::hex() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

PeerId PeerId::random() {
  PeerId id;
  const std::uint64_t halves[2] = {random_u64(), random_u64()};
  std::memcpy(id.bytes.data(), halves, sizeof halves);
  // ZeroMQ keeps routing ids that begin with 0 for itself.
  if (id.bytes[0] == 0) id.bytes[0] = 1;
  return id;
}

}  // namespace headrace
