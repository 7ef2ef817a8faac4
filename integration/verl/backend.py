"""verl's checkpoint engine `headrace`: `checkpoint_engine.backend=headrace` with `custom_backend_module=headrace.integration.verl.backend`.

For trainers and rollouts on one host. Rank 0 of the trainer sends each tensor once, through shared memory, straight into the parameters
of every engine worker; verl's own wire between CheckpointEngineWorker and engine carries only the announcement. With direct=false the
tensors go through the CheckpointEngineWorkers and verl's wire, for engines that cannot be written directly.

| step | trainer, rank 0 | CheckpointEngineWorker | engine's worker (our extension) |
|---|---|---|---|
| 1 | announces version, names, dtypes and shapes | passes it on in verl's wire | binds its model, listens |
| 2 | finds all receivers, sends | waits in verl's sender | is written; waits until the version is served |
| 3 | returns the report's figures | gets the last answer | returns, or raises what went wrong |

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
from typing import Any

import headrace
import torch
import zmq
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..peer_socket import PeerFailed, PeerSocket
from ..unpickle import DTYPES
from .engine_side import CONTROL, Announcement, Tensor, dump_tensors
from .wire import BucketFan, BucketStream

__all__ = ["HeadraceCheckpointEngine"]

logger = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20


def _host() -> str:
    """This boot of this host."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


@CheckpointEngineRegistry.register("headrace")
class HeadraceCheckpointEngine(CheckpointEngine):
    """Options, from checkpoint_engine.engine_kwargs.headrace: direct; wait_s, which bounds each wait for another process; data_path and
    threads of the sender; batch_tensors, how many tensors of the trainer's generator are held until they are sent together (1 for a
    generator that hands out the same memory again). bucket_size is verl's, the size of a bucket where direct is false."""

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        direct: bool = True,
        wait_s: float = 600.0,
        data_path: str = "auto",
        threads: int = 1,
        batch_tensors: int = 256,
    ) -> None:
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._direct = direct
        self._wait_s = float(wait_s)
        self._data_path = data_path
        self._threads = threads
        self._batch_tensors = batch_tensors
        self._identity = uuid.uuid4().hex
        self._job = ""
        self._handles: list[str] = []
        self._sender: headrace.Sender | None = None
        self._tensors: tuple[Tensor, ...] = ()
        self._table = b""
        self._updates = 0

    def prepare(self) -> dict[str, Any]:
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
        handles = [f"ipc://{master['folder']}/headrace-{job}-{rank}.sock" for rank in range(rollout_world_size)]
        actors = {"job": [job] * actor_wg_world_size, "handles": [handles] * actor_wg_world_size}
        return actors, {"job": [job] * rollout_world_size, "handles": [[handle] for handle in handles]}

    def init_process_group(self, job: str, handles: list[str]) -> None:
        if job != self._job:
            self._drop_sender()
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
            figures = await (self._send_directly(weights) if self._direct else self._send_by_wire(weights))
        except BaseException:
            self._drop_sender()
            self._tensors = ()
            raise
        return {"headrace/update_s": time.perf_counter() - begin, **figures}

    async def _send_directly(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        held: dict[str, torch.Tensor] | None = None
        if not self._tensors:
            held = {name: _on_host(name, tensor).clone() for name, tensor in weights}
            self._tensors = tuple((name, DTYPES[str(tensor.dtype)].travels, tuple(tensor.shape)) for name, tensor in held.items())
            self._table = dump_tensors(self._tensors)
        self._updates += 1
        version = f"{self._job}/{self._updates}"
        announcement = Announcement(self._job, version, self._wait_s, self._table)
        await asyncio.to_thread(self._announce, announcement.dump())
        sender = await asyncio.to_thread(self._connected)
        source = held if held is not None else _Announced(self._tensors)
        with sender.update(version, source, progress=False) as update:
            if held is None:
                for batch in _batches(weights, self._batch_tensors):
                    update.add(batch)
        report = update.report
        return {"headrace/wire_bytes": float(report.wire_bytes), "headrace/applied_bytes": float(report.applied_bytes)}

    def _announce(self, message: bytes) -> None:
        with ExitStack() as stack:
            context = zmq.Context.instance()
            peers = [stack.enter_context(PeerSocket(context, zmq.REQ, handle, self._wait_s)) for handle in self._handles]
            for peer in peers:
                peer.send(message, "although an update is waiting for its rollouts")
            for peer in peers:
                if answer := peer.receive("an answer to the announcement"):
                    raise PeerFailed(answer.decode("utf-8", "replace"))

    def _connected(self) -> headrace.Sender:
        """The sender of this topology's job, connected to every engine worker; they come when they have bound their models."""
        if self._sender is not None:
            return self._sender
        until = time.monotonic() + self._wait_s
        while True:
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
                    self._sender = sender
                    return sender
                sender.close()
            if time.monotonic() > until:
                raise headrace.DeadlineExceeded(
                    f"{found} of {len(self._handles)} engine workers listen for job {self._job} after {self._wait_s:g} s: {why}",
                    expected=str(len(self._handles)),
                    actual=str(found),
                )
            time.sleep(0.02)

    async def _send_by_wire(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        sent = 0
        with BucketFan(self._handles, self._bucket_bytes, self._wait_s) as fan:
            for name, tensor in weights:
                fan.put(name, _on_host(name, tensor))
                sent += tensor.nbytes
            fan.finish()
        return {"headrace/wire_bytes": float(sent * len(self._handles))}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        if self._direct:
            announcement = await asyncio.to_thread(self._hear)
            yield CONTROL, torch.frombuffer(bytearray(announcement), dtype=torch.uint8)
            return
        async for named in BucketStream(self._handles[0], self._wait_s):
            yield named

    def _hear(self) -> bytes:
        with PeerSocket(zmq.Context.instance(), zmq.REP, self._handles[0], self._wait_s) as peer:
            message = peer.receive("the announcement of an update")
            peer.send(b"", "which waits for an answer")
            return message

    def _drop_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


class _Announced:
    """A source whose names are known and whose tensors are added as they come."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.metadata = list(tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu:
        raise headrace.Unsupported(f"{name} is on {tensor.device}: this version sends host memory only", name=name)
    return tensor.detach()


def _batches(weights: Iterable[tuple[str, torch.Tensor]], tensors_max: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        batch.append((name, _on_host(name, tensor)))
        size += tensor.nbytes
        if len(batch) >= tensors_max or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
