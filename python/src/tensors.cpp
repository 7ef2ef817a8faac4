#include "python/src/tensors.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "kernels/executor.h"
#include "kernels/strided_copy.h"
#include "python/src/dtypes.h"
#include "python/src/errors.h"

namespace nb = nanobind;

namespace headrace::python {
namespace {

std::string device_name(std::int32_t type, std::int32_t id) {
  switch (type) {
    case dlpack::kCuda:
    case dlpack::kCudaManaged: return fmt::format("cuda:{}", id);
    case dlpack::kRocm: return fmt::format("rocm:{}", id);
    default: return fmt::format("DLPack device {}:{}", type, id);
  }
}

[[noreturn]] void refuse_device(std::string_view name, const std::string& device) {
  StatusDetail detail;
  detail.name = name;
  detail.expected = "cpu";
  detail.actual = device;
  raise(Status(Code::kUnsupported, fmt::format("{}: the tensor is on {}, only host memory is taken", name, device)).with(detail));
}

void check_device(std::string_view name, std::int32_t type, std::int32_t id) {
  if (type == dlpack::kCpu || type == dlpack::kCudaHost || type == dlpack::kRocmHost) return;
  refuse_device(name, device_name(type, id));
}

void check_dims(std::string_view name, std::int64_t ndim) {
  if (ndim < 0 || ndim > static_cast<std::int64_t>(limits::kDimsMax))
    refuse(name, fmt::format("{} dimensions, at most {}", ndim, limits::kDimsMax));
}

/// Byte steps of a row-major tensor.
void set_packed(Tensor& tensor) {
  std::int64_t step = dtype_bytes(tensor.dtype);
  for (std::int32_t d = tensor.ndim; d-- > 0;) {
    tensor.strides[static_cast<std::size_t>(d)] = step;
    step *= tensor.dims[static_cast<std::size_t>(d)];
  }
}

void take(const dlpack::Tensor& from, bool writable, std::string_view name, Tensor& tensor) {
  check_device(name, from.device_type, from.device_id);
  check_dims(name, from.ndim);
  const auto element = element_type(from.dtype);
  if (!element) {
    refuse(name, fmt::format("elements of DLPack type code {}, {} bits, {} lanes have no dtype here", from.dtype.code, from.dtype.bits,
                             from.dtype.lanes));
  }
  tensor.dtype = element->dtype;
  tensor.data = static_cast<std::byte*>(from.data) + from.byte_offset;
  tensor.ndim = from.ndim;
  tensor.writable = writable;
  const std::int64_t elem = dtype_bytes(tensor.dtype);
  for (std::int32_t d = 0; d < from.ndim; ++d) tensor.dims[static_cast<std::size_t>(d)] = from.shape[d];
  if (element->per_byte == 1) {
    if (from.strides == nullptr) return set_packed(tensor);
    for (std::int32_t d = 0; d < from.ndim; ++d) tensor.strides[static_cast<std::size_t>(d)] = from.strides[d] * elem;
    return;
  }
  // Elements share bytes: the last dimension counts them, and nothing but whole rows can be addressed.
  const auto last = static_cast<std::size_t>(from.ndim) - 1;
  if (from.ndim == 0 || tensor.dims[last] % element->per_byte != 0) refuse(name, "packed elements do not fill whole bytes of a row");
  tensor.dims[last] /= element->per_byte;
  set_packed(tensor);
  for (std::size_t d = 0; from.strides != nullptr && d <= last; ++d) {
    const std::int64_t step = d == last ? 1 : tensor.strides[d] * element->per_byte;
    if (tensor.dims[d] > 1 && from.strides[d] != step) refuse(name, "packed elements must be contiguous");
  }
}

/// What an object says of its memory may be wrong: sizes must count, every step must stay in the address space, and bytes must be
/// somewhere.
void check_memory(std::string_view name, const Tensor& tensor) {
  const auto bytes = byte_count(tensor.dtype, tensor.shape());
  if (!bytes) refuse(name, fmt::format("a shape of {} {} is no size of memory", dtype_name(tensor.dtype), to_string(tensor.shape())));
  if (*bytes == 0) return;
  std::int64_t below = 0;
  std::int64_t above = dtype_bytes(tensor.dtype);
  for (std::size_t d = 0; d < tensor.shape().size(); ++d) {
    std::int64_t reach = 0;
    std::int64_t& side = tensor.strides[d] < 0 ? below : above;
    if (__builtin_mul_overflow(tensor.dims[d] - 1, tensor.strides[d], &reach) || __builtin_add_overflow(side, reach, &side))
      refuse(name, fmt::format("shape {} with steps of {} bytes leaves memory", to_string(tensor.shape()), to_string(tensor.steps())));
  }
  if (tensor.data == nullptr)
    refuse(name, fmt::format("it has no memory for its {} bytes: a wrapper, a fake, or a tensor whose storage was given back", *bytes));
}

}  // namespace

std::int64_t Tensor::elements() const noexcept {
  std::int64_t count = 1;
  for (const std::int64_t dim : shape()) count *= dim;
  return count;
}

bool Tensor::packed() const noexcept {
  std::int64_t step = dtype_bytes(dtype);
  for (std::int32_t d = ndim; d-- > 0;) {
    const auto i = static_cast<std::size_t>(d);
    if (dims[i] != 1 && strides[i] != step) return elements() == 0;
    step *= dims[i];
  }
  return true;
}

void TensorReader::forget() {
  for (const auto& buffer : buffers_) PyBuffer_Release(buffer.get());
  for (dlpack::ManagedVersioned* managed : managed_)
    if (managed->deleter != nullptr) managed->deleter(managed);
  for (dlpack::Managed* managed : managed_unversioned_)
    if (managed->deleter != nullptr) managed->deleter(managed);
  buffers_.clear();
  managed_.clear();
  managed_unversioned_.clear();
  copies_.clear();
  objects_.clear();
}

const TensorReader::Exchange& TensorReader::exchange_of(nb::handle object) {
  PyTypeObject* type = Py_TYPE(object.ptr());
  if (type == last_type_) return *last_exchange_;
  const auto [known, fresh] = exchanges_.try_emplace(type);
  Exchange& exchange = known->second;
  if (fresh) {
    const nb::object capsule = nb::getattr(object.type(), "__dlpack_c_exchange_api__", nb::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") != 0)
      exchange.api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (exchange.api != nullptr && exchange.api->version.major != dlpack::kMajor) exchange.api = exchange.api->previous;
    if (hold_ != Hold::kLook) exchange.is_neg = nb::getattr(object.type(), "is_neg", nb::object());
    exchange.type = nb::borrow(object.type());
  }
  last_type_ = type;
  last_exchange_ = &exchange;
  return exchange;
}

void TensorReader::check_plain(const Exchange& exchange, nb::handle object, std::string_view name, Dtype dtype) {
  if (!exchange.is_neg.is_valid()) return;
  if (nb::cast<bool>(exchange.is_neg(object))) refuse(name, "a view that torch negates as it reads: resolve_neg() makes it plain");
  if (dtype == Dtype::kC64 && nb::cast<bool>(object.attr("is_conj")()))
    refuse(name, "a view that torch conjugates as it reads: resolve_conj() makes it plain");
}

bool TensorReader::read_exchange(nb::handle object, std::string_view name, Tensor& tensor) {
  const Exchange& exchange = exchange_of(object);
  const dlpack::ExchangeApi* api = exchange.api;
  if (api == nullptr) return false;
  if (hold_ != Hold::kOwner && api->tensor_from_object != nullptr) {
    dlpack::Tensor borrowed{};
    if (api->tensor_from_object(object.ptr(), &borrowed) == 0) {
      objects_.push_back(nb::borrow(object));
      take(borrowed, true, name, tensor);
      check_plain(exchange, object, name, tensor.dtype);
      return true;
    }
  } else {
    dlpack::ManagedVersioned* managed = nullptr;
    if (api->managed_from_object(object.ptr(), &managed) == 0) {
      managed_.push_back(managed);
      take(managed->tensor, (managed->flags & dlpack::kReadOnly) == 0, name, tensor);
      check_plain(exchange, object, name, tensor.dtype);
      return true;
    }
  }
  const nb::python_error refused;
  // What has a gradient is not exported as it is.
  if (nb::cast<bool>(nb::bool_(nb::getattr(object, "requires_grad", nb::bool_(false)))))
    return read_exchange(object.attr("detach")(), name, tensor);
  const std::string device = nb::cast<std::string>(nb::str(nb::getattr(object, "device", nb::str("cpu"))));
  if (device != "cpu") refuse_device(name, device);
  // torch adds a C++ backtrace.
  const std::string text = nb::cast<std::string>(nb::str(refused.value()));
  refuse(name, text.substr(0, text.find('\n')));
}

bool TensorReader::read_buffer(nb::handle object, std::string_view name, Tensor& tensor) {
  if (PyObject_CheckBuffer(object.ptr()) == 0) return false;
  auto buffer = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object.ptr(), buffer.get(), PyBUF_FORMAT | PyBUF_STRIDES | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    if (PyObject_GetBuffer(object.ptr(), buffer.get(), PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
      // numpy has no buffer of dtypes that are not its own.
      PyErr_Clear();
      return false;
    }
  }
  const Py_buffer& view = *buffers_.emplace_back(std::move(buffer));
  check_dims(name, view.ndim);
  const std::string_view format = view.format != nullptr ? view.format : "B";
  const auto dtype = dtype_from_format(format, view.itemsize);
  if (!dtype) refuse(name, fmt::format("a buffer of format '{}' with {} bytes an element has no dtype here", format, view.itemsize));
  if (view.ndim > 0 && view.shape == nullptr) refuse(name, "a buffer without a shape");
  tensor.dtype = *dtype;
  tensor.data = static_cast<std::byte*>(view.buf);
  tensor.ndim = view.ndim;
  tensor.writable = view.readonly == 0;
  for (std::int32_t d = 0; d < view.ndim; ++d) {
    tensor.dims[static_cast<std::size_t>(d)] = view.shape[d];
    if (view.strides != nullptr) tensor.strides[static_cast<std::size_t>(d)] = view.strides[d];
  }
  if (view.strides == nullptr) set_packed(tensor);  // ctypes, although strides were asked for
  if (byte_count(tensor.dtype, tensor.shape()) != view.len)
    refuse(name, fmt::format("a buffer of {} bytes says that its shape is {} {}", view.len, dtype_name(*dtype), to_string(tensor.shape())));
  return true;
}

bool TensorReader::read_array(nb::handle object, std::string_view name, Tensor& tensor) {
  const nb::object found = nb::getattr(object, "__array_interface__", nb::none());
  if (!nb::isinstance<nb::dict>(found)) return false;
  const nb::dict array = nb::borrow<nb::dict>(found);
  const nb::object type = object.attr("dtype");
  const auto dtype = find_dtype(type);
  if (!dtype || nb::cast<std::int64_t>(type.attr("itemsize")) != dtype_bytes(*dtype)) {
    refuse(name, fmt::format("elements of {} have no dtype here (those below a byte must be packed into uint8)",
                             nb::cast<std::string>(nb::str(type))));
  }
  tensor.dtype = *dtype;
  const auto data = nb::cast<nb::tuple>(array["data"]);
  tensor.data = reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(data[0]));  // NOLINT(performance-no-int-to-ptr): the protocol's
  tensor.writable = !nb::cast<bool>(data[1]);
  const auto shape = nb::cast<nb::tuple>(array["shape"]);
  check_dims(name, static_cast<std::int64_t>(shape.size()));
  tensor.ndim = static_cast<std::int32_t>(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) tensor.dims[d] = nb::cast<std::int64_t>(shape[d]);
  set_packed(tensor);
  if (array.contains("strides") && !nb::object(array["strides"]).is_none()) {
    const auto strides = nb::cast<nb::tuple>(array["strides"]);
    if (strides.size() != shape.size()) refuse(name, fmt::format("{} strides for {} dimensions", strides.size(), shape.size()));
    for (std::size_t d = 0; d < strides.size(); ++d) tensor.strides[d] = nb::cast<std::int64_t>(strides[d]);
  }
  objects_.push_back(nb::borrow(object));
  return true;
}

bool TensorReader::read_dlpack(nb::handle object, std::string_view name, Tensor& tensor) {
  if (!nb::hasattr(object, "__dlpack__")) return false;
  const nb::object place = object.attr("__dlpack_device__")();
  check_device(name, nb::cast<std::int32_t>(place[0]), nb::cast<std::int32_t>(place[1]));
  nb::object capsule;
  try {
    capsule = object.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(1, 1));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    capsule = object.attr("__dlpack__")();
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    auto* managed = static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != dlpack::kMajor)
      refuse(name, fmt::format("DLPack {}, expected {}", managed->version.major, dlpack::kMajor));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    managed_.push_back(managed);
    take(managed->tensor, (managed->flags & dlpack::kReadOnly) == 0, name, tensor);
    return true;
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0) refuse(name, "__dlpack__ gave no tensor");
  auto* managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  managed_unversioned_.push_back(managed);
  take(managed->tensor, true, name, tensor);
  return true;
}

