#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "core/wire/limits.h"
#include "python/src/dlpack.h"

namespace headrace::python {

/// A tensor in host memory, as somebody else's object has it.
struct Tensor {
  Dtype dtype = Dtype::kU8;
  std::byte* data = nullptr;
  std::int32_t ndim = 0;
  std::array<std::int64_t, limits::kDimsMax> dims{};     // elements of `dtype`
  std::array<std::int64_t, limits::kDimsMax> strides{};  // bytes
  bool writable = false;

  std::span<const std::int64_t> shape() const { return {dims.data(), static_cast<std::size_t>(ndim)}; }
  std::span<const std::int64_t> steps() const { return {strides.data(), static_cast<std::size_t>(ndim)}; }
  std::int64_t elements() const noexcept;
  /// Of the packed tensor.
  std::int64_t bytes() const noexcept { return elements() * dtype_bytes(dtype); }
  /// Row-major without gaps.
  bool packed() const noexcept;
};

/// Takes in tensors of torch (also parameters, whatever their gradients), numpy, ml_dtypes, and whatever else has DLPack or a buffer,
/// without a copy, and holds what they need for as long as it lives. Only host memory; everything else is refused by its device. Needs the
/// GIL.
class TensorReader {
 public:
  /// kLook: only what a tensor is, its memory is not read. kCall: the objects stay as they are for as long as this reader lives. kOwner:
  /// their memory outlives them if need be.
  enum class Hold : std::uint8_t { kLook, kCall, kOwner };
  explicit TensorReader(Hold hold) : hold_(hold) {}
  ~TensorReader() { forget(); }
  TensorReader(TensorReader&&) = default;
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;
  TensorReader& operator=(TensorReader&&) = delete;

  /// Throws headrace.InvalidArgument or headrace.Unsupported that begins with `name`.
  Tensor read(nanobind::handle object, std::string_view name);
  /// Lets go of all that it holds.
  void forget();
  /// The bytes of a tensor, packed: where they are, or a copy that lives as long as the reader.
  std::span<const std::byte> packed(const Tensor& tensor, std::string_view name);

 private:
  /// How objects of one type are taken.
  struct Exchange {
    nanobind::object type{};
    const dlpack::ExchangeApi* api = nullptr;
    nanobind::object is_neg{};  // torch's: an operation may stand between the memory and what is read
  };
  const Exchange& exchange_of(nanobind::handle object);
  /// The exchange gives memory as it is, also where torch makes something else of it as it reads.
  static void check_plain(const Exchange& exchange, nanobind::handle object, std::string_view name, Dtype dtype);
  bool read_exchange(nanobind::handle object, std::string_view name, Tensor& tensor);
  bool read_buffer(nanobind::handle object, std::string_view name, Tensor& tensor);
  bool read_array(nanobind::handle object, std::string_view name, Tensor& tensor);
  bool read_dlpack(nanobind::handle object, std::string_view name, Tensor& tensor);

  Hold hold_;
  PyTypeObject* last_type_ = nullptr;  // held below while it is here
  const Exchange* last_exchange_ = nullptr;
  std::unordered_map<PyTypeObject*, Exchange> exchanges_;
  std::vector<nanobind::object> objects_;
  std::vector<std::unique_ptr<Py_buffer>> buffers_;
  std::vector<dlpack::ManagedVersioned*> managed_;
  std::vector<dlpack::Managed*> managed_unversioned_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

/// Integers of a shape or of a box's corner; throws headrace.InvalidArgument that begins with `name` for what is none.
Shape shape_from(nanobind::handle object, std::string_view name);

/// (name, tensor) of one item of an iterable. The text lives as long as its object: what gave the item may put another one there.
struct NamedItem {
  std::string_view name;
  nanobind::object text;
  nanobind::object tensor;
};
NamedItem named_item(nanobind::handle item);

}  // namespace headrace::python
