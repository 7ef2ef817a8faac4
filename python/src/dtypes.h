#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string_view>

#include "core/base/dtype.h"
#include "python/src/dlpack.h"

namespace headrace::python {

/// How a tensor's elements lie in memory: of this dtype, `per_byte` of them in each byte of it.
struct ElementType {
  Dtype dtype = Dtype::kU8;
  int per_byte = 1;  // 2 for packed FP4, which travels as U8
};

/// By a safetensors name ("BF16"), or by the name that torch, numpy and ml_dtypes have for it ("bfloat16").
std::optional<Dtype> dtype_from_text(std::string_view text);
/// By what str() of it ends in: "torch.bfloat16", numpy.dtype("float32"), ml_dtypes.float8_e4m3fn.
std::optional<Dtype> find_dtype(nanobind::handle object);
/// The same; raises headrace.InvalidArgument where there is none.
Dtype dtype_from_object(nanobind::handle object);
std::optional<ElementType> element_type(dlpack::DataType type);
/// Of a buffer's format (module `struct`) and its bytes an element.
std::optional<Dtype> dtype_from_format(std::string_view format, std::int64_t item_bytes);

}  // namespace headrace::python
