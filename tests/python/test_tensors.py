"""What is taken as a tensor, and what is refused. Expected bytes come from numpy or from struct, never from the package."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import re
import weakref

import headrace
import ml_dtypes
import numpy as np
import pytest
from headrace import _core

NUMPY = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "complex64": "C64",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
ML_DTYPES = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


class Dlpack:
    """Only DLPack, as a library that has nothing else."""

    def __init__(self, inner, versioned=True):
        self.inner = inner
        self.versioned = versioned

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **arguments):
        if not self.versioned and arguments:
            raise TypeError("no arguments here")
        return self.inner.__dlpack__(**arguments)


class Elsewhere(Dlpack):
    def __dlpack_device__(self):
        return (2, 3)


def described(tensor):
    return _core.describe(tensor, "w")


@pytest.mark.parametrize(("name", "expected"), NUMPY.items())
def test_numpy_arrays_of_every_dtype(name, expected):
    values = np.zeros((3, 4), dtype=name)
    assert described(values) == (expected, (3, 4), values.nbytes)


@pytest.mark.parametrize(("name", "expected"), ML_DTYPES.items())
def test_arrays_of_ml_dtypes(name, expected):
    values = np.zeros((3, 4), dtype=getattr(ml_dtypes, name))
    assert described(values) == (expected, (3, 4), values.nbytes)
    assert described(values[0, 0:0])[1] == (0,)
    assert described(np.zeros((), values.dtype))[1] == ()


def test_an_ml_dtypes_array_with_one_fp4_a_byte_is_refused():
    with pytest.raises(headrace.InvalidArgument, match="^w: elements of float4_e2m1fn"):
        described(np.zeros((2, 4), dtype=ml_dtypes.float4_e2m1fn))


@pytest.mark.parametrize(
    "buffer", [bytes(6), bytearray(6), memoryview(bytes(6)), array.array("B", range(6)), mmap.mmap(-1, 6)], ids=lambda b: type(b).__name__
)
def test_buffers(buffer):
    assert described(buffer) == ("U8", (6,), 6)


def test_typed_buffers():
    assert described(array.array("f", [1, 2, 3])) == ("F32", (3,), 12)
    assert described(memoryview(array.array("q", [1, 2])).cast("B").cast("h", (4, 2))) == ("I16", (4, 2), 16)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_alone(versioned):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert described(Dlpack(values, versioned)) == ("F32", (2, 3), 24)


def test_what_is_on_another_device_is_refused_by_its_name():
    with pytest.raises(headrace.Unsupported, match="layers.0.w: the tensor is on cuda:3") as caught:
        _core.describe(Elsewhere(np.zeros(2)), "layers.0.w")
    assert (caught.value.name, caught.value.expected, caught.value.actual) == ("layers.0.w", "cpu", "cuda:3")


@pytest.mark.parametrize("wrong", [None, 3, "text", [1.0, 2.0], object()], ids=repr)
def test_what_is_no_tensor_is_refused(wrong):
    with pytest.raises(headrace.InvalidArgument, match="^w: .* is no tensor"):
        described(wrong)


def test_foreign_byte_order_structures_and_too_many_dimensions_are_refused():
    for wrong in (np.zeros(2, ">f4"), np.zeros(2, [("a", "f4")]), np.zeros(2, "M8[s]"), np.zeros((1,) * 9)):
        with pytest.raises(headrace.InvalidArgument, match="^w: "):
            described(wrong)


def test_a_table_keeps_its_tensors_memory_and_lets_go_of_it():
    values = np.zeros(4, np.float32)
    alive = weakref.ref(values)
    table = headrace.StorageTable.from_tensors({"w": values})
    del values
    gc.collect()
    assert alive() is not None
    layout = headrace.Layout.identity(table)
    assert layout.place(table, {"w": np.ones(4, np.float32)}.items()) == 16
    assert (alive() == 1).all()
    del table
    gc.collect()
    assert alive() is None


def test_a_bytearray_in_a_table_cannot_be_resized_under_it():
    memory = bytearray(8)
    table = headrace.StorageTable.from_tensors({"w": memory})
    with pytest.raises(BufferError):
        memory.extend(b"more")
    del table
    memory.extend(b"more")


def test_live_storage_must_be_writable():
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    for memory in (bytes(8), fixed, fixed.astype(ml_dtypes.bfloat16).view(dtype=ml_dtypes.bfloat16)[:0]):
        with pytest.raises(headrace.InvalidArgument, match="w"):
            headrace.StorageTable.from_tensors({"w": memory})


def test_tables_know_aliases_strides_owners_and_optional_storages():
    whole = np.zeros((4, 6), np.float32)
    other = np.zeros((2, 8), np.int16)
    table = headrace.StorageTable.from_tensors(
        {"embed": whole, "head": whole, "turned": other.T}, owners={"head": ["target", "draft"]}, optional=("tur*",)
    )
    embed, head, turned = table.storages
    assert (embed.dtype, embed.shape, embed.strides, embed.bytes, embed.alias_of) == ("F32", (4, 6), (), 96, None)
    assert head.alias_of == "embed"
    assert head.owners == ("target", "draft")
    assert (turned.shape, turned.strides, turned.bytes, turned.optional) == ((8, 2), (1, 8), 32, True)
    assert table.total_bytes == 96 + 32
    assert len(table) == 3
    assert "head" in table
    assert len(table.digest) == 32


def test_storages_that_overlap_are_refused():
    memory = np.zeros(8, np.float32)
    with pytest.raises(headrace.InvalidArgument, match="overlap"):
        headrace.StorageTable.from_tensors({"a": memory[:5], "b": memory[4:]})


def test_a_backwards_tensor_is_refused_with_its_strides():
    live = np.zeros(4, np.float32)
    table = headrace.StorageTable.from_tensors({"w": live})
    with pytest.raises(headrace.InvalidArgument, match=r"^w: strides \[-4\]"):
        headrace.Layout.identity(table).place(table, [("w", np.arange(4, dtype=np.float32)[::-1])])
    assert (live == 0).all()


class Interface:
    """What says of itself what it likes, in the manner of numpy."""

    dtype = np.dtype("float32")

    def __init__(self, **says):
        self.__array_interface__ = {"data": (8, False), "shape": (4,), **says}


class Raises:
    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        raise ZeroDivisionError("in the export")


def test_an_array_of_ctypes_is_taken_although_it_says_nothing_of_strides():
    live = (ctypes.c_float * 2 * 3)()
    table = headrace.StorageTable.from_tensors({"w": live})
    assert (table.storages[0].dtype, table.storages[0].shape) == ("F32", (3, 2))
    headrace.Layout.identity(table).place(table, [("w", np.arange(6, dtype=np.float32).reshape(3, 2))])
    assert [list(row) for row in live] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "thing, why",
    [
        (Interface(shape=(-5,)), r"\[-5\] is no size of memory"),
        (Interface(shape=(1 << 40, 1 << 40)), "is no size of memory"),
        (Interface(data="here"), "says of its memory cannot be read"),
        (Interface(shape=("x",)), "says of its memory cannot be read"),
        (Interface(strides=(4,) * 300), "300 strides for 1 dimensions"),
        (Interface(strides=(1 << 62,)), "leaves memory"),
        (Interface(data=(0, False)), "no memory for its 16 bytes"),
        (Raises(), "it raised: ZeroDivisionError: in the export"),
    ],
)
def test_what_an_object_says_of_its_memory_is_checked_and_refused_by_name(thing, why):
    with pytest.raises(headrace.InvalidArgument, match=f"^w: .*{why}"):
        _core.describe(thing, "w")


def test_what_an_export_raised_is_the_cause_and_control_c_stays_what_it_is(monkeypatch):
    with pytest.raises(headrace.InvalidArgument) as raised:
        _core.describe(Raises(), "w")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)

    def interrupted(self, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Raises, "__dlpack__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _core.describe(Raises(), "w")


@pytest.mark.parametrize("name", ["half of a pair \ud800", 7, None, b"w"])
def test_what_is_no_name_is_refused_with_what_it_is(name):
    array = np.zeros(4, np.float32)
    table = headrace.StorageTable.from_tensors({"w": array})
    expected = re.escape(ascii(name) if isinstance(name, str) else repr(name))
    with pytest.raises(headrace.InvalidArgument, match=expected):
        headrace.StorageTable.from_tensors({name: array})
    with pytest.raises(headrace.InvalidArgument, match=expected):
        headrace.Layout.identity(table).place(table, [(name, array)])
    with pytest.raises(headrace.InvalidArgument, match=expected):
        headrace.Bucket(bytearray(16), [(name, 0, (4,), "F32")])
