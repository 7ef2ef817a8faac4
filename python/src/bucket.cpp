#include "python/src/bucket.h"

#include <fmt/format.h>

#include "python/src/dtypes.h"
#include "python/src/errors.h"

namespace nb = nanobind;

namespace headrace::python {
namespace {

/// The dtype as it travels, its shape in those elements changed with it: packed FP4 becomes U8.
Dtype travelling(Dtype dtype, std::span<std::int64_t> shape, std::string_view name) {
  if (dtype_bytes(dtype) != 0) return dtype;
  const std::int64_t bits = dtype_bits(dtype);
  if (shape.empty() || shape.back() * bits % 8 != 0)
    refuse(name, fmt::format("{} {} does not fill whole bytes of a row", dtype_name(dtype), to_string(shape)));
  shape.back() = shape.back() * bits / 8;
  return Dtype::kU8;
}

}  // namespace

Bucket::Bucket(nb::handle buffer, nb::handle metas) {
  const Tensor memory = reader_.read(buffer, "bucket");
  if (!memory.packed()) refuse("bucket", "its buffer must be contiguous");
  const std::span<const std::byte> bytes(memory.data, static_cast<std::size_t>(memory.bytes()));
  std::vector<std::pair<std::size_t, std::size_t>> shapes;
  PyObject* last_dtype = nullptr;
  Dtype dtype = Dtype::kU8;
  for (const nb::handle meta : given_iterable(metas, "metas", "(name, offset, shape, dtype) of each tensor")) {
    const bool row = nb::isinstance<nb::tuple>(meta) || nb::isinstance<nb::list>(meta);
    if (!row || nb::len(meta) != 4) refuse_kind("metas", "(name, offset, shape, dtype)", meta);
    const nb::object name_object = meta[0];
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(name_object.ptr()) ? PyUnicode_AsUTF8AndSize(name_object.ptr(), &size) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      refuse("bucket", fmt::format("its entry {} has a name that is no text of UTF-8", short_repr(name_object)));
    }
    const std::string_view name(text, static_cast<std::size_t>(size));
    std::int64_t offset = 0;
    if (!nb::try_cast(meta[1], offset)) refuse(name, fmt::format("its offset is {}", short_repr(meta[1])));
    const std::size_t first = dims_.size();
    for (const std::int64_t dim : shape_from(nb::object(meta[2]), name)) dims_.push_back(dim);
    const nb::object dtype_object = meta[3];
    if (dtype_object.ptr() != last_dtype) dtype = dtype_from_object(dtype_object);
    last_dtype = dtype_object.ptr();
    const std::span<std::int64_t> shape(dims_.data() + first, dims_.size() - first);
    const Dtype travels = travelling(dtype, shape, name);
    const auto length = byte_count(travels, shape);
    if (!length || offset < 0 || offset > static_cast<std::int64_t>(bytes.size()) ||
        *length > static_cast<std::int64_t>(bytes.size()) - offset)
      refuse(name, fmt::format("{} {} at byte {} of a bucket of {} bytes", dtype_name(travels), to_string(shape), offset, bytes.size()));
    shapes.emplace_back(first, shape.size());
    views_.push_back({name, travels, {}, bytes.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(*length))});
    names_.push_back(name_object);
  }
  for (std::size_t i = 0; i < views_.size(); ++i) views_[i].shape = {dims_.data() + shapes[i].first, shapes[i].second};
}

void init_bucket(nb::module_& module) {
  nb::class_<Bucket>(module, "Bucket", "Many packed tensors in one buffer.")
      .def(nb::init<nb::handle, nb::handle>(), nb::arg("buffer"), nb::arg("metas"),
           nb::sig("def __init__(self, buffer: object, metas: Iterable[tuple[str, int, Sequence[int], object]]) -> None"),
           "buffer: contiguous host memory, held by the bucket. metas: (name, offset in bytes, shape, dtype) of each tensor, row-major.\n"
           "Shapes of F4 count elements, two a byte.")
      .def("__len__", [](const Bucket& self) { return self.views().size(); });
}

}  // namespace headrace::python
