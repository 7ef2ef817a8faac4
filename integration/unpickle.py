"""Reads the pickles of the peers' weight wires without running any of them.

Every peer puts its bucket tables on the wire as Python pickles, and a pickle is a program: whoever may connect may run code. This is
a reader of the part of the language that such a table needs. It builds tuples, lists, dicts, strings, bytes, integers, booleans and
None itself, takes names of modules only from an exact allow-list, and calls nothing but the constructors in that list. Whatever else a
message holds is refused by name before it has any effect; size, number of values and depth are bounded while reading.
"""

import pickletools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.errors import InvalidArgument

__all__ = ["DIMENSIONS_MAX", "DTYPES", "Constructor", "Dtype", "Limits", "Reference", "RefusedPickle", "loads", "shape_of", "short"]


class RefusedPickle(InvalidArgument):
    """A message that is no plain table: says what was found and where."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype by its name. `str()` is the name of the dtype in which headrace takes it."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.travels}"

    @property
    def travels(self) -> str:
        """torch's shapes count pairs of packed FP4, so they are bytes."""
        return "uint8" if self.name == "float4_e2m1fn_x2" else self.name


@dataclass(frozen=True, slots=True)
class Reference:
    """A class or function that a message names. It is compared with what is known, never called."""

    qualified_name: str


