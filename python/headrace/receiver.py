"""The engine's end of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from . import _core, _open_ends
from .errors import InvalidArgument
from .views import View

TYPE_CHECKING = False  # what typing calls so; importing that takes its time
if TYPE_CHECKING:
    from asyncio import Future
    from typing import Any, Self

    from .records import Fingerprint, Hooks, Receipt, Status


_PLAIN = ("quiescent", "locate", "expert_map", "launch_constants", "derive", "finish_tables", "committed")


def _lend(hook: Callable, groups: Mapping[str, tuple[list, list]]) -> Callable:
    """The caller's hook with views instead of bare bytes."""

    def call(group: str, inputs: list, work, outputs: list) -> None:
        entries, written = groups[group]
        hook(
            group,
            [View(*entry, lease) for entry, lease in zip(entries, inputs, strict=True)],
            memoryview(work),
            [View(*output, lease) for output, lease in zip(written, outputs, strict=True)],
        )

    return call


class Update:
    """A plain update, which the engine feeds itself. As a context manager: an exception inside gives it up, else it is finished."""

    def __init__(self, receiver: Receiver, version: str) -> None:
        self._receiver = receiver
        self.version = version
        self.receipt: Receipt | None = None

    def __enter__(self) -> Self:
        self._receiver._core.begin(self.version)
        return self

    def load(self, tensors: Iterable[tuple[str, Any]] | Mapping[str, Any] | _core.Bucket) -> None:
        """Writes whole tensors into live storage: pairs of name and tensor, or a Bucket. Returns when their bytes are in place and may be
        reused. A call is checked before its own first byte, an iterable in batches of at most 4096 tensors; until it returns what the
        iterable gave must stay as it is. Row-major tensors are read where they are, others are packed first. Members of a staged group that
        are not all there are kept until a later call brings the others."""
        if isinstance(tensors, _core.Bucket):
            self._receiver._core.load_bucket(tensors)
        else:
            self._receiver._core.load(tensors.items() if isinstance(tensors, Mapping) else tensors)

    def finish(self) -> Receipt:
        """Checks that all is there, runs the hooks, publishes the version. Called at the end of the `with`, unless it was before."""
        if self.receipt is None:
            self.receipt = self._receiver._core.finish()
        return self.receipt

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finish()
        elif self.receipt is None and not self._receiver.closed:
            try:
                self._receiver._core.abort(f"{kind.__name__}: {error}")
            except _core_error():
                pass  # it has failed before, and says so in `error`


def _core_error() -> type[Exception]:
    from .errors import Error

    return Error


def _settle(answer: Future, receipt: Receipt | None, error: BaseException | None) -> None:
    if answer.done():  # its task was cancelled
        return
    if error is None:
        answer.set_result(receipt)
    else:
        answer.set_exception(error)


