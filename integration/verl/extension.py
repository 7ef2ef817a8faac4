"""The worker extension for vLLM under verl: `worker_extension_cls=headrace.integration.verl.extension.HeadraceWorkerExtension`.

It speaks verl's bucket wire as the class that it extends does, and writes what comes through a headrace.Receiver. The first update teaches
the names and takes the stock path; later ones are written in place and proven. What is not understood takes the stock path, and the log
says so once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import torch
from verl.utils.vllm.patch import patch_vllm_moe_model_weight_loader
from verl.utils.vllm.vllm_quant_utils import is_quantized_model
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from ..buckets import Bucket
from .engine_side import CONTROL, FILLER, Announcement, EngineSide, Tensor, Verdict
from .wire import BucketReceiver

__all__ = ["HeadraceWorkerExtension"]

logger = logging.getLogger(__name__)

_ASKED = "it was asked for, once"


class HeadraceWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension with Headrace under it. Every attribute of ours begins with hr_: vLLM allows none that its worker has.

    Options come through vLLM's own additional_config: {"headrace": {"stock": bool, "wait_s": seconds, "threads": number}}.
    """

    def update_weights_from_ipc(self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False) -> None:
        """Called by verl's adapter on every worker, once an update."""
        reason = self.hr_stock_reason(peft_config, use_shm)
        if reason:
            self.hr_say_once(f"updates take verl's stock path: {reason}")
            self.hr_verdict = Verdict(reason, once=reason == _ASKED)
            self.hr_engine_side().passed_by()
            super().update_weights_from_ipc(peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
            return
        if self.device is None:
            self.device = torch.device("cpu")
        side, stock = self.hr_engine_side(), _Stock(self)
        refused = side.receive(self.hr_bucket_receiver, stock.take)
        if stock.tensors:
            # After post-processing the storages are those that the next update finds.
            stock.finish()
            refused = refused or side.learn(tuple(stock.tensors))
        if refused:
            self.hr_unbound = refused
            self.hr_say_once(f"updates take verl's stock path: {refused}")

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: dict | None, base_sync_done: bool) -> Any:
        """What is announced on the stock path is declined; weights then come through this wire."""
        control = next((tensor for name, tensor in weights if name == CONTROL), None)
        if control is not None:
            self.hr_verdict.send(Announcement.parse(control.cpu().numpy().tobytes()))
        weights = [(name, tensor) for name, tensor in weights if name not in (CONTROL, FILLER)]
        return super()._update_weights(weights, peft_config, base_sync_done) if weights else None

    def hr_stock_reason(self, peft_config: dict | None, use_shm: bool) -> str:
        """Why this update is left to verl's own code; empty if it is not."""
        left = self.__dict__.get("hr_stock_updates", 0)
        if left:
            self.hr_stock_updates = left - 1
            return _ASKED
        if self.hr_options().get("stock"):
            return "additional_config asks for it"
        if self._is_qat_model or self._is_modelopt_qat or is_quantized_model(self.model_runner.vllm_config):
            return "the model is quantised"
        if peft_config:
            return "LoRA"
        if self._use_mtp_drafter_weight_sync() and self._get_draft_model_config() is None:
            return "a draft model without a config is kept in step"
        if torch.version.hip is not None:
            return "ROCm"
        if not use_shm or (self.device is not None and self.device.type != "cpu"):
            return f"weights are on {self.device}: this version writes host memory only"
        return self.__dict__.get("hr_unbound", "")

    def hr_engine_side(self) -> EngineSide:
        """This worker's end, made at the first call."""
        if "hr_side" not in self.__dict__:
            job = f"verl-{os.environ.get('VERL_RAY_JOB_ID', '0')}"
            self.hr_side = EngineSide(self.hr_bind_model, job=job, wait_s=self.hr_wait_s())
            self.hr_bucket_receiver = BucketReceiver(self._get_zmq_handle(), self.hr_wait_s())
        return self.hr_side

    def hr_bind_model(self, job: str, tensors: tuple[Tensor, ...]) -> _BoundVllmModel:
        return _BoundVllmModel(self, job, tensors)

    def hr_options(self) -> dict:
        """additional_config["headrace"] of this engine."""
        options = getattr(self.model_runner.vllm_config, "additional_config", None)
        return dict(options.get("headrace", {})) if isinstance(options, dict) else {}

    def hr_wait_s(self) -> float:
        return float(self.hr_options().get("wait_s", 600.0))

    def hr_say_once(self, text: str) -> None:
        said = self.__dict__.setdefault("hr_said", set())
        if text not in said:
            said.add(text)
            logger.warning("headrace: %s", text)

    def hr_use_stock(self, updates: int = 1) -> None:
        """The next updates take verl's stock path. For collective_rpc."""
        self.hr_stock_updates = int(updates)

    def hr_status(self) -> dict | None:
        """The receiver's status, and how many tensors come which way; None before the model is bound."""
        model = self.hr_engine_side().model
        return {**dataclasses.asdict(model.receiver.status()), "ways": dict(model.ways())} if model else None

    def hr_receipt(self) -> dict | None:
        """The receipt of the last update that came through verl's wire."""
        receipt = self.hr_engine_side().receipt
        return dataclasses.asdict(receipt) if receipt is not None else None

    def hr_fingerprint(self) -> dict[str, str]:
        """Fingerprints of what this worker holds, by checkpoint name."""
        model = self.hr_engine_side().model
        return {name: value.value for name, value in model.receiver.fingerprint().items()} if model else {}


