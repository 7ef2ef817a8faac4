"""verl's checkpoint engine `headrace`: `checkpoint_engine.backend=headrace` with `custom_backend_module=headrace.integration.verl.backend`.

For trainers and rollouts on one host. Rank 0 of the trainer sends each tensor once, through shared memory, straight into the parameters
of every engine worker; verl's own wire between CheckpointEngineWorker and engine carries only the announcement. Where an engine worker
cannot be written directly, tensors go through the CheckpointEngineWorkers and verl's wire.

| step | trainer, rank 0 | CheckpointEngineWorker | engine's worker (our extension) |
|---|---|---|---|
| 1 | announces version, names, dtypes and shapes | passes it on in verl's wire | binds its model, says whether it could |
| 2 | decides: directly if all could | ends verl's stream, or passes weights on | listens; waits until the version is served |
| 3 | finds all receivers and sends, or fills buckets | gets the last answer | returns, or raises what went wrong |

The names are known from the update before. At the first one rank 0 keeps all tensors until the last has come, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import headrace
import torch
import zmq
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..peer_socket import PeerSocket, Stop
from ..unpickle import DTYPES
from .engine_side import CONTROL, FILLER, Announcement, Tensor, Verdict, dump_tensors
from .wire import BucketFan, BucketStream

__all__ = ["HeadraceCheckpointEngine"]

logger = logging.getLogger(__name__)

# Half of it is sent while the generator makes the other half: engines begin to write after so much, not at the end.
_BATCH_BYTES = 64 << 20
_DIRECTLY, _BY_WIRE = b"directly", b"by wire"
_WAITING = "although an update is waiting for its rollouts"


def _host() -> str:
    """This boot of this host."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


