"""One engine worker's end of updates under verl: a model bound to what a trainer brings, and the two ways in which an update comes.

Nothing here imports verl, vLLM or torch; the worker extension brings the model.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import headrace
import zmq

from ..buckets import Bucket
from ..peer_socket import PeerSocket
from .wire import BucketReceiver

__all__ = ["CONTROL", "FILLER", "Announcement", "BoundModel", "EngineSide", "Tensor", "Verdict", "control_of", "dump_tensors"]

logger = logging.getLogger(__name__)

# The tensor that a backend of ours puts into verl's wire before weights or in place of them: what a trainer is about to send.
CONTROL = "__headrace_update__"
# What comes behind it, as large as a bucket: so that verl's sender hands CONTROL over at once and asks for more when it has been read.
FILLER = "__headrace_filler__"

# From the announcement to the engine worker's call through verl's servers.
_ARRIVAL_S = 60.0
# How often a trainer is looked after that has not begun yet.
_LOOK_MS = 2_000

# name, torch dtype's name, shape
Tensor = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Announcement:
    """An update that a trainer wants to send straight to the engine's workers. job: under which it looks for their receivers.

    tensors: a table of `dump_tensors`. It is the same from update to update, and large: kept as it was sent, and read where it is new.
    verdict: the address at which the engine's worker says whether it can. trainer: one that exists while the trainer is in the update.
    """

    job: str
    version: str
    wait_s: float
    tensors: bytes
    verdict: str = ""
    trainer: str = ""

    def dump(self) -> bytes:
        fields = {"job": self.job, "version": self.version, "wait_s": self.wait_s, "verdict": self.verdict, "trainer": self.trainer}
        return json.dumps(fields).encode() + b"\n" + self.tensors

    @classmethod
    def parse(cls, data: bytes) -> Announcement:
        """Raises headrace.InvalidArgument."""
        head, _, tensors = data.partition(b"\n")
        try:
            fields = json.loads(head)
            wait_s = float(fields["wait_s"])
            if not 0 < wait_s < math.inf:  # nothing would end a wait for a number that is none
                raise ValueError(f"a wait of {wait_s} s")
            words = {key: str(fields[key]) for key in ("job", "version", "verdict", "trainer")}
            return cls(wait_s=wait_s, tensors=tensors, **words)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise headrace.InvalidArgument(f"no announcement of an update: {type(error).__name__}: {error}") from error


def dump_tensors(tensors: tuple[Tensor, ...]) -> bytes:
    return json.dumps(tensors, separators=(",", ":")).encode()


def parse_tensors(data: bytes) -> tuple[Tensor, ...]:
    """Raises headrace.InvalidArgument."""
    try:
        return tuple((str(name), str(dtype), tuple(int(extent) for extent in shape)) for name, dtype, shape in json.loads(data))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise headrace.InvalidArgument(f"no table of an update's tensors: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Verdict:
    """An engine worker's answer to an announcement. reason: why it cannot be written directly, empty if it can; once: only this time.

    binding: changes when the receiver is another one, or was written in another way in between: what a sender knows of it holds no more.
    """

    reason: str = ""
    once: bool = False
    binding: str = ""

    def dump(self) -> bytes:
        return json.dumps([self.reason, self.once, self.binding]).encode()

    @classmethod
    def parse(cls, data: bytes) -> Verdict:
        """Raises headrace.InvalidArgument."""
        try:
            reason, once, binding = json.loads(data)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise headrace.InvalidArgument(f"no verdict: {type(error).__name__}: {error}") from error
        return cls(str(reason), bool(once), str(binding))

    def send(self, announcement: Announcement) -> None:
        """Tells the CheckpointEngineWorker, which reads it when verl's sender has its answer."""
        with PeerSocket(zmq.Context.instance(), zmq.REQ, announcement.verdict, announcement.wait_s) as peer:
            peer.send(self.dump(), "although a CheckpointEngineWorker is waiting for the verdict")


def control_of(bucket: Bucket) -> Announcement | None:
    """The announcement in a bucket of verl's wire, if there is one."""
    for entry in bucket.entries:
        if entry.name == CONTROL:
            return Announcement.parse(bytes(memoryview(bucket.memory)[entry.offset : entry.offset + entry.nbytes]))
    return None