@dataclass(frozen=True, slots=True)
class Constructor:
    """What stands in for a callable of the allow-list: gets the arguments as a tuple, returns an immutable value."""

    qualified_name: str
    make: Callable[[tuple], object]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one message: its bytes, the opcodes in it (each makes at most one value), how deep containers nest."""

    message_bytes_max: int = 64 << 20
    opcodes_max: int = 16 << 20
    depth_max: int = 16


_ITEM_SIZES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
    2: "bfloat16 float16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
DTYPES: Mapping[str, Dtype] = {f"torch.{name}": Dtype(name, size) for size, names in _ITEM_SIZES.items() for name in names.split()}

DIMENSIONS_MAX = 64
_NAME_BYTES_MAX = 64 << 10
_BLOB_BYTES_MAX = 1 << 20


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = 200


def short(value: object) -> str:
    """A value of a message for the words of an error. Tuples and strings that a message uses again and again may be endless when all of
    them are written out."""
    return _SHORT.repr(value)


def shape_of(arguments: tuple) -> tuple[int, ...]:
    """torch.Size as a plain tuple, from the arguments of its constructor."""
    if len(arguments) != 1 or type(arguments[0]) is not tuple or len(arguments[0]) > DIMENSIONS_MAX:
        raise RefusedPickle(f"torch.Size takes one tuple of at most {DIMENSIONS_MAX} dimensions")
    for extent in arguments[0]:
        if type(extent) is not int or not 0 <= extent < 1 << 63:
            raise RefusedPickle(f"torch.Size with a dimension of {short(extent)}")
    return arguments[0]


_SIZE = Constructor("torch.Size", shape_of)


def loads(data: bytes | memoryview, allowed: Mapping[str, object] | None = None, limits: Limits | None = None) -> object:
    """The value of one pickle of protocol 4 or 5. Calls nothing that is not in `allowed`.

    `allowed` maps "module.name" to the value that stands for it: a Dtype, a Reference, a Constructor, any immutable value. torch's
    dtypes and torch.Size are always understood and need no torch. Raises RefusedPickle.
    """
    limits = limits or Limits()
    if len(data) > limits.message_bytes_max:
        raise RefusedPickle(f"a message of {len(data)} bytes, at most {limits.message_bytes_max} are read")
    reader = _Reader(bytes(data), allowed or {}, limits)
    try:
        return reader.read()
    except IndexError:
        raise RefusedPickle(f"truncated, or a value is missing, before byte {reader.at} of {len(data)}") from None


_CONTAINERS = (tuple, list, dict)
# Values that no later opcode can change: only these may be fetched again, so nothing nests in itself and nothing grows behind a name.
_MUTABLE = (list, dict)


class _Reader:
    """One message; used once."""

    def __init__(self, data: bytes, allowed: Mapping[str, object], limits: Limits):
        self.data = data
        self.at = 0
        self.allowed = allowed
        self.limits = limits
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: list = []
        # Nesting by identity; every container of the message is on the stack, in the memo or in another one, so identities stay.
        self.depths: dict[int, int] = {}
        self.kept: list = []

    def refuse(self, what: str) -> RefusedPickle:
        return RefusedPickle(f"{what}, at byte {self.at} of {len(self.data)}")

    def read(self) -> object:
        if self.data[:1] != b"\x80" or self.data[1] not in (4, 5):
            raise self.refuse("no pickle of protocol 4 or 5")
        self.at = 2
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        at, opcodes_left = 2, self.limits.opcodes_max
        rare = self._rare()
        # The opcodes of a bucket's table, the most frequent first; everything else goes through the table of rare ones.
        while True:
            opcode = data[at]
            self.at = at
            opcodes_left -= 1
            if opcodes_left < 0:
                raise self.refuse(f"more than {self.limits.opcodes_max} opcodes")
            if opcode == 0x68:  # BINGET
                stack.append(self.fetch(data[at + 1]))
                at += 2
            elif opcode == 0x94:  # MEMOIZE
                memo.append(stack[-1])
                at += 1
            elif opcode == 0x4A:  # BININT
                stack.append(int.from_bytes(self.slice(at + 1, 4), "little", signed=True))
                at += 5
            elif opcode == 0x4D:  # BININT2
                stack.append(data[at + 1] | data[at + 2] << 8)
                at += 3
            elif opcode == 0x4B:  # BININT1
                stack.append(data[at + 1])
                at += 2
            elif opcode == 0x8C:  # SHORT_BINUNICODE
                size = data[at + 1]
                stack.append(self.text(at + 2, size))
                at += 2 + size
            elif opcode == 0x52:  # REDUCE
                arguments = self.pop()
                stack.append(self.construct(self.pop(), arguments))
                at += 1
            elif 0x85 <= opcode <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                self.close_tuple(len(stack) - (opcode - 0x84))
                at += 1
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
                at += 1
            elif opcode == 0x75:  # SETITEMS
                self.set_items(marks.pop())
                at += 1
            elif opcode == 0x2E:  # STOP
                return self.finish(at + 1)
            elif opcode in rare:
                self.at = at + 1
                rare[opcode]()
                at = self.at
            else:
                raise self.refuse(f"opcode {_name_of(opcode)} has no place in a table")

    def _rare(self) -> dict[int, Callable[[], None]]:
        push = self.stack.append
        return {
            0x4E: lambda: push(None),  # NONE
            0x88: lambda: push(True),  # NEWTRUE
            0x89: lambda: push(False),  # NEWFALSE
            0x29: lambda: push(()),  # EMPTY_TUPLE
            0x5D: lambda: push([]),  # EMPTY_LIST
            0x7D: lambda: push({}),  # EMPTY_DICT
            0x95: self.frame,
            0x93: self.name,  # STACK_GLOBAL
            0x74: lambda: self.close_tuple(self.marks.pop()),  # TUPLE
            0x61: lambda: self.append_items(len(self.stack) - 1),  # APPEND
            0x65: lambda: self.append_items(self.marks.pop()),  # APPENDS
            0x73: lambda: self.set_items(len(self.stack) - 2),  # SETITEM
            0x6A: lambda: push(self.fetch(self.number(4))),  # LONG_BINGET
            0x58: lambda: push(self.counted_text()),  # BINUNICODE
            0x43: lambda: push(self.blob(self.number(1))),  # SHORT_BINBYTES
            0x42: lambda: push(self.blob(self.number(4))),  # BINBYTES
            0x8A: self.long,  # LONG1
        }

    def slice(self, at: int, size: int) -> bytes:
        if at + size > len(self.data):
            raise self.refuse(f"truncated: {size} bytes are announced, {len(self.data) - at} are there")
        return self.data[at : at + size]

    def number(self, size: int) -> int:
        value = int.from_bytes(self.slice(self.at, size), "little")
        self.at += size
        return value

    def frame(self) -> None:
        size = self.number(8)
        if size > len(self.data) - self.at:
            raise self.refuse(f"truncated: a frame of {size} bytes, {len(self.data) - self.at} are there")

    def text(self, at: int, size: int) -> str:
        try:
            return self.slice(at, size).decode()
        except UnicodeDecodeError:
            raise self.refuse("a string that is no UTF-8") from None

    def counted_text(self) -> str:
        size = self.number(4)
        if size > _NAME_BYTES_MAX:
            raise self.refuse(f"a string of {size} bytes, at most {_NAME_BYTES_MAX} are read")
        text = self.text(self.at, size)
        self.at += size
        return text

    def blob(self, size: int) -> bytes:
        if size > _BLOB_BYTES_MAX:
            raise self.refuse(f"{size} bytes in one value, at most {_BLOB_BYTES_MAX} are read")
        value = self.slice(self.at, size)
        self.at += size
        return value

    def long(self) -> None:
        size = self.number(1)
        if size > 9:
            raise self.refuse(f"an integer of {size} bytes")
        self.stack.append(int.from_bytes(self.blob(size), "little", signed=True))

    def pop(self) -> object:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise self.refuse("a value is missing")
        return self.stack.pop()

    def fetch(self, index: int) -> object:
        if index >= len(self.memo):
            raise self.refuse(f"memo entry {index} of {len(self.memo)}")
        value = self.memo[index]
        if type(value) in _MUTABLE:
            raise self.refuse(f"a {type(value).__name__} that is used twice")
        return value

    def name(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise self.refuse("a name that is no string")
        qualified = f"{module}.{name}"
        value = DTYPES.get(qualified) or (_SIZE if qualified == "torch.Size" else self.allowed.get(qualified))
        if value is None:
            raise self.refuse(f"{qualified!r} is not in the list of what a table may name")
        self.stack.append(value)

    def construct(self, callee: object, arguments: object) -> object:
        if type(callee) is not Constructor:
            called = callee.qualified_name if type(callee) is Reference else type(callee).__name__
            raise self.refuse(f"a call of {called}")
        if type(arguments) is not tuple:
            raise self.refuse(f"a call of {callee.qualified_name} with no tuple of arguments")
        try:
            return callee.make(arguments)
        except RefusedPickle as error:
            raise self.refuse(str(error)) from None

    def items_from(self, begin: int) -> list:
        if begin < 0 or (self.marks and begin < self.marks[-1]):
            raise self.refuse("a value is missing")
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def nest(self, container: object, items: list) -> None:
        """Notes how deep `container` is with these items in it."""
        depth = 1
        for item in items:
            if type(item) in _CONTAINERS:
                depth = max(depth, 1 + self.depths.get(id(item), 1))
        if depth > self.limits.depth_max:
            raise self.refuse(f"containers nest deeper than {self.limits.depth_max}")
        if depth > 1:
            self.depths[id(container)] = max(depth, self.depths.get(id(container), 1))
            self.kept.append(container)

    def close_tuple(self, begin: int) -> None:
        items = self.items_from(begin)
        closed = tuple(items)
        self.nest(closed, items)
        self.stack.append(closed)

    def append_items(self, begin: int) -> None:
        items = self.items_from(begin)
        target = self.stack[-1]
        if type(target) is not list or (self.marks and len(self.stack) <= self.marks[-1]):
            raise self.refuse("items for what is no list")
        self.nest(target, items)
        target.extend(items)

    def set_items(self, begin: int) -> None:
        items = self.items_from(begin)
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2 or (self.marks and len(self.stack) <= self.marks[-1]):
            raise self.refuse("entries for what is no dict")
        before = len(target)
        for key in items[0::2]:
            if type(key) is not str:
                raise self.refuse(f"a key that is a {type(key).__name__}")
        self.nest(target, items)
        target.update(zip(items[0::2], items[1::2], strict=True))
        if len(target) - before != len(items) // 2:
            raise self.refuse("a key that comes twice")

    def finish(self, end: int) -> object:
        if len(self.stack) != 1 or self.marks:
            raise self.refuse(f"{len(self.stack)} values at the end, one is expected")
        if end != len(self.data):
            raise self.refuse(f"{len(self.data) - end} bytes after the end")
        return self.stack[0]


def _name_of(opcode: int) -> str:
    info = pickletools.code2op.get(chr(opcode))
    return info.name if info else f"0x{opcode:02x}"
