"""The trainer's side of the engine `headrace`: one sender for each trainer rank that owns weights."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import headrace
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    Replicate,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient, RayVLLMWeightSyncClient

from . import BACKEND, meeting

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class HeadraceTrainerInitInfo(TrainerInitInfo):
    """job: where senders and workers meet on this host. run: of the weight versions RUN/STEP, another one for each start of the trainer; a
    trainer of which one rank sends may leave it out. engine: the name that the workers take. processed: see HeadraceInitInfo. model:
    "target", or "draft" for the drafter alone; `job` and `engine` are then those of the target."""

    backend: ClassVar[str] = BACKEND

    job: str
    run: str | None = None
    engine: str = "vllm"
    data_path: str = "auto"
    threads: int = 0
    deadline_ms: int = 60_000
    processed: bool = True
    model: str = "target"


class HeadraceTrainerEngine(TrainerWeightTransferEngine[HeadraceTrainerInitInfo]):
    """Made, and asked to send, on every rank of the trainer. Rank 0 drives vLLM; every rank sends what it owns."""

    init_info_cls = HeadraceTrainerInitInfo

    def __init__(self, init_info: HeadraceTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        self.init_info = init_info
        self.run = init_info.run or f"run-{uuid.uuid4().hex[:12]}"
        self.step = 0
        self.report: headrace.Report | None = None
        self._job, _ = meeting(init_info.job, init_info.engine, init_info.model)
        self._start = _start_draft_of(client) if self.is_sender and init_info.model == "draft" else None
        self._shares = _Shares(source, init_info.rank)
        self._sender: headrace.Sender | None = None

    @classmethod
    def trainer_init(cls, init_info: HeadraceTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None) -> Self:
        if source is None:
            raise headrace.InvalidArgument("the engine headrace sends from a WeightSource, and none was given")
        engine = cls(init_info, client=client, source=source)
        if init_info.run is None and len(engine._shares.senders) > 1:
            raise headrace.InvalidArgument(
                f"{len(engine._shares.senders)} trainer ranks send, so that they need one name of a run: set `run`"
            )
        if engine.is_sender:
            client.init_weight_transfer_engine(engine._worker_init_info())
        return engine

    def send_weights(self) -> None:
        """One update, of the whole model, to every worker. Returns when all have committed it; raises what kept them from it, and vLLM's
        session is closed then too. Generation is paused by the caller, before; caches are reset here if the client can."""
        self.step += 1
        version = f"{self.run}/{self.step}"
        if not self.is_sender:
            self._send(version)
            return
        (self._start or self.client.start_weight_update)()
        with ThreadPoolExecutor(1, "headrace-vllm-client") as pool:
            waiting = pool.submit(self.client.update_weights, {"kind": "receive", "version": version})
            failure = _failure_of(lambda: self._send(version))
            waited = waiting.exception()
        if waited is not None:
            # The worker's session ended with this failure. The sender's own words say more.
            raise (failure or waited) from (waited if failure else None)
        if failure is not None:
            self._abort(failure)
            raise failure
        try:
            self.client.finish_weight_update(version)
        except Exception as error:
            self._abort(error)
            raise
        self._reset_caches()

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _send(self, version: str) -> None:
        senders = self._shares.senders
        if self.rank not in senders:
            self._shares.exhaust()
            return
        if self._sender is None:
            self._sender = headrace.Sender.connect(
                job=self._job,
                sender=_sender_name(self.rank),
                data_path=self.init_info.data_path,
                threads=self.init_info.threads,
                # A drafter is bound while another rank opens its session: until then nobody is there to connect to.
                connect_timeout_ms=self.init_info.deadline_ms or HeadraceTrainerInitInfo.deadline_ms,
                deadline_ms=self.init_info.deadline_ms,
            )
        try:
            self.report = self._sender.send(version, self._shares, senders=[_sender_name(rank) for rank in senders], progress=False)
        except headrace.Error:
            # A connection may be lost; the next update looks for its receivers anew.
            self.shutdown()
            raise

    def _abort(self, error: BaseException) -> None:
        """An update that raises on purpose: the only way to end a session of vLLM's worker whose finish failed."""
        _failure_of(lambda: self.client.update_weights({"kind": "abort", "reason": f"{type(error).__name__}: {error}"}))

    def _reset_caches(self) -> None:
        for name in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
            reset = getattr(self.client, name, None)
            if callable(reset):
                reset()

    def _worker_init_info(self) -> dict[str, Any]:
        metadata = self.source.metadata
        return {
            "job": self.init_info.job,
            "engine": self.init_info.engine,
            "model": self.init_info.model,
            "threads": self.init_info.threads,
            "deadline_ms": self.init_info.deadline_ms,
            "processed": self.init_info.processed,
            "names": [meta.name for meta in metadata],
            "dtypes": [str(meta.dtype) for meta in metadata],
            "shapes": [list(meta.shape) for meta in metadata],
        }


