"""One engine worker's end of updates under verl: a model bound to what a trainer brings, and the two ways in which an update comes.

Nothing here imports verl, vLLM or torch; the worker extension brings the model.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import headrace

from ..buckets import Bucket

__all__ = ["CONTROL", "Announcement", "BoundModel", "EngineSide", "Tensor", "dump_tensors"]

logger = logging.getLogger(__name__)

# The one tensor that a backend of ours puts into verl's wire in place of weights: what a trainer is about to send on a way of its own.
CONTROL = "__headrace_update__"

_LOOK_S = 0.005
# From the announcement to the engine worker's call through verl's servers.
_ARRIVAL_S = 60.0
# From the hook to the state that says so.
_OPENING_S = 2.0

# name, torch dtype's name, shape
Tensor = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Announcement:
    """An update that a trainer sends straight to the engine's workers. job: under which it looks for their receivers.

    tensors: a table of `dump_tensors`. It is the same from update to update, and large: kept as it was sent, and read where it is new.
    """

    job: str
    version: str
    wait_s: float
    tensors: bytes

    def dump(self) -> bytes:
        return json.dumps({"job": self.job, "version": self.version, "wait_s": self.wait_s}).encode() + b"\n" + self.tensors

    @classmethod
    def parse(cls, data: bytes) -> Announcement:
        """Raises headrace.InvalidArgument."""
        head, _, tensors = data.partition(b"\n")
        try:
            fields = json.loads(head)
            return cls(str(fields["job"]), str(fields["version"]), float(fields["wait_s"]), tensors)
        except (ValueError, KeyError, TypeError) as error:
            raise headrace.InvalidArgument(f"no announcement of an update: {type(error).__name__}: {error}") from error


def dump_tensors(tensors: tuple[Tensor, ...]) -> bytes:
    return json.dumps(tensors, separators=(",", ":")).encode()


def parse_tensors(data: bytes) -> tuple[Tensor, ...]:
    """Raises headrace.InvalidArgument."""
    try:
        return tuple((str(name), str(dtype), tuple(int(extent) for extent in shape)) for name, dtype, shape in json.loads(data))
    except (ValueError, TypeError) as error:
        raise headrace.InvalidArgument(f"no table of an update's tensors: {type(error).__name__}: {error}") from error


class BoundModel(Protocol):
    """A model whose storages a receiver writes."""

    receiver: headrace.Receiver

    def open(self) -> None:
        """From here to close_session no forward pass runs; storages are looked at again."""

    def close_session(self) -> None: ...

    def close(self) -> None:
        """Lets the model go."""

    def ways(self) -> Mapping[str, int]:
        """Checkpoint tensors by how they come: direct, leased, dropped."""


class EngineSide:
    """Binds the model to what a trainer brings, and again when that changes. Used by the worker's one thread.

    bind(job, tensors): makes the BoundModel, with quiescent() as its receiver's hook; raises headrace.Unsupported where a tensor has no
    way in. wait_s: bounds each wait for a trainer.
    """

    def __init__(self, bind: Callable[[str, tuple[Tensor, ...]], BoundModel], *, job: str, wait_s: float = 600.0) -> None:
        self._bind = bind
        self._job = job
        self._wait_s = wait_s
        self._model: BoundModel | None = None
        self._bound_to: tuple[str, bytes] | None = None
        self._refused: dict[bytes, headrace.Unsupported] = {}
        self._updates = 0
        # Set while the worker's thread is inside an update and so in no forward pass.
        self._still = threading.Event()
        self._asked: float | None = None
        self.receipt: headrace.Receipt | None = None

    @property
    def model(self) -> BoundModel | None:
        """What updates are written to, once one has been bound."""
        return self._model

    def learn(self, tensors: tuple[Tensor, ...]) -> None:
        """Binds the model to what another way has just brought. Raises headrace.Unsupported, the same again for the same tensors."""
        self._ensure(self._job, dump_tensors(tensors))

    def quiescent(self) -> bool:
        """For the receiver's hook, on a thread of its own. A trainer that knows its receivers from before may be here first: waits."""
        still = self._still.wait(min(self._wait_s, _ARRIVAL_S))
        self._asked = time.monotonic()
        return still

    def _enter(self, model: BoundModel) -> None:
        model.open()
        self._still.set()

    def _leave(self, model: BoundModel) -> None:
        self._still.clear()
        model.close_session()

    def begin(self) -> EngineUpdate:
        """An update of buckets that this worker reads itself."""
        assert self._model is not None and self._bound_to is not None
        self._updates += 1
        return EngineUpdate(self, self._model, f"{self._bound_to[0]}/{self._updates}")

    def attend(self, announcement: Announcement) -> None:
        """Returns when this rank has committed the announced version; raises what kept it from that."""
        model = self._ensure(announcement.job, announcement.tensors)
        failure_before = model.receiver.status().last_failure
        self._asked = None
        self._enter(model)
        try:
            self._await(model.receiver, announcement.version, min(announcement.wait_s, self._wait_s), failure_before)
        finally:
            self._leave(model)

    def forget(self) -> None:
        """Lets the model go; the next update binds it again."""
        if self._model is not None:
            self._model.close()
        self._model = self._bound_to = None

    def _ensure(self, job: str, tensors: bytes) -> BoundModel:
        if self._model is not None and self._bound_to == (job, tensors):
            return self._model
        if tensors in self._refused:
            raise self._refused[tensors]
        self.forget()
        parsed = parse_tensors(tensors)
        try:
            self._model = self._bind(job, parsed)
        except headrace.Unsupported as error:
            self._refused = {tensors: error}
            raise
        self._bound_to = (job, tensors)
        logger.info("headrace: bound to %d tensors at %s: %s", len(parsed), self._model.receiver.endpoint, dict(self._model.ways()))
        return self._model

    def _await(self, receiver: headrace.Receiver, version: str, wait_s: float, failure_before: str | None) -> None:
        """Until `version` is committed here; the deadline counts from the last sign of progress."""
        began, seen, until = False, None, 0.0
        while True:
            status = receiver.status()
            where = {"rank": status.rank, "engine": status.engine}
            if status.version == version and status.state == "idle":
                return
            if status.attempted_version == version and status.state in ("open", "applying", "prepared"):
                began = True
            elif began or status.last_failure != failure_before or self._was_asked_long_ago():
                raise headrace.FailedPrecondition(
                    f"update {version} has failed, this rank is {status.state}: {status.last_failure}", **where
                )
            sign = (status.state, status.attempted_version, status.version)
            if sign != seen:
                seen, until = sign, time.monotonic() + wait_s
            elif time.monotonic() > until:
                raise headrace.DeadlineExceeded(f"update {version}: no progress for {wait_s:g} s, this rank is {status.state}", **where)
            time.sleep(_LOOK_S)

    def _was_asked_long_ago(self) -> bool:
        """The hook has run and no session is open: it came and went unseen, between two looks."""
        return self._asked is not None and time.monotonic() - self._asked > _OPENING_S


class EngineUpdate:
    """One update of buckets, begun by EngineSide.begin: load() for each, then finish() or abort()."""

    def __init__(self, side: EngineSide, model: BoundModel, version: str) -> None:
        self._side = side
        self._model = model
        side._enter(model)
        try:
            self._update = model.receiver.update(version).__enter__()
        except BaseException:
            side._leave(model)
            raise

    def load(self, bucket: Bucket) -> None:
        """Writes a bucket's tensors into the model; its memory may be reused afterwards."""
        if bucket.entries:
            self._update.load(headrace.Bucket(bucket.memory, bucket.entries))

    def finish(self) -> headrace.Receipt:
        """All is there, proven and committed, or this raises."""
        try:
            self._side.receipt = self._update.finish()
        finally:
            self._side._leave(self._model)
        return self._side.receipt

    def abort(self, error: BaseException) -> None:
        """Gives it up. The rank stays torn until a full update commits."""
        try:
            self._update.__exit__(type(error), error, error.__traceback__)
        finally:
            self._side._leave(self._model)
