#include "core/base/shape.h"

#include <algorithm>

namespace headrace {

std::optional<std::int64_t> element_count(std::span<const std::int64_t> shape) noexcept {
  std::int64_t product = 1;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(product, dimension, &product)) return std::nullopt;
  }
  return product;
}

std::optional<std::int64_t> byte_count(Dtype dtype, std::span<const std::int64_t> shape) noexcept {
  const auto elements = element_count(shape);
  std::int64_t bits = 0;
  if (!elements || dtype_bits(dtype) == 0 || __builtin_mul_overflow(*elements, std::int64_t{dtype_bits(dtype)}, &bits)) return std::nullopt;
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

std::string to_string(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i != 0) text += ',';
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

bool Box::empty() const noexcept {
  for (std::size_t i = 0; i < lo.size(); ++i)
    if (lo[i] >= hi[i]) return true;
  return false;
}

Shape Box::shape() const {
  Shape result(lo.size());
  for (std::size_t i = 0; i < lo.size(); ++i) result[i] = std::max<std::int64_t>(hi[i] - lo[i], 0);
  return result;
}

std::int64_t Box::elements() const noexcept {
  std::int64_t product = 1;
  for (std::size_t i = 0; i < lo.size(); ++i) product *= std::max<std::int64_t>(hi[i] - lo[i], 0);
  return product;
}

bool Box::contains(const Box& other) const noexcept {
  if (other.lo.size() != lo.size()) return false;
  for (std::size_t i = 0; i < lo.size(); ++i)
    if (other.lo[i] < lo[i] || other.hi[i] > hi[i]) return false;
  return true;
}

bool box_fits(const Box& box, std::span<const std::int64_t> shape) noexcept {
  if (box.lo.size() != shape.size() || box.hi.size() != shape.size()) return false;
  for (std::size_t i = 0; i < shape.size(); ++i)
    if (box.lo[i] < 0 || box.lo[i] > box.hi[i] || box.hi[i] > shape[i]) return false;
  return true;
}

Box intersect(const Box& a, const Box& b) {
  Box result = a;
  for (std::size_t i = 0; i < a.lo.size(); ++i) {
    result.lo[i] = std::max(a.lo[i], b.lo[i]);
    result.hi[i] = std::max(result.lo[i], std::min(a.hi[i], b.hi[i]));
  }
  return result;
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (std::size_t i = 0; i < box.lo.size(); ++i) {
    if (i != 0) text += ',';
    text += std::to_string(box.lo[i]) + ":" + std::to_string(box.hi[i]);
  }
  return text + "]";
}

}  // namespace headrace
