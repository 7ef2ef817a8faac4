"""How a trainer's ranks share what they send, from vLLM's own description of a sharded parameter."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import cached_property

import headrace
import pytest
import torch
from headrace.integration.vllm.trainer import HeadraceTrainerEngine, HeadraceTrainerInitInfo, share_of
from vllm.distributed.weight_transfer.base import ParamMeta, Replicate, Shard, WeightSource

MESHES = [
    ParamMeta("a", torch.float32, (10, 4), owners=(0, 1, 2, 3), placements=(Shard(0),)),
    ParamMeta("a", torch.float32, (5, 4), owners=(3, 1, 0, 2), placements=(Shard(0),)),
    ParamMeta("a", torch.float32, (3, 8), owners=(0, 1, 2, 3), placements=(Shard(1),)),
    ParamMeta("a", torch.float32, (9, 4), owners=(0, 1, 2, 3), mesh_shape=(2, 2), placements=(Shard(0), Shard(0))),
    ParamMeta("a", torch.float32, (9, 7), owners=(0, 1, 2, 3), mesh_shape=(2, 2), placements=(Shard(0), Shard(1))),
    ParamMeta("a", torch.float32, (9, 7), owners=(0, 1, 2, 3), mesh_shape=(2, 2), placements=(Replicate(), Shard(1))),
    ParamMeta("a", torch.float32, (9, 7), owners=(2, 3), placements=(Replicate(),)),
    ParamMeta("a", torch.float32, (9, 7)),
]


def pieces_of(meta: ParamMeta) -> dict[int, torch.Tensor]:
    """What each owner holds, divided by torch.chunk, outer axis first."""
    whole = torch.arange(torch.Size(meta.shape).numel(), dtype=torch.float32).reshape(meta.shape)
    pieces = {}
    for index, rank in enumerate(meta.owners or range(4)):
        piece, below = whole, len(meta.owners or range(4))
        for axis, placement in enumerate(meta.placements or ()):
            below //= meta.mesh_shape[axis]
            if isinstance(placement, Shard):
                chunks = torch.chunk(piece, meta.mesh_shape[axis], placement.dim)
                at = index // below % meta.mesh_shape[axis]
                piece = chunks[at] if at < len(chunks) else piece.narrow(placement.dim, 0, 0)
        pieces[rank] = piece
    return pieces


@pytest.mark.parametrize("meta", MESHES, ids=str)
def test_pieces_are_the_chunks_of_torch_and_cover_the_whole_once(meta: ParamMeta) -> None:
    whole = torch.arange(torch.Size(meta.shape).numel(), dtype=torch.float32).reshape(meta.shape)
    covered = torch.zeros(meta.shape, dtype=torch.int32)
    for rank, piece in pieces_of(meta).items():
        box = share_of(meta, rank, local=True)
        if box is None:
            continue
        where = tuple(slice(lo, hi) for lo, hi in zip(*box, strict=True))
        assert torch.equal(whole[where], piece)
        covered[where] += 1
    assert bool((covered == 1).all())


class Sharded(WeightSource):
    """Two ranks with halves of each tensor, one of which has a tensor for itself."""

    def __init__(self, rank: int, tensors: dict[str, torch.Tensor]) -> None:
        self.rank = rank
        self.tensors = tensors

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape), owners=(1,))
            if name == "alone"
            else ParamMeta(name, tensor.dtype, tuple(tensor.shape), owners=(0, 1), placements=(Shard(0),))
            for name, tensor in self.tensors.items()
        ]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.owned_names(self.rank):
            tensor = self.tensors[name]
            yield name, tensor if name == "alone" else torch.chunk(tensor, 2)[self.rank]


class Nobody:
    """A client of an engine that needs no calls."""

    def init_weight_transfer_engine(self, init_info: dict) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def test_two_ranks_send_their_shards_and_nothing_is_gathered() -> None:
    names = {"a": (7, 3), "b": (4, 5), "alone": (3,)}
    live = {name: torch.zeros(shape) for name, shape in names.items()}
    table = headrace.StorageTable.from_tensors(live)
    with headrace.Receiver(table, job="trainer-shards", engine="vllm"):
        sent = {name: torch.rand(shape) for name, shape in names.items()}
        infos = [HeadraceTrainerInitInfo(job="trainer-shards", run="start-1", rank=rank) for rank in (0, 1)]
        trainers = [HeadraceTrainerEngine.trainer_init(info, client=Nobody(), source=Sharded(info.rank, sent)) for info in infos]
        threads = [threading.Thread(target=trainer.send_weights) for trainer in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for trainer in trainers:
            trainer.shutdown()
    assert {name: torch.equal(live[name], sent[name]) for name in names} == dict.fromkeys(names, True)
    assert all(trainer.report.proven for trainer in trainers)


def test_ranks_that_send_need_one_name_of_a_run() -> None:
    with pytest.raises(headrace.InvalidArgument, match="set `run`"):
        HeadraceTrainerEngine.trainer_init(
            HeadraceTrainerInitInfo(job="any", rank=0), client=Nobody(), source=Sharded(0, {"a": torch.zeros(4, 2)})
        )


def test_a_rank_looks_for_workers_as_long_as_the_deadline_says() -> None:
    info = HeadraceTrainerInitInfo(job="trainer-alone", run="start-1", rank=1, deadline_ms=300)
    trainer = HeadraceTrainerEngine.trainer_init(info, client=Nobody(), source=Sharded(1, {"a": torch.zeros(4, 2)}))
    begun = time.monotonic()
    with pytest.raises(headrace.Error, match="300 ms"):
        trainer.send_weights()
    assert 0.3 <= time.monotonic() - begun < 5