def _start_draft_of(client: VLLMWeightSyncClient) -> Callable[[], None]:
    """What aims a session at the drafter. vLLM's own clients have no call for it, but what they talk to has."""
    own = getattr(client, "start_draft_weight_update", None)
    if callable(own):
        return own
    if isinstance(client, HTTPVLLMWeightSyncClient):
        return lambda: client._post("start_draft_weight_update")
    if isinstance(client, RayVLLMWeightSyncClient):
        return lambda: _each(client.handles, "start_draft_weight_update")
    raise headrace.Unsupported(
        f"{type(client).__name__} cannot begin a session of the drafter: it needs a method start_draft_weight_update",
        name="start_draft_weight_update",
    )


def _each(handles: list[Any], method: str) -> None:
    import ray

    ray.get([getattr(handle, method).remote() for handle in handles])


def _sender_name(rank: int) -> str:
    return f"trainer-{rank}"


def _failure_of(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


class _Shares:
    """What one trainer rank sends of each parameter: a source for headrace.Sender, worked out from the metadata alone, alike on all ranks.

    A parameter is sent as pieces, by the ranks that hold them, where the source has pieces; otherwise as a whole by its first owner.
    """

    def __init__(self, source: WeightSource, rank: int) -> None:
        self.source = source
        self.rank = rank
        self.local = source.implements_iter_local() and (
            not source.implements_iter_full() or any(meta.placements is not None for meta in source.metadata)
        )
        self.boxes = {meta.name: share_of(meta, rank, self.local) for meta in source.metadata}
        self.senders = sorted({r for meta in source.metadata for r in sending_ranks(meta, self.local)})

    @property
    def metadata(self) -> list[tuple]:
        return [
            (meta.name, meta.dtype, meta.shape, None if _is_whole(box, meta.shape) else box)
            for meta in self.source.metadata
            if (box := self.boxes[meta.name]) is not None
        ]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._tensors():
            if self.boxes[name] is not None:
                yield name, tensor.detach()

    def exhaust(self) -> None:
        """A source may run collectives while it is iterated, so that every owner has to."""
        for _ in self._tensors():
            pass

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        return self.source.iter_local() if self.local else self.source.iter_full()


def share_of(meta: ParamMeta, rank: int, local: bool) -> Box | None:
    """The box of a parameter that this rank sends, or None. Of copies the first one is sent."""
    whole: Box = ((0,) * len(meta.shape), tuple(meta.shape))
    if meta.owners is None or not local or meta.placements is None:
        first = 0 if meta.owners is None else meta.owners[0]
        return whole if rank == first else None
    if rank not in meta.owners:
        return None
    index = meta.owners.index(rank)
    lo, hi = list(whole[0]), list(whole[1])
    for axis, placement in enumerate(meta.placements):
        below = math.prod(meta.mesh_shape[axis + 1 :])
        coordinate = index // below % meta.mesh_shape[axis]
        if isinstance(placement, Replicate):
            if coordinate:
                return None
            continue
        # As torch.chunk divides: pieces of one size, of which the last ones are smaller or empty.
        size = -(-(hi[placement.dim] - lo[placement.dim]) // meta.mesh_shape[axis])
        begin = min(lo[placement.dim] + coordinate * size, hi[placement.dim])
        lo[placement.dim], hi[placement.dim] = begin, min(begin + size, hi[placement.dim])
    return None if any(a >= b for a, b in zip(lo, hi, strict=True)) else (tuple(lo), tuple(hi))


def _is_whole(box: Box, shape: tuple[int, ...]) -> bool:
    return box == ((0,) * len(shape), tuple(shape))


def sending_ranks(meta: ParamMeta, local: bool) -> list[int]:
    return [rank for rank in (meta.owners or (0,)) if share_of(meta, rank, local) is not None]
