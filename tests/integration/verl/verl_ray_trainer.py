"""A rank of verl's actor worker under Ray, with a training engine that does not train."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import ray
import torch
import torch.distributed
import verl_cpu_platform  # noqa: F401
import vllm_models as models
from headrace.integration.vllm.shadow import random_tensor
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout import ServerAdapter
from weight_streams import wait_until

# Two tensors that a sender's first bucket does not hold together, so that it is on its way before the others are pulled. vLLM fills them up
# to a multiple of 64 rows.
ROWS = 4_608 * 64 - 14
MODEL = models.LLAMA | {"vocab_size": ROWS}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha1(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy(), usedforsecurity=False).hexdigest()


class Trainer(Worker):
    """One rank of verl's actor worker, of which the training engine is two ranks that hold a half of each tensor and put them together."""

    def __init__(self, config: RolloutConfig, replicas: list[int]) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        settings = config.checkpoint_engine
        import_external_libs(settings.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            settings.backend,
            is_master=self.rank == 0,
            bucket_size=settings.update_weights_bucket_megabytes << 20,
            **settings.engine_kwargs.get(settings.backend, {}),
        )
        self.rollout = ServerAdapter(config, None, None, replica_rank=replicas[self.rank])
        self.server = f"vllm_server_{replicas[0]}_0"
        self.halves: dict[str, torch.Tensor] = {}
        self.end = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict | None:
        if mode == "naive":
            await self.rollout.update_weights(self.pull(), peft_config=None, base_sync_done=True, global_steps=global_steps)
            return None
        return await self.checkpoint_engine.send_weights(self.pull(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> dict[str, str]:
        """New weights; digests of this rank's halves."""
        entries = sorted(models.entries_of(MODEL), key=lambda entry: -torch.Size(entry[2]).numel())
        for i, (name, dtype, shape) in enumerate(entries):
            self.halves[name] = random_tensor(dtype, (shape[0] // 2, *shape[1:]), seed * 10_000 + i * 2 + self.rank)
        return {name: digest(half) for name, half in self.halves.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_while(self, what: list[str]) -> None:
        """How a rank ends its next update: its source is "raising", or its process is gone while "pulling", or while the first engine is
        "applying"."""
        self.end = what[self.rank]

    def pull(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, half) in enumerate(self.halves.items()):
            if number == 3:
                self._end()
            mine = half.view(torch.uint8)
            parts = [torch.empty_like(mine) for _ in range(self.world_size)]
            torch.distributed.all_gather(parts, mine)
            yield name, torch.cat(parts).view(half.dtype)

    def _end(self) -> None:
        end, self.end = self.end, ""
        if end == "raising":
            raise ValueError("lost a shard")
        if end == "applying":
            server = ray.get_actor(self.server)
            wait_until(lambda: (ray.get(server.look.remote("status")) or {}).get("state") == "applying")
        if end:
            os.kill(os.getpid(), signal.SIGKILL)
