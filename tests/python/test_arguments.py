"""Arguments of another kind than is documented: an error that names them, with what was expected and what came."""

from __future__ import annotations

import types

import headrace
import numpy as np
import pytest

NOT_NAMES = [3, b"x", "x", [3], [b"x"], ["\ud800"]]


class Odd:
    """What says of itself what nobody can use."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


def table_of() -> headrace.StorageTable:
    return headrace.StorageTable.from_tensors({"w": np.zeros(4, np.float32)})


def refused(argument: str, call) -> headrace.InvalidArgument:
    """`call` must fail with what names the argument and shows both sides."""
    with pytest.raises(headrace.InvalidArgument) as raised:
        call()
    error = raised.value
    assert str(error).startswith(f"{argument}: expected "), error
    assert error.name == argument and error.expected and error.actual, error
    assert error.expected in str(error) and error.actual in str(error)
    return error


@pytest.mark.parametrize("config", [b"x", 3, ["x"], "\ud800", Odd()])
def test_a_config_that_is_none(config):
    refused("config", lambda: headrace.Layout.build(config=config))


@pytest.mark.parametrize(
    "tensors", [b"x", 3, [3], [()], [("x",)], [("x", "F32", (4,), 0)], ["xyz"], [{"name": "x"}], Odd(), types.SimpleNamespace()]
)
def test_a_list_of_tensors_that_is_none(tensors):
    refused("tensors", lambda: headrace.Layout.build(family="dense", tensors=tensors))


def test_a_path_that_is_no_text():
    class Path:
        def __fspath__(self):
            return b"x"

    refused("config", lambda: headrace.Layout.build(config=Path()))
    refused("tensors", lambda: headrace.Layout.build(family="dense", tensors=Path()))


@pytest.mark.parametrize("dtype", [3, "x", None, Odd(), b"F32", "\ud800"])
def test_a_dtype_that_is_none(dtype):
    with pytest.raises(headrace.InvalidArgument, match="^dtype .*: expected a safetensors name"):
        headrace.Layout.build(family="dense", tensors=[("x", dtype, (4,))])


@pytest.mark.parametrize("value", ["x", 1.5, None, 1 << 64, [1]])
def test_sizes_that_are_none(value):
    layout = headrace.Layout.identity(table_of())
    entries, outputs = [("a", "F32", (4,))], ["w"]
    refused("work_bytes", lambda: layout.with_groups([headrace.Group("g", entries=entries, outputs=outputs, work_bytes=value)]))
    spec = headrace.StorageSpec("s", "F32", (4,), bytes=value)
    refused("bytes", lambda: layout.with_groups([headrace.Group("g", entries=entries, outputs=[spec])]))


def test_groups_that_are_none():
    layout = headrace.Layout.identity(table_of())
    for groups in (3, [3], ["g"], [Odd(name="g")]):
        refused("groups", lambda groups=groups: layout.with_groups(groups))
    for entries in (3, [3], [("a", "F32")], ["abc"]):
        refused("entries", lambda entries=entries: layout.with_groups([headrace.Group("g", entries=entries, outputs=["w"])]))
    for outputs in (3, [3], [Odd(name="s")]):
        refused("outputs", lambda outputs=outputs: layout.with_groups([headrace.Group("g", entries=[("a", "F32", (4,))], outputs=outputs)]))


def test_names_that_are_none():
    tensors = {"w": np.zeros(4, np.float32)}
    for owners in NOT_NAMES:
        if owners != "x":
            refused("owners", lambda owners=owners: headrace.StorageTable.from_tensors(tensors, owners=owners))
            refused("owners", lambda owners=owners: headrace.StorageTable.from_tensors(tensors, owners={"w": owners}))
    layout = headrace.Layout.identity(table_of())
    refused("storages", lambda: layout.only(3))
    refused("names", lambda: layout.dropping(3))


def test_a_module_that_is_none():
    class Module:
        def __init__(self, parameters):
            self.parameters = parameters

        def named_parameters(self, remove_duplicate):
            return self.parameters

        def named_buffers(self, remove_duplicate):
            return []

    refused("named_parameters", lambda: headrace.StorageTable.from_module(Module([3])))
    refused("numel", lambda: headrace.StorageTable.from_module(Module([("w", Odd(numel=lambda: "many"))])))
    with pytest.raises(AttributeError, match="named_parameters"):
        headrace.StorageTable.from_module(3)


@pytest.mark.parametrize("metas", [3, [3], [()], [("x", 0, (4,))], ["abcd"], [None]])
def test_a_buckets_table_that_is_none(metas):
    refused("metas", lambda: headrace.Bucket(bytearray(16), metas))


@pytest.mark.parametrize("tensors", [3, Odd()])
def test_what_cannot_be_gone_through(job, tensors):
    table = table_of()
    refused("tensors", lambda: headrace.Layout.identity(table).place(table, tensors))
    with headrace.Receiver(table, job=job) as receiver:
        with pytest.raises(headrace.InvalidArgument, match="^tensors: expected pairs of name and tensor"):
            with receiver.update("run/1") as update:
                update.load(tensors)


def test_what_an_iterator_of_the_callers_raises_stays_the_callers():
    class Broken:
        def __iter__(self):
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        headrace.Layout.build(family="dense", tensors=Broken())


@pytest.mark.parametrize(("argument", "value"), [("rank", "x"), ("family", 3), ("scopes", 3), ("redundant_experts", None)])
def test_plain_arguments_are_named_by_the_signature(argument, value):
    with pytest.raises(TypeError, match=argument):
        headrace.Layout.build(**{"family": "dense", argument: value})