class _BoundVllmModel:
    """The model of a vLLM worker behind headrace's engine for vLLM, which tries out what lands where."""

    def __init__(self, worker: HeadraceWorkerExtension, job: str, tensors: tuple[Tensor, ...]) -> None:
        from ..vllm.engine import HeadraceEngine, HeadraceInitInfo, drafter_part

        class Engine(HeadraceEngine):
            """verl's trainer and its engines set out together: the hook waits for the worker's thread. A drafter that verl keeps in step
            is written by the same update."""

            def _parts(self) -> tuple:
                if not worker._use_mtp_drafter_weight_sync():
                    return super()._parts()
                return *super()._parts(), drafter_part(config, worker._get_drafter_model(), worker._get_draft_model_config())

            def _quiescent(self) -> bool:
                return worker.hr_side.quiescent()

            def end_session(self) -> None:
                self._session = False

        config = worker.model_runner.vllm_config
        # verl sends it to sleep before every update: at level 1, which keeps weights, where there is such a drafter, else at level 2.
        self._discards = bool(getattr(config.model_config, "enable_sleep_mode", False)) and not worker._use_mtp_drafter_weight_sync()
        shard = getattr(config.parallel_config, "data_parallel_rank", 0) or 0
        replica = f"replica-{os.environ.get('VERL_REPLICA_RANK', '0')}" + (f"-dp-{shard}" if shard else "")
        self._engine = Engine(None, config, worker.device, worker.model_runner.model)
        self._engine.init_transfer_engine(
            HeadraceInitInfo(
                job=job,
                names=[name for name, _, _ in tensors],
                dtypes=[dtype for _, dtype, _ in tensors],
                shapes=[list(shape) for _, _, shape in tensors],
                engine=replica,
                threads=int(worker.hr_options().get("threads", 0)),
                deadline_ms=int(worker.hr_wait_s() * 1_000),
            )
        )
        self.receiver = self._engine.receiver

    def open(self) -> None:
        self._engine.start_weight_update()

    def close_session(self) -> None:
        self._engine.end_session()

    def close(self) -> None:
        self._engine.shutdown()

    def discards(self) -> bool:
        return self._discards

    def ways(self) -> dict[str, int]:
        return self._engine.binding.counts()


class _Stock:
    """The first update, or one of a model that could not be bound: verl's own way, with a list of what came."""

    def __init__(self, worker: HeadraceWorkerExtension) -> None:
        self._worker = worker
        self.tensors: list[Tensor] = []

    def take(self, bucket: Bucket) -> None:
        from ..vllm.parts import in_parts

        if not self.tensors:
            self._worker.hr_say_once("this update takes verl's stock path and teaches the names")
            for model in self._worker._iter_all_models():
                patch_vllm_moe_model_weight_loader(model)
        self.tensors += [(entry.name, entry.dtype.travels, entry.shape) for entry in bucket.entries]
        with in_parts():  # a drafter's loader would ask for all of its layers in each bucket
            self._worker._update_weights(bucket.tensors(), peft_config=None, base_sync_done=False)

    def finish(self) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        for model, config in self._worker._iter_all_models_with_config():
            process_weights_after_loading(model, config, self._worker.device)
