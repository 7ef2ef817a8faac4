"""verl's bucket wire between a trainer's adapter and an engine's worker on the same host, both ends, for host memory.

| message | answer |
|---|---|
| {"name", "size"}: the shared segment | empty |
| {"bucket_meta": {name: {name, shape, dtype, offset, handle}}, "is_last"} | empty once the tensors are taken |

There is no error in this wire, no deadline and no version: a stock sender that gets no answer waits for ever. So the receiver here
answers every message whatever happens, takes nothing more after the first error, and raises when the stream has ended.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple, Self

import zmq
from headrace.errors import Unsupported

from ..buckets import Bucket, BucketWriter, Entry, TableCache, entry_of
from ..host_memory import Segment, attach, tensor_handle
from ..peer_socket import PeerFailed, PeerGone, PeerSocket, PeerTimeout, Stop
from ..unpickle import DTYPES, Reference, RefusedPickle, loads

__all__ = ["BucketFan", "BucketReceiver", "BucketSender", "BucketStream"]

_OUR_TENSOR = "headrace.integration.host_memory.open_tensor"
_CUDA_TENSOR = "torch.multiprocessing.reductions.rebuild_cuda_tensor"
_ALLOWED = {name: Reference(name) for name in (_OUR_TENSOR, _CUDA_TENSOR, "torch.Tensor", "torch.storage.UntypedStorage")}


class BucketReceiver:
    """Takes one update after the other from the sender that binds `handle`. One thread at a time.

    `wait_s` bounds each wait for the sender, and `stop` ends it. Tables that come again are known from the update before.
    """

    def __init__(
        self,
        handle: str,
        wait_s: float = 600.0,
        context: zmq.Context | None = None,
        cache: TableCache | None = None,
        stop: Stop | None = None,
    ):
        self._handle = handle
        self._wait_s = wait_s
        self._stop = stop
        self._context = context or zmq.Context.instance()
        self._cache = cache or TableCache()

    def receive(self, on_bucket: Callable[[Bucket, bool], None]) -> None:
        """One update: `on_bucket(bucket, is_last)` for every bucket, in order; the last one may be empty.

        A tensor with a segment of its own comes as a bucket of its own. The bucket's memory may be used until `on_bucket` returns. The
        last answer is sent when the segment is let go. Raises the first error of `on_bucket` or of the stream after the sender has had
        its answers; PeerTimeout and PeerGone when the sender ends early.
        """
        with PeerSocket(self._context, zmq.REP, self._handle, self._wait_s, self._stop) as peer:
            _Session(peer, self._cache).run(on_bucket)


class _Message(NamedTuple):
    entries: tuple[Entry, ...]
    handles: tuple[tuple[str, tuple], ...]
    is_last: bool


class _Session:
    """One update; used once."""

    def __init__(self, peer: PeerSocket, cache: TableCache):
        self._peer = peer
        self._cache = cache
        self._failure: Exception | None = None
        self._memory: object = None
        self._memory_bytes = 0

    def run(self, on_bucket: Callable[[Bucket, bool], None]) -> None:
        first = self._peer.receive("the name of the shared segment")
        self._try(lambda: self._open(first))
        last = False
        while not last:
            self._peer.send(b"", "which waits for an answer")
            try:
                message = self._peer.receive("a bucket's table")
            except (PeerGone, PeerTimeout):
                if self._failure is not None:
                    raise self._failure from None
                raise
            last = self._take(message, on_bucket)
        # Answered last: the sender gives its memory back the moment it has this answer.
        self._memory = None
        self._peer.send(b"", "which waits for an answer")
        if self._failure is not None:
            raise self._failure

    def _try(self, work: Callable[[], None]) -> None:
        """Does one step unless one has failed. The first failure sticks; what is no Exception ends the update, answered."""
        if self._failure is not None:
            return
        try:
            work()
        except Exception as error:  # raised when the sender has its answers
            self._failure = error
        except BaseException:
            self._peer.send(b"", "which waits for an answer")
            raise

    def _open(self, data: bytes) -> None:
        segment = loads(data, _ALLOWED)
        if type(segment) is tuple:
            raise Unsupported("the sender's bucket is CUDA memory: this version receives into host memory only")
        if type(segment) is not dict or set(segment) != {"name", "size"}:
            raise RefusedPickle("the first message is no shared segment {name, size}")
        self._memory = attach(segment["name"], segment["size"])
        self._memory_bytes = segment["size"]

    def _take(self, data: bytes, on_bucket: Callable[[Bucket, bool], None]) -> bool:
        """Handles one table; true when it was the last."""
        try:
            message = self._cache.get(data, self._memory_bytes, _read_table)
        except RefusedPickle as error:
            self._failure = self._failure or error
            return False
        for name, handle in message.handles:
            self._try(lambda name=name, handle=handle: on_bucket(_bucket_of(name, handle), False))
        if message.entries or message.is_last:
            self._try(lambda: on_bucket(Bucket(self._memory, message.entries), message.is_last))
        return message.is_last


def _read_table(data: bytes, memory_bytes: int) -> tuple[_Message, bool]:
    payload = loads(data, _ALLOWED)
    if type(payload) is not dict or type(payload.get("bucket_meta")) is not dict or type(payload.get("is_last")) is not bool:
        raise RefusedPickle("a message that is no table {bucket_meta, is_last}")
    entries, handles = [], []
    for name, meta in payload["bucket_meta"].items():
        handle = meta.get("handle") if type(meta) is dict else None
        if handle is None:
            entries.append(entry_of(meta, memory_bytes)._replace(name=name))
        else:
            handles.append((name, handle))
    return _Message(tuple(entries), tuple(handles), payload["is_last"]), not handles


def _bucket_of(name: str, handle: object) -> Bucket:
    """The bucket of a tensor that came with a segment of its own."""
    if type(handle) is not tuple or len(handle) != 2 or type(handle[0]) is not Reference or type(handle[1]) is not tuple:
        raise RefusedPickle(f"{name}: its handle is no (function, arguments)")
    function, arguments = handle
    if function.qualified_name == _CUDA_TENSOR:
        raise Unsupported(f"{name} is CUDA memory: this version receives into host memory only")
    if function.qualified_name != _OUR_TENSOR or len(arguments) < 4 or type(arguments[2]) is not str:
        raise RefusedPickle(f"{name}: a tensor cannot be opened with {function.qualified_name}")
    segment, size, dtype, shape = arguments[:4]
    meta = {"name": name, "offset": 0, "shape": shape, "dtype": DTYPES.get(f"torch.{dtype}")}
    entry = entry_of(meta, size if type(size) is int else 0)
    return Bucket(attach(segment, size), (entry,))


class BucketSender:
    """Sends one update after the other to the receiver that connects to `handle`, stock or ours. One thread at a time.

    Half of the bucket is filled while the receiver takes the other half. A tensor that the bucket does not hold gets a segment of its
    own (a stock receiver must then be able to import headrace.integration.host_memory). Segments lose their names as soon as the
    receiver has opened them. `wait_s` bounds each wait for the receiver.
    """

    def __init__(self, handle: str, bucket_bytes: int = 512 << 20, wait_s: float = 600.0, context: zmq.Context | None = None):
        if bucket_bytes < 512:
            raise ValueError(f"a bucket of {bucket_bytes} bytes, at least 512 are needed")
        self._handle = handle
        self._bucket_bytes = bucket_bytes
        self._wait_s = wait_s
        self._context = context or zmq.Context.instance()

    def send(self, weights: Iterable[tuple[str, object]]) -> None:
        """One update from (name, torch tensor of host memory). Returns when the receiver has answered the last bucket."""
        import torch

        with self._update() as update, torch.no_grad():
            update.begin()
            for name, tensor in weights:
                update.writer.put(name, tensor)
            update.finish()

    async def async_send_weights(self, weights: Iterable | AsyncIterable) -> None:
        """`send` with the name and the habits of verl's sender: also async iterables; waits for the receiver block the loop."""
        import torch

        if not hasattr(weights, "__aiter__"):
            self.send(weights)
            return
        with self._update() as update, torch.no_grad():
            update.begin()
            async for name, tensor in weights:
                update.writer.put(name, tensor)
            update.finish()

    def _update(self) -> _Update:
        return _Update(self._context, self._handle, self._bucket_bytes, self._wait_s)