Tensor TensorReader::read(nb::handle object, std::string_view name) {
  Tensor tensor;
  try {
    if (read_exchange(object, name, tensor) || read_buffer(object, name, tensor) || read_array(object, name, tensor) ||
        read_dlpack(object, name, tensor)) {
      check_memory(name, tensor);
      return tensor;
    }
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception) || nb::hasattr(error.value(), "headrace_code")) throw;
    raise(Status(Code::kInvalidArgument, status_of(error, fmt::format("{}: it cannot be read, it raised", name)).message()), error.value());
  } catch (const nb::cast_error&) {
    refuse(name, fmt::format("what {} says of its memory cannot be read", nb::cast<std::string>(nb::type_name(object.type()))));
  }
  refuse(name, fmt::format("{} is no tensor: it has neither DLPack nor a buffer", nb::cast<std::string>(nb::type_name(object.type()))));
}

std::span<const std::byte> TensorReader::packed(const Tensor& tensor, std::string_view name) {
  const auto bytes = static_cast<std::size_t>(tensor.bytes());
  if (tensor.packed()) return {tensor.data, bytes};
  const Result<StridedCopy> nest = pack_nest(tensor.shape(), dtype_bytes(tensor.dtype), tensor.steps());
  if (!nest.ok()) refuse(name, fmt::format("strides {}: {}", to_string(tensor.steps()), nest.status().message()));
  copies_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
  WorkerPool pool(1);
  const CopyJob job{.copy = nest.value(), .src = tensor.data, .dst = copies_.back().get()};
  HostExecutor(pool).run({&job, 1});
  return {copies_.back().get(), bytes};
}