@CheckpointEngineRegistry.register("headrace")
class HeadraceCheckpointEngine(CheckpointEngine):
    """Options, from checkpoint_engine.engine_kwargs.headrace.

    direct: false for verl's wire in any case. wait_s: bounds each wait for another process. data_path, threads: of the sender.
    batch_tensors: how many tensors of the trainer's generator are held at most; 1 for a generator that hands out the same memory again.
    bucket_size is verl's: of a bucket on its wire.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        direct: bool = True,
        wait_s: float = 600.0,
        data_path: str = "auto",
        threads: int = 0,
        batch_tensors: int = 1_024,
    ) -> None:
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._direct = direct
        # Until the topology changes; an engine that could not be written directly stays as it is.
        self._by_wire = not direct
        self._wait_s = float(wait_s)
        self._data_path = data_path
        self._threads = threads
        self._batch_tensors = batch_tensors
        self._identity = uuid.uuid4().hex
        self._job = ""
        self._handles: list[str] = []
        self._sender: headrace.Sender | None = None
        # Of the receivers that the sender was connected to.
        self._bindings: list[str] = []
        self._stop = Stop()
        self._tensors: tuple[Tensor, ...] = ()
        self._table = b""
        self._updates = 0

    def prepare(self) -> dict[str, Any]:
        # verl does not tell when an update has failed elsewhere. What still waits in one would be in the way of the next.
        self._stop.set("another update has begun")
        self._stop = Stop()
        return {"host": _host(), "identity": self._identity, "master": self._is_master, "folder": tempfile.gettempdir()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """One job for exactly these processes: a replica that comes or goes makes another one, so that nobody of before is written."""
        hosts = {entry["host"] for entry in metadata}
        if len(hosts) != 1:
            raise headrace.Unsupported(f"trainer and rollouts are on {len(hosts)} hosts: this version delivers on one host only")
        masters = [i for i, entry in enumerate(metadata[:actor_wg_world_size]) if entry["master"]]
        if len(masters) != 1:
            raise headrace.InvalidArgument(f"{len(masters)} of {actor_wg_world_size} trainer ranks are the master, one is expected")
        master, rollouts = metadata[masters[0]], metadata[actor_wg_world_size:]
        members = hashlib.blake2b(digest_size=6)
        for identity in [master["identity"], *sorted(entry["identity"] for entry in rollouts)]:
            members.update(identity.encode())
        job = f"verl-{members.hexdigest()}"
        handles = [f"ipc://{master['folder']}/headrace-{job}-{rank}" for rank in range(rollout_world_size)]
        actors = {"job": [job] * actor_wg_world_size, "handles": [handles] * actor_wg_world_size}
        return actors, {"job": [job] * rollout_world_size, "handles": [[handle] for handle in handles]}

    def init_process_group(self, job: str, handles: list[str]) -> None:
        if job != self._job:
            self._drop_sender()
            self._by_wire = not self._direct
        self._job = job
        self._handles = list(handles)

    def finalize(self) -> None:
        """Connections stay for the next update; they end with the topology or the process."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict[str, float] | None:
        if not self._is_master:
            # Pulling takes part in the trainer's collectives.
            for _ in weights:
                pass
            return None
        begin = time.perf_counter()
        try:
            figures = await self._send(weights)
        except BaseException:
            self._drop_sender()
            self._tensors = ()
            raise
        return {"headrace/update_s": time.perf_counter() - begin, **figures}

    async def _send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        stop = self._stop
        with ExitStack() as stack:
            # From before the first tensor is pulled to the end: rollouts see by them that the trainer has failed, or is gone.
            peers = [
                stack.enter_context(PeerSocket(zmq.Context.instance(), zmq.REQ, f"{handle}.sock", self._wait_s, stop))
                for handle in self._handles
                if self._direct
            ]
            if self._by_wire:
                await asyncio.to_thread(_ask, peers, _BY_WIRE)
                return self._send_by_wire(weights)
            held = None if self._tensors else self._learn(weights)
            self._updates += 1
            version = f"{self._job}-direct/{self._updates}"
            verdicts = await asyncio.to_thread(_ask, peers, Announcement(self._job, version, self._wait_s, self._table).dump())
            refused = [verdict for verdict in verdicts if verdict.reason]
            await asyncio.to_thread(_decide, peers, _BY_WIRE if refused else _DIRECTLY)
            if refused:
                self._say(refused, len(verdicts))
                return self._send_by_wire(held.items() if held is not None else weights)
            sender = await asyncio.to_thread(self._connected, [verdict.binding for verdict in verdicts], stop)
            with sender.update(version, held if held is not None else _Announced(self._tensors), progress=False) as update:
                if held is None:
                    update.add(weights, batch_tensors=self._batch_tensors, batch_bytes=_BATCH_BYTES)
            report = update.report
        return {
            "headrace/direct": 1.0,
            "headrace/wire_bytes": float(report.wire_bytes),
            "headrace/applied_bytes": float(report.applied_bytes),
        }

    def _learn(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        held = {name: _on_host(name, tensor).detach().clone() for name, tensor in weights}
        self._tensors = tuple((name, DTYPES[str(tensor.dtype)].travels, tuple(tensor.shape)) for name, tensor in held.items())
        self._table = dump_tensors(self._tensors)
        return held

    def _say(self, refused: list[Verdict], engines: int) -> None:
        """What was refused for good goes by verl's wire until the topology changes."""
        self._by_wire = not all(verdict.once for verdict in refused)
        logger.warning(
            "headrace: %s through verl's wire, since %d of %d engine workers cannot be written directly: %s",
            "updates go" if self._by_wire else "this update goes",
            len(refused),
            engines,
            refused[0].reason,
        )

    def _connected(self, bindings: list[str], stop: Stop) -> headrace.Sender:
        """The sender of this topology's job, connected to every engine worker as it is bound now."""
        if self._sender is not None and self._bindings == bindings:
            return self._sender
        self._drop_sender()
        until = time.monotonic() + self._wait_s
        while True:
            stop.check()
            try:
                sender = headrace.Sender.connect(
                    job=self._job,
                    data_path=self._data_path,
                    threads=self._threads,
                    connect_timeout_ms=1_000,
                    deadline_ms=int(self._wait_s * 1_000),
                )
            except (headrace.Unavailable, headrace.DeadlineExceeded, headrace.FailedPrecondition) as error:
                found, why = 0, str(error)
            else:
                found, why = len(sender.receivers), "no more are there"
                if found == len(self._handles):
                    self._sender, self._bindings = sender, bindings
                    return sender
                sender.close()
            if time.monotonic() > until:
                raise headrace.DeadlineExceeded(
                    f"{found} of {len(self._handles)} engine workers listen for job {self._job} after {self._wait_s:g} s: {why}",
                    expected=str(len(self._handles)),
                    actual=str(found),
                )
            time.sleep(0.02)

    def _send_by_wire(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        sent = 0
        with BucketFan([f"{handle}-wire.sock" for handle in self._handles], self._bucket_bytes, self._wait_s) as fan:
            for name, tensor in weights:
                fan.put(name, _on_host(name, tensor))
                sent += tensor.nbytes
            fan.finish()
        return {"headrace/direct": 0.0, "headrace/wire_bytes": float(sent * len(self._handles))}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        handle, context, stop = self._handles[0], zmq.Context.instance(), self._stop
        if self._direct:
            with PeerSocket(context, zmq.REP, f"{handle}.sock", self._wait_s, stop) as trainer:
                message = await asyncio.to_thread(trainer.receive, "the announcement of an update")
                if message == _BY_WIRE:
                    trainer.send(Verdict().dump(), "which waits for an answer")
                else:
                    addresses = {"verdict": f"{handle}-verdict.sock", "trainer": f"{handle}.sock"}
                    announcement = replace(Announcement.parse(message), **addresses)
                    announced = bytearray(announcement.dump())
                    if len(announced) > self._bucket_bytes:
                        raise headrace.InvalidArgument(
                            f"an announcement of {len(announced)} bytes does not fit into a bucket of {self._bucket_bytes}: "
                            "raise checkpoint_engine.update_weights_bucket_megabytes"
                        )
                    with PeerSocket(context, zmq.REP, announcement.verdict, self._wait_s, stop) as engine:
                        yield CONTROL, torch.frombuffer(announced, dtype=torch.uint8)
                        yield FILLER, torch.zeros(self._bucket_bytes, dtype=torch.uint8)
                        verdict = await asyncio.to_thread(engine.receive, "the engine worker's verdict")
                    trainer.send(verdict, "which waits for a verdict")
                    message = await asyncio.to_thread(trainer.receive, "the trainer's decision")
                    trainer.send(b"", "which waits for an answer")
            if message != _BY_WIRE:
                return
        async for named in BucketStream(f"{handle}-wire.sock", self._wait_s, stop=stop):
            yield named

    def _drop_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def _ask(peers: list[PeerSocket], message: bytes) -> list[Verdict]:
    """Tells all CheckpointEngineWorkers; what their engine workers say."""
    for peer in peers:
        peer.send(message, _WAITING)
    return [Verdict.parse(peer.receive("a verdict on the announcement")) for peer in peers]


def _decide(peers: list[PeerSocket], way: bytes) -> None:
    for peer in peers:
        peer.send(way, _WAITING)
    for peer in peers:
        peer.receive("an answer to the decision")


class _Announced:
    """A source whose names are known and whose tensors are added as they come."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.metadata = tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu:
        raise headrace.Unsupported(f"{name} is on {tensor.device}: this version sends host memory only", name=name)
    return tensor
