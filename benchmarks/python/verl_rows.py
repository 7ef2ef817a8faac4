"""verl's streams of `./run bench peers` with ours in its place: rows verl/extension/* and verl/both/*.

  verl/extension/WORK  verl's own sender, and the engine worker's end of our extension: its wire, written and proven through a receiver
  verl/both/WORK       our checkpoint engine: straight from the trainer's generator into the engine worker, announced through verl's wire
  WORK                 large: experts of DeepSeek-V4.1; tiny: 20,000 tensors of 4 KiB

The reference is verl's own sender and receiver, with the better of two bucket sizes. An update ends when the receiving process says that it
holds the new bytes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import headrace
import torch
from headrace.integration.verl.engine_side import EngineSide
from headrace.integration.verl.wire import BucketReceiver

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../peers"))
import peers

ROUNDS = 5
BUCKETS_MB = (64, 512)
# In direct delivery verl's wire carries no weights.
DIRECT_BUCKET_MB = 2
WAIT_S = 60.0
# ZeroMQ takes the file of a socket away some time after its close, and be it the file of the next socket of that name: updates of verl's
# sender, which always has the same one, need a moment between them, as they have in training.
PAUSE_S = 0.05
TARGETS = {"extension": {"large": 1.2, "tiny": 1.2}, "both": {"large": 2.0, "tiny": 10.0}}


class Live:
    """The engine worker's model: every storage is a tensor of its own name."""

    def __init__(self, live: dict[str, torch.Tensor]) -> None:
        self._live = live
        self.side = EngineSide(self.bind, job=f"bench-{uuid.uuid4().hex[:8]}", wait_s=WAIT_S)

    def bind(self, job: str, tensors: tuple) -> Live:
        self.receiver = headrace.Receiver(
            headrace.StorageTable.from_tensors(self._live), job=job, hooks=headrace.Hooks(quiescent=self.side.quiescent), threads=0
        )
        return self

    def open(self) -> None: ...

    def close_session(self) -> None: ...

    def close(self) -> None:
        self.receiver.close()

    def discards(self) -> bool:
        return False

    def ways(self) -> dict[str, int]:
        return {"direct": len(self._live)}


def refuse(bucket: Any) -> None:
    raise RuntimeError("every update of this bench is one of a bound model")


def our_receiver(work: str, handle: str, rounds: int, pipe: Any) -> None:
    """As peers.verl_receiver, with the engine worker's end of our extension."""
    torch.set_num_threads(1)
    memory, live = peers.make(work, 0)
    model = Live(live)
    model.side.learn(tuple((name, "uint8", tuple(tensor.shape)) for name, tensor in live.items()))
    receiver = BucketReceiver(handle, WAIT_S)
    for _ in range(rounds):
        pipe.recv()
        model.side.receive(receiver, refuse)
        pipe.send(int(memory[-1]))
    pipe.recv()  # the trainer has heard of the last commit too
    model.side.forget()


def stock_update(source: dict, handle: str, pipe: Any, bucket_mb: int) -> None:
    peers.verl_update(source, handle, pipe, bucket_mb)


class BothEnds:
    """Trainer and CheckpointEngineWorker of our backend, in this process; verl's own sender between the latter and the engine worker."""

    def __init__(self, bucket_mb: int) -> None:
        from headrace.integration.verl.backend import HeadraceCheckpointEngine

        new = HeadraceCheckpointEngine
        self._actor, self._rollout = (new(bucket_size=bucket_mb << 20, is_master=master, wait_s=WAIT_S) for master in (True, False))
        self._module = peers.verl_module()

    def update(self, source: dict, handle: str, pipe: Any, bucket_mb: int) -> None:
        engines = (self._actor, self._rollout)
        for engine, kwargs in zip(engines, type(self._actor).build_topology(1, 1, [engine.prepare() for engine in engines]), strict=True):
            engine.init_process_group(**{name: values[0] for name, values in kwargs.items()})
        pipe.send("go")
        sender = self._module.BucketedWeightSender(handle, bucket_size_mb=bucket_mb, use_shm=True)
        stream = self._rollout.receive_weights()
        rollout = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(stream)), daemon=True)
        rollout.start()
        asyncio.run(self._actor.send_weights(iter(source.items())))
        rollout.join(WAIT_S)
        if rollout.is_alive():
            raise RuntimeError("verl's sender has no answer")


def measure(work: str, receive: Callable, update: Callable, bucket_mb: int) -> float:
    """Median seconds of an update, after two that touch the memory and teach the names."""
    handle = f"ipc://{tempfile.gettempdir()}/headrace-bench-{uuid.uuid4().hex}.sock"
    memory, source = peers.make(work, 7)
    here, there = multiprocessing.Pipe()
    rounds = ROUNDS + 2
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(work, handle, rounds, there), daemon=True)
    process.start()
    taken = []
    try:
        for step in range(rounds):
            memory.fill_(step + 1)
            begin = time.perf_counter()
            update(source, handle, here, bucket_mb)
            if not here.poll(120) or here.recv() != step + 1:
                raise RuntimeError(f"{work}: the receiver has not got the new bytes")
            taken.append(time.perf_counter() - begin)
            time.sleep(PAUSE_S)
        here.send("end")
        process.join(60)
    finally:
        process.kill()
    return statistics.median(taken[2:])


def verl_rows(wanted: Callable[[str], bool], row: Callable[..., dict]) -> list[dict]:
    rows = []
    for work in ("large", "tiny"):
        kinds = [kind for kind in TARGETS if wanted(f"verl/{kind}/{work}")]
        if not kinds:
            continue
        count = len(peers.workload(work))
        stock = min(measure(work, peers.verl_receiver, stock_update, megabytes) for megabytes in BUCKETS_MB)
        for kind in kinds:
            if kind == "extension":
                value = min(measure(work, our_receiver, stock_update, megabytes) for megabytes in BUCKETS_MB)
            else:
                value = measure(work, our_receiver, BothEnds(DIRECT_BUCKET_MB).update, DIRECT_BUCKET_MB)
            target = TARGETS[kind][work]
            name = f"verl/{kind}/{work}"
            each = f"{value / count * 1e6:.3g} us a tensor"
            rows.append(row(name, value, "s", f"verl, {each} with ours", stock, f"{target:g} times faster", stock / value >= target))
    return rows
