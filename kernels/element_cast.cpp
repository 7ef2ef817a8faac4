#include "kernels/element_cast.h"

#include <array>
#include <cstring>

// Highway compiles the part between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/element_cast.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace headrace {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// The bits of a number travel in lanes of 32 whatever its width, and nearly all of it is integer work: what comes out depends on no
// processor's conversion instructions nor on how it was told to treat subnormals.
using D32 = hn::ScalableTag<std::uint32_t>;
using V32 = hn::VFromD<D32>;

#if HWY_TARGET == HWY_SCALAR

// One lane is read and written as the number that it is, which wants an alignment that runs do not have.
V32 load_bits(D32 d, const std::byte* src, std::int64_t width) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, src, static_cast<std::size_t>(width));
  return hn::Set(d, bits);
}

void store_bits(D32, V32 bits, std::byte* dst, std::int64_t width) {
  const std::uint32_t lane = hn::GetLane(bits);
  std::memcpy(dst, &lane, static_cast<std::size_t>(width));
}

#else

V32 load_bits(D32 d, const std::byte* src, std::int64_t width) {
  if (width == 4) return hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(src));
  const hn::Rebind<std::uint16_t, D32> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(src)));
}

void store_bits(D32 d, V32 bits, std::byte* dst, std::int64_t width) {
  if (width == 4) return hn::StoreU(bits, d, reinterpret_cast<std::uint32_t*>(dst));
  const hn::Rebind<std::uint16_t, D32> d16;
  const hn::RebindToSigned<D32> signed_words;  // no lane is larger than 16 bits, so nothing saturates
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(signed_words, bits)), d16, reinterpret_cast<std::uint16_t*>(dst));
}

#endif

V32 half_to_single(D32 d, V32 half) {
  const hn::RebindToFloat<D32> df;
  const V32 sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d, 0x8000U)));
  const V32 magnitude = hn::And(half, hn::Set(d, 0x7FFFU));
  const V32 shifted = hn::ShiftLeft<13>(magnitude);
  const V32 normal = hn::Add(shifted, hn::Set(d, 112U << 23));
  // 2^-14 with the fraction of a subnormal behind it, less 2^-14: exact, and no single of it is subnormal.
  const V32 step = hn::Set(d, 113U << 23);
  const V32 subnormal = hn::BitCast(d, hn::Sub(hn::BitCast(df, hn::Add(shifted, step)), hn::BitCast(df, step)));
  const V32 special = hn::Add(shifted, hn::Set(d, 224U << 23));
  V32 bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x0400U)), subnormal, normal);
  bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x7BFFU)), special, bits);
  bits = hn::Or(bits, hn::IfThenElseZero(hn::Gt(magnitude, hn::Set(d, 0x7C00U)), hn::Set(d, 0x00400000U)));
  return hn::Or(bits, sign);
}

V32 brain_to_single(D32 d, V32 brain) {
  const V32 bits = hn::ShiftLeft<16>(brain);
  const auto nan = hn::Gt(hn::And(brain, hn::Set(d, 0x7FFFU)), hn::Set(d, 0x7F80U));
  return hn::Or(bits, hn::IfThenElseZero(nan, hn::Set(d, 0x00400000U)));
}

/// Half a step of the last bit that stays, less one when that bit is even.
template <int kDropped>
V32 rounded(D32 d, V32 bits) {
  const V32 odd = hn::And(hn::ShiftRight<kDropped>(bits), hn::Set(d, 1U));
  return hn::Add(bits, hn::Add(odd, hn::Set(d, (1U << (kDropped - 1)) - 1)));
}

V32 single_to_half(D32 d, V32 single) {
  const hn::RebindToFloat<D32> df;
  const V32 sign = hn::And(hn::ShiftRight<16>(single), hn::Set(d, 0x8000U));
  const V32 magnitude = hn::And(single, hn::Set(d, 0x7FFFFFFFU));
  const V32 normal = hn::ShiftRight<13>(hn::Sub(rounded<13>(d, magnitude), hn::Set(d, 112U << 23)));
  // One half has steps of 2^-24, which are those of subnormal halves: the addition rounds.
  const V32 half = hn::Set(d, 0x3F000000U);
  const V32 subnormal = hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(df, magnitude), hn::BitCast(df, half))), half);
  const V32 nan = hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 0x03FFU)), hn::Set(d, 0x7E00U));
  V32 bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 113U << 23)), subnormal, normal);
  bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x477FFFFFU)), hn::Set(d, 0x7C00U), bits);
  bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x7F800000U)), nan, bits);
  return hn::Or(bits, sign);
}

