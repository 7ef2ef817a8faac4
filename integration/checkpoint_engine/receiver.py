"""The worker's end of checkpoint-engine's wire: one REP socket, a buffer of two buckets, tables, and two times None.

| message | answer |
|---|---|
| handle of the buffer: (function, arguments) | empty, or the error's text |
| table: list of {name, shape, dtype, offset} | empty once the tensors are taken, or the error's text |
| RuntimeError | none: the server has given up |
| None, the first | empty once the buffer is let go |
| None, the second | empty once the post hook has run, or the error's text |

The stock loop waits without a limit, loses an error of the last bucket (the server does not read that answer) and leaves the server
waiting when the post hook raises. This one has a deadline on every wait, answers always, and raises at the end whatever went wrong.
"""

import traceback
from collections.abc import Callable, Mapping

import zmq
from headrace.errors import Unsupported

from ..buckets import Bucket, TableCache, entry_of
from ..host_memory import attach
from ..peer_socket import PeerFailed, PeerSocket
from ..unpickle import Constructor, Reference, RefusedPickle, loads, short

__all__ = ["receive_into", "serve", "update_weights_from_ipc"]

# Opens the buffer that a handle names: gets the handle's arguments, returns memory with a writable buffer.
Opener = Callable[[tuple], object]

_OUR_BUFFER = "headrace.integration.host_memory.open_tensor"
_CUDA_BUFFER = "torch.multiprocessing.reductions.rebuild_cuda_tensor"


class _Given(RuntimeError):
    """The server's own exception, as read from the wire."""


class _Table(tuple):
    """The checked entries of a bucket."""


def _given(arguments: tuple) -> _Given:
    return _Given(*(argument if type(argument) is str else short(argument) for argument in arguments))


def _open_ours(arguments: tuple) -> object:
    if len(arguments) < 2:
        raise RefusedPickle(f"a buffer's handle with {len(arguments)} arguments")
    return attach(arguments[0], arguments[1])


def _open_cuda(_arguments: tuple) -> object:
    raise Unsupported("the server's buffer is CUDA memory: this version receives into host memory only, use the stock worker")


_OPENERS: Mapping[str, Opener] = {_OUR_BUFFER: _open_ours, _CUDA_BUFFER: _open_cuda}
_BASE_ALLOWED: Mapping[str, object] = {
    "builtins.RuntimeError": Constructor("builtins.RuntimeError", _given),
    **{name: Reference(name) for name in ("torch.Tensor", "torch.storage.UntypedStorage")},
}


def update_weights_from_ipc(
    zmq_ctx: zmq.Context,
    zmq_handle: str,
    device_id: int,
    *,
    run: Callable[[list[tuple[str, object]]], None],
    post_hook: Callable[[], None] | None = None,
    wait_s: float = 600.0,
    openers: Mapping[str, Opener] | None = None,
) -> None:
    """checkpoint_engine.worker.update_weights_from_ipc with deadlines: `run` gets (name, torch view) of every bucket.

    The views are valid until `run` returns. `device_id` is accepted for the signature's sake: the buffer is host memory.
    """
    del device_id
    serve(zmq_ctx, zmq_handle, on_bucket=lambda bucket: run(bucket.tensors()), post_hook=post_hook, wait_s=wait_s, openers=openers)


def receive_into(
    receiver: object,
    version: str,
    zmq_ctx: zmq.Context,
    zmq_handle: str,
    *,
    post_hook: Callable[[], None] | None = None,
    wait_s: float = 600.0,
    openers: Mapping[str, Opener] | None = None,
    cache: TableCache | None = None,
) -> object:
    """One update of a headrace.Receiver from a parameter server; returns its receipt.

    Nothing is committed before the last bucket is taken; the post hook runs after the commit. An error of the stream, of the receiver
    or of the server aborts the update.
    """
    import headrace

    update = receiver.update(version)
    entered = update.__enter__()
    state = {"open": True}

    def load(bucket: Bucket) -> None:
        entered.load(headrace.Bucket(bucket.memory, bucket.entries))

    def commit() -> None:
        state["open"] = False
        update.__exit__(None, None, None)

    def committed() -> None:
        if post_hook is not None:
            post_hook()

    try:
        serve(
            zmq_ctx,
            zmq_handle,
            on_bucket=load,
            on_release=commit,
            post_hook=committed,
            wait_s=wait_s,
            openers=openers,
            cache=cache,
        )
    except BaseException as error:
        if state["open"]:
            update.__exit__(type(error), error, error.__traceback__)
        raise
    return entered.receipt


