#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace [[gnu::visibility("default")]] headrace {

/// Element types by their safetensors names. Values are the wire's numbers and never change.
enum class Dtype : std::uint8_t {
  kBool = 1,
  kU8 = 2,
  kI8 = 3,
  kF8E5M2 = 4,
  kF8E4M3 = 5,
  kF8E8M0 = 6,
  kF8E4M3Fnuz = 7,
  kF8E5M2Fnuz = 8,
  kI16 = 9,
  kU16 = 10,
  kF16 = 11,
  kBF16 = 12,
  kI32 = 13,
  kU32 = 14,
  kF32 = 15,
  kC64 = 16,
  kF64 = 17,
  kI64 = 18,
  kU64 = 19,
  kF4 = 20,
  kF6E2M3 = 21,
  kF6E3M2 = 22,
};

/// Bits of one element.
int dtype_bits(Dtype dtype) noexcept;
/// Bytes of one element; 0 for the sub-byte types, whose tensors travel as U8 or I8.
int dtype_bytes(Dtype dtype) noexcept;
/// The safetensors spelling, e.g. "F8_E4M3".
std::string_view dtype_name(Dtype dtype) noexcept;
std::optional<Dtype> parse_dtype(std::string_view name) noexcept;
/// The enumerator with this wire number, if there is one.
std::optional<Dtype> dtype_from_number(std::uint64_t number) noexcept;

}  // namespace headrace
