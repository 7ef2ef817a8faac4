"""What a staged hook is lent."""

from __future__ import annotations

import sys

_TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


class View:
    """A tensor lent to a hook until it returns: name, dtype, shape, and `data`, a memoryview of its packed bytes.

    Afterwards all of it raises ValueError. What was taken out of it before and is kept (a memoryview, a tensor) stays readable, but its
    content is whatever comes next: copy what is to be kept.
    """

    __slots__ = ("_lease", "dtype", "name", "shape")

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], lease) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self._lease = lease

    @property
    def data(self) -> memoryview:
        return memoryview(self._lease)

    def torch(self):
        """The same memory as a torch tensor. Writing to an input is an error that torch does not notice."""
        torch = sys.modules.get("torch") or __import__("torch")
        data = self.data
        if not data.nbytes:
            return torch.empty(self.shape, dtype=getattr(torch, _TORCH[self.dtype]))
        return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, _TORCH[self.dtype])).reshape(self.shape)

    def numpy(self):
        """The same memory as a numpy array, of a dtype of ml_dtypes where numpy has none."""
        numpy = sys.modules.get("numpy") or __import__("numpy")
        name = _TORCH[self.dtype]
        dtype = getattr(numpy, name, None) or getattr(sys.modules.get("ml_dtypes") or __import__("ml_dtypes"), name)
        return numpy.frombuffer(self.data, dtype=numpy.uint8).view(dtype).reshape(self.shape)

    def __repr__(self) -> str:
        return f"View({self.name!r}, {self.dtype}, {list(self.shape)})"