class Receiver:
    """A rank's end of updates: takes buckets from senders, and tensors from its own engine, into live storage, in place and proven.

    It serves on threads of its own from here on until close(), which `with` calls, and the end of the interpreter.

    table: the live storage. layout: where checkpoint tensors land in it; None: every storage is a tensor of its own name.
    job, engine, rank, ranks: who this is. endpoint: None for the run directory, or "tcp://127.0.0.1:PORT". threads: that copy
        and fingerprint; 0: one for each processor, up to 4.
    optional_names: fnmatch patterns of checkpoint tensors that an update need not bring. deadline_ms: without progress; 0: the default.
    """

    def __init__(
        self,
        table: _core.StorageTable,
        layout: _core.Layout | None = None,
        *,
        job: str,
        engine: str = "engine-0",
        rank: int = 0,
        ranks: int = 1,
        endpoint: str | None = None,
        threads: int = 1,
        hooks: Hooks | None = None,
        optional_names: Sequence[str] = (),
        data_paths: Sequence[str] = ("shm", "inline"),
        credits: int = 2,
        bucket_bytes_max: int = 0,
        deadline_ms: int = 0,
    ) -> None:
        if hooks is None:
            from .records import Hooks

            hooks = Hooks()
        for name, hook in [*((name, getattr(hooks, name)) for name in _PLAIN), *hooks.staged.items()]:
            if hook is not None and not callable(hook):
                raise InvalidArgument(f"hook {name}: {hook!r} cannot be called", name=name)
        layout = layout if layout is not None else _core.Layout.identity(table)
        groups = layout.group_shapes if hooks.staged else {}
        self.job = job
        self.engine = engine
        self.rank = rank
        self.table = table
        self.layout = layout
        self._core = _core.Receiver(
            table,
            layout,
            job=job,
            engine=engine,
            rank=rank,
            ranks=ranks,
            endpoint=endpoint or "",
            threads=threads,
            data_paths=list(data_paths),
            credits=credits,
            bucket_bytes_max=bucket_bytes_max,
            deadline_ms=deadline_ms,
            optional_names=list(optional_names),
            hooks={name: getattr(hooks, name) for name in _PLAIN if getattr(hooks, name) is not None},
            staged={name: _lend(hook, groups) for name, hook in hooks.staged.items()},
        )
        _open_ends.add(self)

    @property
    def endpoint(self) -> str:
        """Where senders find it."""
        return self._core.endpoint

    @property
    def closed(self) -> bool:
        return self._core.closed

    def update(self, version: str) -> Update:
        """A plain update to `version`, RUN/STEP: `with receiver.update("run/7") as update: update.load(tensors)`."""
        return Update(self, version)

    async def load_async(self, version: str, tensors: Iterable[tuple[str, Any]] | Mapping[str, Any] | _core.Bucket) -> Receipt:
        """A whole plain update without holding up the event loop."""

        def whole() -> Receipt:
            with self.update(version) as update:
                update.load(tensors)
            return update.receipt

        import asyncio

        return await asyncio.to_thread(whole)

    def mark(self) -> int:
        """A place in the row of updates that end here, for wait_for(): before the next one."""
        return self._core.mark()

    def wait_for(self, version: str, *, since: int | None = None, deadline_ms: int = 0) -> Receipt:
        """Returns when senders have brought `version`, RUN/STEP, and it is committed here: at once where it is held already, otherwise
        after the committed hook.

        since: a mark() from before anybody could begin, so that no update is missed that ended meanwhile; None: from the call. The first
        one to this version since then decides. deadline_ms: without a sign of progress, which are the call and each step of an update to
        this version; 0: the receiver's. Any number of threads may wait. Raises FailedPrecondition when that update failed, was refused, or
        is in doubt, with what the failure says of where; DeadlineExceeded; Cancelled when the receiver is closed. Refused in a hook.
        """
        return self._core.wait_for(version, since, deadline_ms, _core.Stop())

    async def wait_for_async(self, version: str, *, since: int | None = None, deadline_ms: int = 0) -> Receipt:
        """wait_for() without holding up the event loop, nor a thread of its executor. A cancelled task ends the wait."""
        import asyncio

        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        stop = _core.Stop()

        def tell(receipt: Receipt | None, error: BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(_settle, answer, receipt, error)
            except RuntimeError:
                pass  # the loop is closed, and nobody waits any more

        def wait() -> None:
            try:
                receipt = self._core.wait_for(version, since, deadline_ms, stop)
            except BaseException as error:
                tell(None, error)
            else:
                tell(receipt, None)

        _open_ends.start_wait(wait)
        try:
            return await answer
        finally:
            stop.ask()

    def status(self) -> Status:
        return self._core.status()

    def serving_version(self) -> str | None:
        """The version that the engine serves: that of this rank while the guard of its engine is open, so while all ranks of the engine
        hold it, committed. None otherwise: nothing came yet, an update is being written, or a rank is torn."""
        status = self._core.status()
        return status.version if status.serving else None

    def fingerprint(self) -> dict[str, Fingerprint]:
        """Of every checkpoint tensor that this rank holds a part of, read from live storage."""
        return self._core.fingerprint()

    def notify(self, event: str) -> None:
        """Tells of what the engine does with its weights outside an update: sleep, discard, expert_rebalance, lora_load, foreign_reload or
        recapture."""
        self._core.notify(event)

    def close(self) -> None:
        """Stops listening and ends all threads; what other threads are waiting for here ends with Cancelled. Senders of an open session see
        a lost peer. Refused in a hook."""
        self._core.close()
        _open_ends.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()
