#pragma once

#include <cstdint>

// The binary interface of DLPack 1.x (dmlc/dlpack, include/dlpack/dlpack.h), as far as tensors are taken in here.
namespace headrace::python::dlpack {

inline constexpr std::uint32_t kMajor = 1;
inline constexpr std::uint64_t kReadOnly = 1;

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kRocm = 10, kRocmHost = 11, kCudaManaged = 13 };

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E4m3fnuz = 11,
  kFloat8E5m2 = 12,
  kFloat8E5m2fnuz = 13,
  kFloat8E8m0fnu = 14,
  kFloat4E2m1fn = 17,
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // elements; null before 1.2 for row-major
  std::uint64_t byte_offset;
};

struct Managed {
  Tensor tensor;
  void* manager;
  void (*deleter)(Managed*);
};

struct ManagedVersioned {
  Version version;
  void* manager;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

/// What `type(tensor).__dlpack_c_exchange_api__` points to. All functions return 0, or -1 with a Python exception set.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor*, ManagedVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, ManagedVersioned** out);
  int (*managed_to_object)(ManagedVersioned*, void** out);
  int (*tensor_from_object)(void* object, Tensor* out);  // borrowed from the object; may be null
  int (*current_work_stream)(std::int32_t, std::int32_t, void**);
};

}  // namespace headrace::python::dlpack