def serve(
    zmq_ctx: zmq.Context,
    zmq_handle: str,
    *,
    on_bucket: Callable[[Bucket], None],
    on_release: Callable[[], None] | None = None,
    post_hook: Callable[[], None] | None = None,
    wait_s: float = 600.0,
    openers: Mapping[str, Opener] | None = None,
    cache: TableCache | None = None,
) -> None:
    """One update from the parameter server at `zmq_handle`; returns when its last message is answered.

    `on_bucket` takes each bucket's tensors and must be done with them when it returns. `on_release` runs before the answer to the first
    None, when all buckets were taken; `post_hook` before the answer to the second. `openers` adds functions that a handle may name, by
    their full name. `wait_s` bounds each wait for the server. Raises the first error of a callback or of the stream, after the server
    has its answer; PeerFailed when the server gave up, PeerTimeout, PeerGone.
    """
    known = {**_OPENERS, **(openers or {})}
    allowed = {**_BASE_ALLOWED, **{name: Reference(name) for name in known}}
    with PeerSocket(zmq_ctx, zmq.REP, zmq_handle, wait_s) as peer:
        _Session(peer, known, allowed, cache or TableCache(0)).run(on_bucket, on_release, post_hook)


class _Session:
    """One update; used once."""

    def __init__(self, peer: PeerSocket, openers: Mapping[str, Opener], allowed: Mapping[str, object], cache: TableCache):
        self._peer = peer
        self._openers = openers
        self._allowed = allowed
        self._cache = cache
        self._failure: Exception | None = None
        self._memory: object = None
        self._memory_bytes = 0

    def run(
        self,
        on_bucket: Callable[[Bucket], None],
        on_release: Callable[[], None] | None,
        post_hook: Callable[[], None] | None,
    ) -> None:
        message = self._peer.receive("the handle of the buffer")
        self._answer(lambda: self._open(message))
        while True:
            message = self._peer.receive("a bucket's table")
            payload = self._read(message)
            if payload is None:
                self._memory = None
                self._answer(on_release)
                break
            if isinstance(payload, _Given):
                raise PeerFailed(f"the parameter server gave up: {payload}") from self._failure
            self._answer(lambda entries=payload: on_bucket(Bucket(self._memory, self._entries(entries))))
        last = self._read(self._peer.receive("the second None"))
        self._answer(post_hook if last is None else lambda: self._unexpected(last))
        if self._failure is not None:
            raise self._failure

    def _read(self, message: bytes) -> object:
        """What a message says, an exception of ours where it cannot be read: to be answered in its turn."""
        try:
            return self._cache.get(message, self._memory_bytes, self._table)
        except RefusedPickle as error:
            return error

    def _table(self, message: bytes, memory_bytes: int) -> tuple[object, bool]:
        payload = loads(message, self._allowed)
        if type(payload) is list:
            return _Table(entry_of(meta, memory_bytes) for meta in payload), True
        return payload, False

    @staticmethod
    def _unexpected(payload: object) -> None:
        if isinstance(payload, Exception):
            raise payload
        raise RefusedPickle(f"a {type(payload).__name__} where a table or None is expected")

    def _entries(self, payload: object) -> _Table:
        if type(payload) is not _Table:
            self._unexpected(payload)
        return payload

    def _open(self, message: bytes) -> None:
        handle = loads(message, self._allowed)
        if type(handle) is not tuple or len(handle) != 2 or type(handle[0]) is not Reference or type(handle[1]) is not tuple:
            raise RefusedPickle("the first message is no handle (function, arguments)")
        opener = self._openers.get(handle[0].qualified_name)
        if opener is None:
            raise RefusedPickle(f"a buffer cannot be opened with {handle[0].qualified_name}")
        self._memory = opener(handle[1])
        self._memory_bytes = memoryview(self._memory).nbytes if not hasattr(self._memory, "nbytes") else self._memory.nbytes

    def _answer(self, work: Callable[[], None] | None) -> None:
        """Does one step unless one has failed, and answers. The first failure sticks."""
        if self._failure is None and work is not None:
            try:
                work()
            except Exception as error:  # the server and the caller get it
                self._failure = error
            except BaseException as error:
                self._peer.send(_text(error), "which waits for an answer")
                raise
        self._peer.send(b"" if self._failure is None else _text(self._failure), "which waits for an answer")


def _text(error: BaseException) -> bytes:
    return "".join(traceback.format_exception(error)).encode("utf-8", "replace")