Shape shape_from(nb::handle object, std::string_view name) {
  const nb::object items = nb::steal(PySequence_Tuple(object.ptr()));
  if (!items.is_valid() && PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
  PyErr_Clear();
  bool integers = items.is_valid();
  Shape shape;
  if (integers)
    for (const nb::handle dim : items) integers = nb::try_cast(dim, shape.emplace_back()) && integers;
  if (!integers) refuse(name, fmt::format("expected a sequence of integers of 64 bits, not {}", short_repr(object)));
  return shape;
}

NamedItem named_item(nb::handle item) {
  PyObject* name = nullptr;
  PyObject* tensor = nullptr;
  if (PyTuple_Check(item.ptr()) && PyTuple_Size(item.ptr()) == 2) {
    name = PyTuple_GetItem(item.ptr(), 0);
    tensor = PyTuple_GetItem(item.ptr(), 1);
  } else if (PyList_Check(item.ptr()) && PyList_Size(item.ptr()) == 2) {
    name = PyList_GetItem(item.ptr(), 0);
    tensor = PyList_GetItem(item.ptr(), 1);
  }
  Py_ssize_t size = 0;
  const char* text = name != nullptr && PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    raise(Status(Code::kInvalidArgument, fmt::format("expected (name, tensor), not {}", short_repr(item))));
  }
  return {{text, static_cast<std::size_t>(size)}, nb::borrow(name), nb::borrow(tensor)};
}

}  // namespace headrace::python
