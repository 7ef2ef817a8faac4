"""POSIX shared memory as the peers' wires use it: a segment in /dev/shm by name, mapped by both processes.

The standard library's SharedMemory registers every attached segment with a tracker that unlinks it at exit, also the segments of other
processes; so segments are opened here. A mapping lives as long as a view of it, whatever happened to the name or to the other process.
"""

import mmap
import os
import re
import uuid

from .unpickle import short

__all__ = ["Segment", "attach", "open_tensor"]

_FOLDER = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")


class Segment:
    """A new segment of `size` bytes, its memory reserved at once. The name goes when `unlink` is called, or with the object.

    One thread at a time.
    """

    def __init__(self, size: int, prefix: str = "headrace"):
        if size <= 0:
            raise ValueError(f"a shared segment of {size} bytes")
        self.name = f"{prefix}_{uuid.uuid4().hex}"
        self.size = size
        self._linked = False
        descriptor = os.open(_path(self.name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._linked = True
        try:
            # A full /dev/shm is an error here, and not a bus error at the first write.
            os.posix_fallocate(descriptor, 0, size)
            self.memory = mmap.mmap(descriptor, size)
        except OSError:
            self.unlink()
            raise
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Takes the name away; mappings stay. May be called again."""
        if self._linked:
            self._linked = False
            try:
                os.unlink(_path(self.name))
            except FileNotFoundError:
                pass

    def __del__(self) -> None:
        if getattr(self, "_linked", False):
            self.unlink()


def attach(name: str, size: int) -> mmap.mmap:
    """Maps `size` bytes of another process's segment, which must be at least that long. Raises ValueError, OSError."""
    descriptor = os.open(_path(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        there = os.fstat(descriptor).st_size
        if type(size) is not int or not 0 < size <= there:
            raise ValueError(f"shared segment {name}: {short(size)} bytes are announced, it has {there}")
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def open_tensor(name: str, size: int, dtype: str, shape: tuple, *_unused: object) -> object:
    """A torch tensor over another process's segment: what a handle of ours names, for a stock receiver to call.

    Stock receivers put their device's index into the seventh argument; here it has no meaning.
    """
    import torch

    return torch.frombuffer(attach(name, size), dtype=torch.uint8)[:size].view(getattr(torch, dtype)).view(shape)


def tensor_handle(segment: Segment, size: int, dtype: str, shape: tuple) -> tuple:
    """The handle of a tensor at the segment's begin: `open_tensor` and its arguments, as many as stock receivers expect."""
    return (open_tensor, (segment.name, size, dtype, tuple(shape), None, None, None))


def _path(name: str) -> str:
    if type(name) is not str or not _NAME.fullmatch(name):
        raise ValueError(f"{short(name)} is no name of a shared segment")
    return f"{_FOLDER}/{name}"
