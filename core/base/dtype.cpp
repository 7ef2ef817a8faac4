#include "core/base/dtype.h"

#include <array>

namespace headrace {
namespace {

struct Row {
  Dtype dtype;
  int bits;
  std::string_view name;
};

constexpr std::array<Row, 22> kRows{{
    {Dtype::kBool, 8, "BOOL"},
    {Dtype::kU8, 8, "U8"},
    {Dtype::kI8, 8, "I8"},
    {Dtype::kF8E5M2, 8, "F8_E5M2"},
    {Dtype::kF8E4M3, 8, "F8_E4M3"},
    {Dtype::kF8E8M0, 8, "F8_E8M0"},
    {Dtype::kF8E4M3Fnuz, 8, "F8_E4M3FNUZ"},
    {Dtype::kF8E5M2Fnuz, 8, "F8_E5M2FNUZ"},
    {Dtype::kI16, 16, "I16"},
    {Dtype::kU16, 16, "U16"},
    {Dtype::kF16, 16, "F16"},
    {Dtype::kBF16, 16, "BF16"},
    {Dtype::kI32, 32, "I32"},
    {Dtype::kU32, 32, "U32"},
    {Dtype::kF32, 32, "F32"},
    {Dtype::kC64, 64, "C64"},
    {Dtype::kF64, 64, "F64"},
    {Dtype::kI64, 64, "I64"},
    {Dtype::kU64, 64, "U64"},
    {Dtype::kF4, 4, "F4"},
    {Dtype::kF6E2M3, 6, "F6_E2M3"},
    {Dtype::kF6E3M2, 6, "F6_E3M2"},
}};

const Row* find(Dtype dtype) noexcept {
  const auto number = static_cast<std::size_t>(dtype);
  return number >= 1 && number <= kRows.size() ? &kRows[number - 1] : nullptr;
}

}  // namespace

int dtype_bits(Dtype dtype) noexcept {
  const Row* row = find(dtype);
  return row != nullptr ? row->bits : 0;
}

int dtype_bytes(Dtype dtype) noexcept {
  return dtype_bits(dtype) / 8;
}

std::string_view dtype_name(Dtype dtype) noexcept {
  const Row* row = find(dtype);
  return row != nullptr ? row->name : "unknown";
}

std::optional<Dtype> parse_dtype(std::string_view name) noexcept {
  for (const Row& row : kRows)
    if (row.name == name) return row.dtype;
  return std::nullopt;
}

std::optional<Dtype> dtype_from_number(std::uint64_t number) noexcept {
  if (number < 1 || number > kRows.size()) return std::nullopt;
  return static_cast<Dtype>(number);
}

}  // namespace headrace
