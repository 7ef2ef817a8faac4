#include "python/src/dtypes.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <array>
#include <string>

#include "python/src/errors.h"

namespace headrace::python {
namespace {

struct Row {
  Dtype dtype;
  std::string_view name;  // of torch, numpy and ml_dtypes, who agree
  std::uint8_t code;      // of DLPack
};

constexpr std::array<Row, 20> kRows{{
    {Dtype::kBool, "bool", dlpack::kBool},
    {Dtype::kU8, "uint8", dlpack::kUInt},
    {Dtype::kI8, "int8", dlpack::kInt},
    {Dtype::kF8E5M2, "float8_e5m2", dlpack::kFloat8E5m2},
    {Dtype::kF8E4M3, "float8_e4m3fn", dlpack::kFloat8E4m3fn},
    {Dtype::kF8E8M0, "float8_e8m0fnu", dlpack::kFloat8E8m0fnu},
    {Dtype::kF8E4M3Fnuz, "float8_e4m3fnuz", dlpack::kFloat8E4m3fnuz},
    {Dtype::kF8E5M2Fnuz, "float8_e5m2fnuz", dlpack::kFloat8E5m2fnuz},
    {Dtype::kI16, "int16", dlpack::kInt},
    {Dtype::kU16, "uint16", dlpack::kUInt},
    {Dtype::kF16, "float16", dlpack::kFloat},
    {Dtype::kBF16, "bfloat16", dlpack::kBfloat},
    {Dtype::kI32, "int32", dlpack::kInt},
    {Dtype::kU32, "uint32", dlpack::kUInt},
    {Dtype::kF32, "float32", dlpack::kFloat},
    {Dtype::kC64, "complex64", dlpack::kComplex},
    {Dtype::kF64, "float64", dlpack::kFloat},
    {Dtype::kI64, "int64", dlpack::kInt},
    {Dtype::kU64, "uint64", dlpack::kUInt},
    {Dtype::kF4, "float4_e2m1fn_x2", dlpack::kFloat4E2m1fn},
}};

std::optional<Dtype> by_code(std::uint8_t code, int bits) {
  for (const Row& row : kRows)
    if (row.code == code && dtype_bits(row.dtype) == bits) return row.dtype;
  return std::nullopt;
}

}  // namespace

std::optional<Dtype> dtype_from_text(std::string_view text) {
  if (const auto dtype = parse_dtype(text)) return dtype;
  for (const Row& row : kRows)
    if (row.name == text) return row.dtype;
  return std::nullopt;
}

std::optional<Dtype> find_dtype(nanobind::handle object) {
  const std::string text = plain_text(object);
  std::string_view name = text;
  if (name.ends_with("'>")) name.remove_suffix(2);  // "<class 'ml_dtypes.bfloat16'>"
  if (const auto dot = name.rfind('.'); dot != std::string_view::npos) name.remove_prefix(dot + 1);
  return dtype_from_text(name);
}

Dtype dtype_from_object(nanobind::handle object) {
  if (const auto dtype = find_dtype(object)) return *dtype;
  raise(Status(Code::kInvalidArgument,
               fmt::format("dtype {}: expected a safetensors name such as BF16, or a dtype of torch or numpy", short_repr(object))));
}

std::optional<ElementType> element_type(dlpack::DataType type) {
  if (type.code == dlpack::kFloat4E2m1fn && type.bits == 4) {
    // Two lanes: torch counts bytes. One: elements are counted.
    if (type.lanes == 2) return ElementType{Dtype::kU8, 1};
    if (type.lanes == 1) return ElementType{Dtype::kU8, 2};
  }
  if (type.lanes != 1) return std::nullopt;
  const auto dtype = by_code(type.code, type.bits);
  return dtype ? std::optional(ElementType{*dtype, 1}) : std::nullopt;
}

std::optional<Dtype> dtype_from_format(std::string_view format, std::int64_t item_bytes) {
  if (!format.empty() && (format[0] == '@' || format[0] == '=' || format[0] == '<' || format[0] == '|')) format.remove_prefix(1);
  const int bits = static_cast<int>(item_bytes) * 8;
  if (format == "Zf") return by_code(dlpack::kComplex, bits);
  if (format.empty()) return item_bytes == 1 ? std::optional(Dtype::kU8) : std::nullopt;
  if (format.size() != 1) return std::nullopt;
  switch (format[0]) {
    case '?': return by_code(dlpack::kBool, bits);
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
    case 'n': return by_code(dlpack::kInt, bits);
    case 'c':
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N': return by_code(dlpack::kUInt, bits);
    case 'e':
    case 'f':
    case 'd': return by_code(dlpack::kFloat, bits);
    default: return std::nullopt;
  }
}

}  // namespace headrace::python