V32 single_to_brain(D32 d, V32 single) {
  const auto nan = hn::Gt(hn::And(single, hn::Set(d, 0x7FFFFFFFU)), hn::Set(d, 0x7F800000U));
  const V32 quiet = hn::Or(hn::ShiftRight<16>(single), hn::Set(d, 0x0040U));
  return hn::IfThenElse(nan, quiet, hn::ShiftRight<16>(rounded<16>(d, single)));
}

template <Dtype kFrom, Dtype kTo>
V32 convert(D32 d, V32 bits) {
  if constexpr (kFrom == Dtype::kF16) bits = half_to_single(d, bits);
  if constexpr (kFrom == Dtype::kBF16) bits = brain_to_single(d, bits);
  if constexpr (kTo == Dtype::kF16) bits = single_to_half(d, bits);
  if constexpr (kTo == Dtype::kBF16) bits = single_to_brain(d, bits);
  return bits;
}

template <Dtype kFrom, Dtype kTo>
void convert_row(const std::byte* src, std::byte* dst, std::int64_t elements) {
  constexpr std::int64_t kFromBytes = kFrom == Dtype::kF32 ? 4 : 2;
  constexpr std::int64_t kToBytes = kTo == Dtype::kF32 ? 4 : 2;
  const D32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= elements; i += lanes) {
    store_bits(d, convert<kFrom, kTo>(d, load_bits(d, src + i * kFromBytes, kFromBytes)), dst + i * kToBytes, kToBytes);
  }
  if (i == elements) return;
  // What fills no vector goes through one of its own, so that there is one arithmetic only.
  alignas(64) std::array<std::byte, 4 * hn::MaxLanes(D32())> buffer{};
  std::memcpy(buffer.data(), src + i * kFromBytes, static_cast<std::size_t>((elements - i) * kFromBytes));
  store_bits(d, convert<kFrom, kTo>(d, load_bits(d, buffer.data(), kFromBytes)), buffer.data(), kToBytes);
  std::memcpy(dst + i * kToBytes, buffer.data(), static_cast<std::size_t>((elements - i) * kToBytes));
}

template <Dtype kFrom, Dtype kTo>
void convert_rows(const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride,
                  std::int64_t elements) {
  for (std::int64_t row = 0; row < rows; ++row) convert_row<kFrom, kTo>(src + row * src_stride, dst + row * dst_stride, elements);
}

template <Dtype kFrom>
void convert_rows_to(Dtype to, const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride,
                     std::int64_t elements) {
  if (to == Dtype::kF32) return convert_rows<kFrom, Dtype::kF32>(src, dst, rows, src_stride, dst_stride, elements);
  if (to == Dtype::kF16) return convert_rows<kFrom, Dtype::kF16>(src, dst, rows, src_stride, dst_stride, elements);
  return convert_rows<kFrom, Dtype::kBF16>(src, dst, rows, src_stride, dst_stride, elements);
}

void CastRows(ElementCast cast, const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride,
              std::int64_t elements) {
  if (cast.from == Dtype::kF32) return convert_rows_to<Dtype::kF32>(cast.to, src, dst, rows, src_stride, dst_stride, elements);
  if (cast.from == Dtype::kF16) return convert_rows_to<Dtype::kF16>(cast.to, src, dst, rows, src_stride, dst_stride, elements);
  return convert_rows_to<Dtype::kBF16>(cast.to, src, dst, rows, src_stride, dst_stride, elements);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace headrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headrace {

HWY_EXPORT(CastRows);

bool castable(Dtype from, Dtype to) noexcept {
  const auto floating = [](Dtype dtype) { return dtype == Dtype::kF32 || dtype == Dtype::kF16 || dtype == Dtype::kBF16; };
  return floating(from) && floating(to);
}

void cast_rows(ElementCast cast, const std::byte* src, std::byte* dst, std::int64_t rows, std::int64_t src_stride, std::int64_t dst_stride,
               std::int64_t elements) noexcept {
  HWY_DYNAMIC_DISPATCH(CastRows)(cast, src, dst, rows, src_stride, dst_stride, elements);
}

}  // namespace headrace
#endif
