"""The trainer's end of an update."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from . import _core, _open_ends
from .errors import InvalidArgument

TYPE_CHECKING = False  # what typing calls so; importing that takes its time
if TYPE_CHECKING:
    from typing import Any, Self

    from .records import ReceiverInfo, Report

_BATCH_TENSORS = 1024
_BATCH_BYTES = 256 << 20


class _Source:
    """What an update is made of, and a way through its tensors.

    A mapping, a sequence or an iterable of (name, tensor) is held as a whole. A callable that gives a fresh iterable is asked twice, first
    for names and shapes only; what has `metadata` ([(name, dtype, shape)]) and can be iterated is gone through once. In place of a tensor
    there may be a Part. What `wants_value` says of is kept until the update is open: `metadata` has its tensor behind the box.
    """

    def __init__(self, source: Any) -> None:
        self.held: list[tuple[str, Any]] | None = None
        self.has_metadata = hasattr(source, "metadata")
        if self.has_metadata:
            self._metadata = source.metadata
            self.stream: Callable[[], Iterable] = lambda: source
        elif callable(source):
            self.stream = source
        else:
            self.held = list(source.items() if isinstance(source, Mapping) else source)
            self.stream = lambda: self.held

    def entries(self) -> Iterable:
        """What the update is opened with: metadata, or pairs of name and tensor."""
        if self.has_metadata:
            return self._metadata() if callable(self._metadata) else self._metadata
        return self.stream()

    def tensors(self, order: Callable[[], list[int]]) -> Iterable[tuple[str, Any]]:
        """Those that are held come in the order that keeps staged groups together."""
        return self.stream() if self.held is None else (self.held[i] for i in order())


class _Progress:
    """One line on standard error, on a terminal, for what takes over a second."""

    def __init__(self, what: str, total: int) -> None:
        self.what = what
        self.total = total
        self.begin = self.last = time.monotonic()
        self.shown = False
        self.on = sys.stderr is not None and sys.stderr.isatty()

    def update(self, done: int) -> None:
        now = time.monotonic()
        if not self.on or now - self.begin < 1 or now - self.last < 0.1:
            return
        self.last = now
        rate = done / (now - self.begin)
        text = f"{self.what} {done / 1e9:.2f}"
        if self.total:
            text += f" of {self.total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, {max(self.total - done, 0) / max(rate, 1):.0f} s left"
        else:
            text += f" GB, {rate / 1e9:.2f} GB/s"
        self.shown = True
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    def end(self) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class SenderUpdate:
    """An update. As a context manager: it is open inside the `with`; at its end what the source still has is sent and the update is
    finished, or given up when there was an exception."""

    def __init__(self, sender: Sender, version: str, source: _Source, options: dict, progress: bool) -> None:
        self._sender = sender
        self._source = source
        self._options = options
        self._progress = progress
        self._sent = False
        self._total = 0
        self.version = version
        self.report: Report | None = None

    def __enter__(self) -> Self:
        self._total = self._sender._core.open(self.version, self._source.entries(), metadata=self._source.has_metadata, **self._options)
        return self

    def add(self, tensors: Iterable[tuple[str, Any]], *, batch_tensors: int = _BATCH_TENSORS, batch_bytes: int = _BATCH_BYTES) -> int:
        """Sends these tensors oneself, instead of leaving it to the source; bytes sent. Their bytes may be reused when it returns. What is
        iterated gives each tensor memory of its own: up to `batch_tensors` and `batch_bytes` are held, and half of them are sent while the
        other half is asked for. With `batch_tensors` 1 each is sent before the next one is asked for."""
        for name, value in (("batch_tensors", batch_tensors), ("batch_bytes", batch_bytes)):
            if value < 1:
                raise InvalidArgument(f"{name}: expected at least 1, not {value}", name=name)
        self._sent = True
        return self._sender._core.add(tensors, batch_tensors, batch_bytes, None)

    def send(self) -> None:
        """Sends all tensors of the source. Called at the end of the `with`, unless it or add() was before."""
        self._sent = True
        core = self._sender._core
        progress = _Progress(f"sending {self.version}", self._total) if self._progress else None
        try:
            core.add(self._source.tensors(core.order), _BATCH_TENSORS, _BATCH_BYTES, progress and progress.update)
        finally:
            if progress:
                progress.end()

    def finish(self) -> Report:
        """Returns when every rank has committed the version."""
        if self.report is None:
            if not self._sent:
                self.send()
            self.report = self._sender._core.finish()
        return self.report

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            try:
                self.finish()
            except BaseException as raised:
                self._sender._abort(raised)
                raise
        elif self.report is None:
            self._sender._abort(error)


class Sender:
    """A trainer process that is connected to the receivers of a job. Calls of several threads take turns, and are
    refused while another one, open or finish, waits for receivers; connect() makes it.

    Closed by close(), by `with`, and at the end of the interpreter.
    """

    def __init__(self, core: _core.Sender) -> None:
        self._core = core
        _open_ends.add(self)

    @classmethod
    def connect(
        cls,
        *,
        job: str,
        sender: str = "trainer-0",
        endpoints: Sequence[str] = (),
        data_path: str = "auto",
        bucket_bytes: int = 0,
        staging_buffers: int = 0,
        threads: int = 1,
        fingerprints: bool = True,
        connect_timeout_ms: int = 10_000,
        deadline_ms: int = 0,
    ) -> Sender:
        """Connects to the receivers of `job`: those at `endpoints`, or all that live in its run directory. sender: unique within the job.
        data_path: auto, shm or inline. 0 stands for the defaults. threads: that pack large tensors;
        0: one for each processor, up to 4."""
        from .records import Part

        return cls(
            _core.Sender(
                job=job,
                sender=sender,
                endpoints=list(endpoints),
                data_path=data_path,
                bucket_bytes=bucket_bytes,
                staging_buffers=staging_buffers,
                threads=threads,
                fingerprints=fingerprints,
                connect_timeout_ms=connect_timeout_ms,
                deadline_ms=deadline_ms,
                part=Part,
            )
        )

    @property
    def receivers(self) -> tuple[ReceiverInfo, ...]:
        return self._core.receivers

    @property
    def closed(self) -> bool:
        return self._core.closed

    def wants_value(self, name: str) -> bool:
        """Whether a receiver must know what this tensor holds before it accepts an update: global scales and the like, of a few bytes."""
        return self._core.wants_value(name)

    def update(
        self,
        version: str,
        source: Any,
        *,
        senders: Sequence[str] = (),
        scopes: Sequence[str] = ("target",),
        overlap: str = "refuse",
        repair: bool = False,
        progress: bool = True,
    ) -> SenderUpdate:
        """An update to `version`, RUN/STEP, from `source`.

        source: a mapping or an iterable of (name, tensor); a callable that gives a fresh iterable of them each time, which is asked for
            names and shapes first, so that tensors need not all exist at once; or what has `metadata` ([(name, dtype, shape)]) and is
            iterated once. A Part stands for a part of a tensor. What is iterated gives each tensor memory of its own: up to 1024
            tensors or 256 MiB are held, and half of them are sent while the other half is asked for.
        senders: all senders of this update, the lead first; none: this one alone. overlap: refuse, or first_sender_owns for equal parts.
        repair: the connected ranks are brought up to what the others hold.
        """
        options = {"scopes": list(scopes), "senders": list(senders), "overlap": overlap, "repair": repair}
        return SenderUpdate(self, version, _Source(source), options, progress)

    def send(self, version: str, source: Any, **options: Any) -> Report:
        """A whole update; arguments as those of update()."""
        with self.update(version, source, **options) as update:
            pass
        return update.report

    async def send_async(self, version: str, source: Any, **options: Any) -> Report:
        """The same without holding up the event loop."""
        import asyncio

        return await asyncio.to_thread(lambda: self.send(version, source, **options))

    def resolve_in_doubt(self) -> Report:
        """After a lead was lost between PREPARED and COMMIT: finishes that session if every rank has it prepared or committed."""
        return self._core.resolve_in_doubt()

    def _abort(self, error: BaseException | None) -> None:
        if not self.closed:
            self._core.abort(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends the connections; an open update is given up, also that of another thread, with Cancelled."""
        self._core.close()
        _open_ends.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()