class BoundModel(Protocol):
    """A model whose storages a receiver writes."""

    receiver: headrace.Receiver

    def open(self) -> None:
        """From here to close_session no forward pass runs; storages are looked at again."""

    def close_session(self) -> None: ...

    def close(self) -> None:
        """Lets the model go."""

    def discards(self) -> bool:
        """Whether the engine gives its weights up between updates."""

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
        self.binding = ""
        # Set while the worker's thread is inside an update and so in no forward pass.
        self._still = threading.Event()
        self.receipt: headrace.Receipt | None = None

    @property
    def model(self) -> BoundModel | None:
        """What updates are written to, once one has been bound."""
        return self._model

    def learn(self, tensors: tuple[Tensor, ...]) -> str:
        """Binds the model to what another way has just brought; why it could not be, or empty."""
        try:
            self._ensure(self._job, dump_tensors(tensors))
        except headrace.Unsupported as error:
            return str(error)
        return ""

    def receive(self, receiver: BucketReceiver, unbound: Callable[[Bucket], None]) -> str:
        """One update through verl's wire; returns when it is committed, or raises what went wrong after the sender has its answers.

        Buckets of weights are written; while no model is bound `unbound` takes them. An announced update is waited for, where the trainer
        decides so. Returns why the model could not be bound to what was announced, or empty.
        """
        if self._model is not None and self._model.discards():
            self._model.receiver.notify("discard")
        arrival = _Arrival(self, unbound)
        try:
            receiver.receive(arrival.take)
        except BaseException as error:
            if arrival.writing is not None:
                arrival.writing.abort(error)
            raise
        if arrival.writing is not None:
            arrival.writing.finish()
        return arrival.verdict.reason

    def passed_by(self) -> None:
        """To be called when something else is about to write the model."""
        if self._model is not None:
            self._model.receiver.notify("foreign_reload")

    def quiescent(self) -> bool:
        """For the receiver's hook, on a thread of its own. A trainer that knows its receivers from before may be here first: waits."""
        return self._still.wait(min(self._wait_s, _ARRIVAL_S))

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
        self.binding = uuid.uuid4().hex
        return EngineUpdate(self, self._model, f"{self._bound_to[0]}/{self._updates}")

    def attend(self, announcement: Announcement, since: int | None = None) -> None:
        """Returns when this rank has committed the announced version; raises what kept it from that. since: the receiver's mark() from
        before the trainer could begin."""
        model = self._ensure(announcement.job, announcement.tensors)
        since = model.receiver.mark() if since is None else since
        wait_s = min(announcement.wait_s, self._wait_s)
        self._enter(model)
        try:
            with PeerSocket(zmq.Context.instance(), zmq.REP, announcement.trainer, wait_s) as trainer:
                _await(model.receiver, announcement.version, since, wait_s, trainer)
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
        self.binding = uuid.uuid4().hex
        logger.info("headrace: bound to %d tensors at %s: %s", len(parsed), self._model.receiver.endpoint, dict(self._model.ways()))
        return self._model


def _await(receiver: headrace.Receiver, version: str, since: int, wait_s: float, trainer: PeerSocket) -> None:
    """Until `version` is committed here. The receiver sees by itself how a session ends, but not that a trainer never began one."""
    until = time.monotonic() + wait_s
    while receiver.status().attempted_version != version:
        lost = trainer.lost()
        try:
            receiver.wait_for(version, since=since, deadline_ms=_LOOK_MS)
            return
        except headrace.DeadlineExceeded as error:
            if lost and trainer.lost() and receiver.status().attempted_version != version:
                raise headrace.Unavailable(f"update {version}: the trainer has given it up before it began") from error
            if time.monotonic() > until:
                raise
    receiver.wait_for(version, since=since, deadline_ms=max(1, int(wait_s * 1_000)))


class _Arrival:
    """What comes in one update of verl's wire. Its first bucket says which way it goes."""

    def __init__(self, side: EngineSide, unbound: Callable[[Bucket], None]) -> None:
        self._side = side
        self._unbound = unbound
        self._announced: Announcement | None = None
        self._since: int | None = None
        self.verdict = Verdict()
        self.writing: EngineUpdate | None = None

    def take(self, bucket: Bucket, is_last: bool) -> None:
        announced = control_of(bucket)
        if announced is not None:
            self._answer(announced)
        elif bucket.entries and bucket.entries[0].name == FILLER:
            # Where it is the last, the trainer has decided to send directly; else weights follow.
            if is_last and self._announced is not None:
                self._side.attend(self._announced, self._since)
        elif self._side.model is not None:
            if self.writing is None:
                self.writing = self._side.begin()
            self.writing.load(bucket)
        elif bucket.entries:
            self._unbound(bucket)

    def _answer(self, announced: Announcement) -> None:
        self._announced = announced
        try:
            # A trainer begins when it has the verdict.
            self._since = self._side._ensure(announced.job, announced.tensors).receiver.mark()
            self.verdict = Verdict(binding=self._side.binding)
        except headrace.Unsupported as error:
            self.verdict = Verdict(str(error))
        except Exception as error:  # raised when the sender has its answers; the trainer must not wait for a verdict until then
            Verdict(f"{type(error).__name__}: {error}", once=True).send(announced)
            raise
        self.verdict.send(announced)


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
