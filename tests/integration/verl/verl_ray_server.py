"""What a vLLM engine is under Ray on a machine without devices: verl's own server, in front of vLLM's worker and model on the CPU."""

from __future__ import annotations

import asyncio
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import verl_cpu_platform  # noqa: F401
import vllm_models as models
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl_ray_trainer import MODEL, ROWS, digest


class Engine:
    """In place of vLLM's AsyncLLM and its worker process: vLLM's model and worker without devices, with the extension that it was told."""

    def __init__(self, args: Any) -> None:
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.worker.gpu_worker import Worker as VllmWorker

        loaded = models.load(MODEL)
        loaded.vllm_config.additional_config = args.additional_config
        loaded.vllm_config.model_config.enable_sleep_mode = args.enable_sleep_mode
        kind = type("RolloutWorker", (VllmWorker, resolve_obj_by_qualname(args.worker_extension_cls)), {})
        self.worker = object.__new__(kind)
        self.worker.vllm_config = loaded.vllm_config
        self.worker.rank = self.worker.local_rank = 0
        self.worker.device = torch.device("cpu")
        self.worker._is_qat_model = self.worker._is_modelopt_qat = False
        self.worker.model_runner = types.SimpleNamespace(model=loaded.model, vllm_config=loaded.vllm_config, drafter=None)
        self.model = loaded.model
        self.thread = ThreadPoolExecutor(1)
        self.output_processor = types.SimpleNamespace(request_states={})
        self.calls: list[tuple[str, str]] = []

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None) -> list:
        return [await asyncio.get_running_loop().run_in_executor(self.thread, self._call, method, args, kwargs or {})]

    def _call(self, method: str, args: tuple, kwargs: dict) -> Any:
        from vllm.config import set_current_vllm_config

        try:
            with set_current_vllm_config(self.worker.vllm_config), torch.no_grad():
                result = getattr(self.worker, method)(*args, **kwargs)
        except BaseException as error:
            self.calls.append((method, f"{type(error).__name__}: {error}"))
            raise
        self.calls.append((method, ""))
        return result

    async def sleep(self, level: int) -> None:
        """Weights are gone after it, their addresses are not: that is what level 2 means."""
        self.calls.append((f"sleep {level}", ""))
        for parameter in self.model.parameters():
            parameter.data.view(torch.uint8).fill_(0xA5)

    def __getattr__(self, name: str) -> Any:
        if name not in ("wake_up", "pause_generation", "resume_generation", "wait_for_requests_to_drain") and not name.startswith("reset_"):
            raise AttributeError(name)

        async def nothing(*_: Any, **__: Any) -> None:
            self.calls.append((name, ""))

        return nothing

    def forget(self) -> None:
        self.worker.hr_engine_side().forget()

    def status(self) -> dict | None:
        return self.worker.hr_status()

    def receipt(self) -> dict | None:
        return self.worker.hr_receipt()

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.model.named_parameters()}

    def taken_calls(self) -> list[tuple[str, str]]:
        calls, self.calls = self.calls, []
        return calls

    def filled_up(self) -> list[bool]:
        """Whether the rows behind a vocabulary are zero, as vLLM's own loader leaves them."""
        return [not tensor[ROWS:].any() for tensor in self.model.parameters() if len(tensor) > ROWS]

    def digests(self) -> list[dict[str, str]]:
        """Of the halves of each tensor, by its name in a checkpoint: fused parameters taken apart again, and what fills up cut off."""
        held: dict[str, torch.Tensor] = {}
        heads = MODEL["num_attention_heads"], MODEL["num_key_value_heads"]
        width = MODEL["hidden_size"] // heads[0]
        for name, tensor in self.model.named_parameters():
            if ".qkv_proj." in name:
                for part, rows in zip("qkv", tensor.split([heads[0] * width, heads[1] * width, heads[1] * width]), strict=True):
                    held[name.replace("qkv_proj", f"{part}_proj")] = rows
            elif ".gate_up_proj." in name:
                for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                    held[name.replace("gate_up_proj", f"{part}_proj")] = rows
            else:
                held[name] = tensor[:ROWS]
        return [{name: digest(tensor.chunk(2)[rank]) for name, tensor in held.items()} for rank in range(2)]


class Server(vLLMHttpServer):
    """verl's server, which makes its engine here from the arguments that it would start vLLM's with."""

    async def run_server(self, args: Any) -> None:
        self.engine = await asyncio.to_thread(Engine, args)
        self._server_port = 1

    async def look(self, what: str) -> Any:
        """At the engine, beside what its worker's thread is doing."""
        return getattr(self.engine, what)()

    async def call(self, method: str, *args: Any) -> Any:
        """What the worker returns, which verl's own collective_rpc drops."""
        return (await self.engine.collective_rpc(method, args=args))[0]