class _Update:
    """One update of a sender: a socket and a segment, let go at its end."""

    def __init__(self, context: zmq.Context, handle: str, bucket_bytes: int, wait_s: float):
        self._segment = Segment(bucket_bytes, "verl_weights")
        try:
            self._peer = PeerSocket(context, zmq.REQ, handle, wait_s)
        except BaseException:
            self._segment.unlink()
            raise
        self.writer = BucketWriter(
            self._segment.memory, 1, may_write=self._settle, full=lambda metas: self._send_table(metas, False), oversized=self._oversized
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._segment.unlink()
        self._peer.__exit__(*error)

    def begin(self) -> None:
        self._send({"name": self._segment.name, "size": self._segment.size})
        self._settle()
        self._segment.unlink()

    def finish(self) -> None:
        self._send_table(self.writer.take(), True)
        self._settle()

    def _send_table(self, metas: list[dict], is_last: bool, handle: object = None) -> None:
        self._settle()
        self._send({"bucket_meta": {meta["name"]: {**meta, "handle": handle} for meta in metas}, "is_last": is_last})

    def _oversized(self, name: str, tensor: object) -> None:
        import torch

        segment = Segment(tensor.nbytes, "verl_weights")
        try:
            torch.frombuffer(segment.memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            dtype = str(tensor.dtype).removeprefix("torch.")
            meta = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": 0}
            self._send_table([meta], False, tensor_handle(segment, tensor.nbytes, dtype, tensor.shape))
            self._settle()
        finally:
            segment.unlink()

    def _send(self, payload: object) -> None:
        self._peer.send(pickle.dumps(payload, 4), "although an update is waiting for it")

    def _settle(self) -> None:
        if answer := self._peer.settle():
            raise PeerFailed(f"verl's wire knows empty answers only: {answer[:200]!r}")


class BucketFan:
    """One update to several receivers at once, each at its own handle; what BucketSender says holds for each. A context manager."""

    def __init__(self, handles: Iterable[str], bucket_bytes: int, wait_s: float = 600.0, context: zmq.Context | None = None):
        self._stack = ExitStack()
        with ExitStack() as made:
            context = context or zmq.Context.instance()
            self._updates = [made.enter_context(_Update(context, handle, bucket_bytes, wait_s)) for handle in handles]
            self._stack = made.pop_all()

    def __enter__(self) -> Self:
        for update in self._updates:
            update.begin()
        return self

    def put(self, name: str, tensor: object) -> None:
        for update in self._updates:
            update.writer.put(name, tensor)

    def finish(self) -> None:
        """Sends the last buckets; returns when all receivers have answered."""
        for update in self._updates:
            update.finish()

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)


class BucketStream:
    """One update of a BucketReceiver as an asynchronous iterator of (name, torch view); a view is valid until the next one is asked for.

    The sender gets its answer to a bucket when the first tensor of the next one is asked for. Leaving the iteration early lets the sender
    run to its end without taking anything.
    """

    def __init__(self, handle: str, wait_s: float = 600.0, context: zmq.Context | None = None, stop: Stop | None = None):
        self._receiver = BucketReceiver(handle, wait_s, context, stop=stop)
        self._buckets: queue.SimpleQueue = queue.SimpleQueue()
        self._taken: queue.SimpleQueue[bool] = queue.SimpleQueue()

    async def __aiter__(self) -> AsyncIterator[tuple[str, object]]:
        threading.Thread(target=self._receive, name="headrace-buckets", daemon=True).start()
        try:
            while (bucket := await asyncio.to_thread(self._buckets.get)) is not None:
                if isinstance(bucket, BaseException):
                    raise bucket
                for named in bucket.tensors():
                    yield named
                bucket = named = None
                self._taken.put(True)
        finally:
            self._taken.put(False)

    def _receive(self) -> None:
        try:
            self._receiver.receive(self._hand_over)
        except BaseException as error:
            self._buckets.put(error)
        else:
            self._buckets.put(None)

    def _hand_over(self, bucket: Bucket, is_last: bool) -> None:
        self._buckets.put(bucket)
        if not self._taken.get():
            raise ConnectionAbortedError("nobody takes the weights any more")
