"""A bucket of a peer's wire: one piece of memory and a table of the tensors in it. And the writer that fills such buckets."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from headrace.errors import InvalidArgument, Unsupported

from .unpickle import DIMENSIONS_MAX, Dtype, RefusedPickle, short

__all__ = ["Bucket", "BucketWriter", "Entry", "TableCache", "entry_of"]


class Entry(NamedTuple):
    """One tensor of a bucket: where its bytes begin, its shape, its dtype. The order is that of headrace.Bucket's table."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def entry_of(meta: object, memory_bytes: int) -> Entry:
    """A table's entry {name, shape, dtype, offset} as read from the wire, checked against the memory. Raises RefusedPickle.

    Offsets may be anything inside the memory: peers align to 256 bytes, to the element size or not at all.
    """
    if type(meta) is not dict:
        raise RefusedPickle(f"an entry that is a {type(meta).__name__}, not a dict")
    name, offset, shape, dtype = meta.get("name"), meta.get("offset"), meta.get("shape"), meta.get("dtype")
    if type(shape) is list:
        shape = tuple(shape)
    if type(name) is not str or type(offset) is not int or type(shape) is not tuple or type(dtype) is not Dtype:
        raise RefusedPickle(f"entry {short(name)}: name, offset, shape and dtype are expected, it has {short(sorted(map(str, meta)))}")
    if len(shape) > DIMENSIONS_MAX:
        raise RefusedPickle(f"entry {short(name)}: {len(shape)} dimensions, at most {DIMENSIONS_MAX}")
    if not all(type(extent) is int and 0 <= extent < 1 << 63 for extent in shape):
        raise RefusedPickle(f"entry {short(name)}: shape {short(shape)}")
    entry = Entry(name, offset, shape, dtype)
    if offset < 0 or offset + entry.nbytes > memory_bytes:
        raise RefusedPickle(f"entry {short(name)}: bytes {offset} to {offset + entry.nbytes} of a buffer of {memory_bytes}")
    return entry


@dataclass(frozen=True, slots=True)
class Bucket:
    """`entries` lie in `memory`, anything with a writable buffer. A view keeps the memory mapped, not its content."""

    memory: object
    entries: tuple[Entry, ...]

    def tensors(self) -> list:
        """(name, torch tensor) views of the memory; an offset that torch cannot view is copied."""
        import torch

        if not self.entries:
            return []
        base = self.memory if isinstance(self.memory, torch.Tensor) else torch.frombuffer(self.memory, dtype=torch.uint8)
        named = []
        for name, offset, shape, dtype in self.entries:
            piece = base[offset : offset + prod(shape) * dtype.itemsize]
            if (piece.storage_offset() + piece.untyped_storage().data_ptr()) % dtype.itemsize:
                piece = piece.clone()
            named.append((name, piece.view(getattr(torch, dtype.name)).view(shape)))
        return named


class TableCache:
    """What tables of earlier updates meant, by their bytes: a sender that packs the same way again sends the same tables.

    Forgets everything when more than `bytes_max` of messages are held. One thread at a time.
    """

    def __init__(self, bytes_max: int = 64 << 20):
        self._bytes_max = bytes_max
        self._bytes = 0
        self._tables: dict[tuple[bytes, int], object] = {}

    def get(self, message: bytes, memory_bytes: int, read: Callable[[bytes, int], tuple[object, bool]]) -> object:
        """The meaning of `message`; `read` makes it and says whether it may be kept."""
        known = self._tables.get((message, memory_bytes))
        if known is not None:
            return known
        meaning, keep = read(message, memory_bytes)
        if keep and len(message) <= self._bytes_max:
            if self._bytes + len(message) > self._bytes_max:
                self._tables.clear()
                self._bytes = 0
            self._tables[message, memory_bytes] = meaning
            self._bytes += len(message)
        return meaning


class BucketWriter:
    """Packs host tensors into the halves of a buffer in turn, so that one half is filled while the peer reads the other.

    `may_write` is called before a byte goes to memory that the peer may still read (which never happens between halves, as long as
    `full` waits for the answer to the bucket before it hands over the next one); `full` gets the table of every bucket that
    is complete, a list of dicts {name, shape, dtype, offset}, offsets from the buffer's begin. A tensor that no half holds takes the
    whole buffer; one that the buffer does not hold goes to `oversized`, or is refused where that is None. Tensors are copied before
    `put` returns. What this wire cannot carry is headrace.InvalidArgument, a tensor of a device headrace.Unsupported.
    """

    def __init__(
        self,
        memory: object,
        alignment: int,
        may_write: Callable[[], None],
        full: Callable[[list[dict]], None],
        oversized: Callable[[str, object], None] | None = None,
    ):
        import torch

        self._buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._buffer.data_ptr()
        self._alignment = alignment
        self._may_write = may_write
        self._full = full
        self._oversized = oversized
        # Halves begin at multiples of 256 bytes: a view of any dtype is aligned wherever its offset in the half is.
        self._half = self._buffer.numel() // 2 // 256 * 256
        self._begin = 0
        self._end = self._half
        self._at = 0
        self._whole = False
        self._metas: list[dict] = []
        self._names: set[str] = set()

    def put(self, name: str, tensor: object) -> None:
        """Adds one tensor; may call `full`, `may_write` and `oversized`."""
        if not tensor.is_cpu:
            raise Unsupported(f"{name} is on {tensor.device}: this version sends tensors of host memory only", name=name)
        if tensor.is_neg() or tensor.is_conj():
            # Memory is copied, and torch computes as it reads from there.
            tensor = tensor.resolve_neg().resolve_conj()
        if tensor.nbytes and not tensor.data_ptr():
            raise InvalidArgument(f"{name} has no memory: a wrapper, a fake, or a tensor whose storage was given back", name=name)
        if name in self._names:
            raise InvalidArgument(f"{name} came twice in one update", name=name)
        self._names.add(name)
        size = tensor.nbytes
        alignment = max(self._alignment, tensor.element_size())
        at = (self._at + alignment - 1) // alignment * alignment
        if at + size > self._end or self._whole:
            self.flush()
            if size > self._half:
                if size > self._buffer.numel():
                    self._send_oversized(name, tensor)
                    return
                self._take_whole()
            at = self._at
        self._copy(tensor, at, size)
        self._metas.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": at})
        self._at = at + size

    def take(self) -> list[dict]:
        """The table of the bucket that is not complete, and an end to it: the last one of an update."""
        metas, self._metas = self._metas, []
        return metas

    def flush(self) -> None:
        """Completes the current bucket, if anything is in it, and goes on in the other half."""
        if not self._metas:
            return
        self._full(self.take())
        if self._whole:
            # The peer reads all of it; whichever half comes next, `may_write` has to come first.
            self._whole = False
            self._may_write()
            self._begin = 0
        else:
            self._begin = self._half - self._begin
        self._end = self._begin + self._half
        self._at = self._begin

    def _take_whole(self) -> None:
        self._may_write()
        self._whole = True
        self._begin = self._at = 0
        self._end = self._buffer.numel()

    def _send_oversized(self, name: str, tensor: object) -> None:
        if self._oversized is None:
            raise InvalidArgument(f"{name} has {tensor.nbytes} bytes, a bucket holds {self._buffer.numel()}", name=name)
        self._oversized(name, tensor)

    def _copy(self, tensor: object, at: int, size: int) -> None:
        if tensor.is_contiguous():
            ctypes.memmove(self._address + at, tensor.data_ptr(), size)
        else:
            self._buffer[at : at + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
