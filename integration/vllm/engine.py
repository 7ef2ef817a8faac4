"""The engine `headrace`: what vLLM's worker calls to receive weights."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import headrace
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from .binding import Binder, Binding, Brought, family_layouts
from .derived import derivations, derive, unrepeatable
from .experts import expert_maps

logger = logging.getLogger(__name__)


@dataclass
class HeadraceInitInfo(WeightTransferInitInfo):
    """What a trainer says when it comes: where to meet, and every tensor of its checkpoint.

    processed: whether the model went through vLLM's post-processing, as every model that a worker loads has; only tests say no.
    """

    job: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    engine: str = "vllm"
    threads: int = 1
    deadline_ms: int = 60_000
    processed: bool = True


@dataclass
class HeadraceUpdateInfo(WeightTransferUpdateInfo):
    """kind: "receive" waits until `version` is committed here; "abort" raises, which is how vLLM's worker learns that a session is over."""

    kind: str = "receive"
    version: str = ""
    reason: str = ""


class HeadraceEngine(WeightTransferEngine[HeadraceInitInfo, HeadraceUpdateInfo]):
    """Receives on threads of a headrace.Receiver, straight into a loaded model's parameters. The worker's calls come from one thread."""

    init_info_cls = HeadraceInitInfo
    update_info_cls = HeadraceUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.binding: Binding | None = None
        self.receiver: headrace.Receiver | None = None
        self._bound_for: HeadraceInitInfo | None = None
        self._deadline_ms = 0
        self._places: dict[str, tuple] = {}
        self._session = False  # between the worker's start and finish: no forward pass runs
        self._awaited = ""
        self._mark = 0  # the receiver's, from before a trainer could begin

    # What the worker calls.

    def init_transfer_engine(self, init_info: HeadraceInitInfo) -> None:
        """Binds the model and starts listening. A trainer that comes later replaces the one before; a torn rank stays bound as it is, and
        its guard closed.

        Raises headrace.Unsupported with every parameter that can be written neither in place nor through vLLM's loader, and
        headrace.FailedPrecondition where a torn rank would have to be bound anew: its guard would open on what it holds.
        """
        if self._is_torn():
            if init_info != self._bound_for:
                raise headrace.FailedPrecondition(
                    "this rank is torn, and its trainer brings other tensors or terms than the one before: bring the same, or start the "
                    "engine anew",
                    rank=self._place()[0],
                )
            return
        self._unbind()
        logger.info("headrace %s in %s", headrace.__version__, check_release())
        brought = [
            Brought(name, _dtype(name, dtype), tuple(shape))
            for name, dtype, shape in zip(init_info.names, init_info.dtypes, init_info.shapes, strict=True)
        ]
        if self.device.type != "cpu":
            raise headrace.Unsupported(f"the model lies on {self.device}, and this release writes host memory only", name=str(self.device))
        with self._in_vllm():
            binder = Binder(self.model, brought, processed=init_info.processed)
            binding = binder.bind(family_layouts(self._model_config(), brought, dtype=self.model_config.dtype, **self._division()))
            problems = dict(binding.refused)
            if init_info.processed:
                problems |= unrepeatable(self.model, self.model_config.dtype)
            if self.parallel_config.enable_eplb:
                problems |= _rebalanced(self.model, binding)
        if problems:
            listed = "; ".join(f"{name}: {reason}" for name, reason in sorted(problems.items())[:20])
            raise headrace.Unsupported(
                f"{len(problems)} tensors of {type(self.model).__name__} cannot be updated: {listed}", name=min(problems)
            )
        self._report(binding)
        self.binding = binding
        self._bound_for = init_info
        self._places = {name: _place(tensor) for name, tensor in self._locate().items()}
        self._deadline_ms = init_info.deadline_ms
        rank, ranks = self._place()
        self.receiver = headrace.Receiver(
            binder.table([spec.name for spec in binding.layout.storages]),
            binding.layout,
            job=init_info.job,
            engine=init_info.engine,
            rank=rank,
            ranks=ranks,
            threads=init_info.threads,
            deadline_ms=init_info.deadline_ms,
            hooks=self._hooks(init_info.processed),
        )

    def start_weight_update(self) -> None:
        """From here on no forward pass runs until finish or a failed update: what vLLM's caller promises with this call."""
        receiver = self._need_receiver()
        self._check_places()
        self._mark = receiver.mark()
        self._session = True
        self._awaited = ""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base's, without waiting for an accelerator. What it raises ends the worker's session."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._session = False
            raise

    def receive_weights(self, update_info: HeadraceUpdateInfo) -> None:
        receiver = self._need_receiver()
        if update_info.kind == "abort":
            raise headrace.Cancelled(f"the session was ended by its trainer: {update_info.reason}")
        if update_info.kind != "receive" or not update_info.version:
            raise headrace.InvalidArgument(f"update of kind {update_info.kind!r} to version {update_info.version!r}")
        self._awaited = update_info.version
        receiver.wait_for(update_info.version, since=self._mark, deadline_ms=self._deadline_ms)

    def finish_weight_update(self) -> None:
        """Every byte is in place, proven and committed, or this raises and may be called again."""
        receiver = self._need_receiver()
        status = receiver.status()
        if not self._awaited or status.version != self._awaited or status.state != "idle":
            raise headrace.FailedPrecondition(
                f"finish without a committed update: version {status.version}, state {status.state}, last failure {status.last_failure}",
                expected=self._awaited or "an update",
                actual=str(status.version),
            )
        self._check_places()
        self._session = False

    def shutdown(self) -> None:
        """Lets the trainer go; serving goes on. init_transfer_engine() may follow.

        A rank that is torn keeps its receiver, and with it the guard closed, until the next trainer's update or the end of the process.
        """
        if self._is_torn():
            logger.error("headrace: this rank is torn and must not serve: its guard stays closed until another trainer's update")
            self._session = False
            return
        self._unbind()

    def _is_torn(self) -> bool:
        return self.receiver is not None and not self.receiver.closed and self.receiver.status().state in ("torn", "in_doubt")

    def _unbind(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None
        self.binding = None
        self._bound_for = None
        self._session = False

    # What people ask.

    def status(self) -> dict[str, Any]:
        """Of the binding and of the receiver, as plain values."""
        if self.receiver is None or self.binding is None:
            return {"bound": False}
        status = self.receiver.status()
        return {
            "bound": True,
            "endpoint": self.receiver.endpoint,
            "state": status.state,
            "version": status.version,
            "serving": status.serving,
            "last_failure": status.last_failure,
            "layout": self.binding.source,
            "tensors": self.binding.counts(),
            "leased": {param: self.binding.not_direct[param] for _, params in self.binding.leased for param in params},
            "dropped": list(self.binding.dropped),
            "unreached": list(self.binding.unreached),
        }

    def receipt(self) -> dict[str, Any]:
        """Of the last committed update on this rank: checkpoint tensors by how they came, parameters by how they were written."""
        receiver, binding = self._need_receiver(), self.binding
        status = receiver.status()
        return {
            "engine": status.engine,
            "rank": status.rank,
            "version": status.version,
            "updates": status.updates,
            "tensors": binding.counts(),
            "parameters": {"direct": len(binding.direct), "leased": sum(len(params) for _, params in binding.leased)},
        }

    # Hooks of the receiver, on a thread of its own.

    def _hooks(self, processed: bool) -> headrace.Hooks:
        has_derived = processed and next(iter(derivations(self.model, self.model_config.dtype)), None) is not None
        return headrace.Hooks(
            quiescent=self._quiescent,
            locate=self._locate,
            expert_map=(lambda: expert_maps(self.model)) if self.parallel_config.enable_eplb else None,
            derive=self._derive if has_derived else None,
            staged={"load_weights": self._load_group},
        )

    def _quiescent(self) -> None:
        if not self._session:
            raise headrace.FailedPrecondition("vLLM has no weight update open: start_weight_update comes first")

    def _locate(self) -> dict[str, torch.Tensor]:
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {spec.name: named[spec.name].detach() for spec in self.binding.layout.storages}

    def _derive(self) -> None:
        with self._in_vllm():
            derive(self.model, self.model_config.dtype)

    def _load_group(self, group: str, inputs: list[headrace.View], work: memoryview, outputs: list[headrace.View]) -> None:
        with self._in_vllm(), torch.no_grad():
            self.model.load_weights(iter([(view.name, view.torch()) for view in inputs]))

    # Ours.

    def _need_receiver(self) -> headrace.Receiver:
        if self.receiver is None:
            raise headrace.FailedPrecondition("no trainer has come: init_weight_transfer_engine comes first")
        return self.receiver

    def _check_places(self) -> None:
        """The receiver would refuse too; here the worker's caller is told by the call that is at fault."""
        for name, tensor in self._locate().items():
            if _place(tensor) != self._places[name]:
                raise headrace.FailedPrecondition(f"{name} lies elsewhere than when it was bound: a trainer has to come again", name=name)

    def _in_vllm(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)

    def _model_config(self) -> Mapping[str, Any]:
        return self.model_config.hf_config.to_dict()

    def _place(self) -> tuple[int, int]:
        """This worker among all of the data-parallel engine, as vLLM counts them."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return rank, parallel.data_parallel_size * parallel.world_size

    def _division(self) -> dict[str, int]:
        """How the model is divided, in the words of a layout. Ranks of tensor parallelism are neighbours in vLLM."""
        parallel = self.parallel_config
        tp = parallel.tensor_parallel_size
        tp_rank = parallel.rank % tp
        if not parallel.enable_expert_parallel:
            return {"tp": tp, "ep": 1, "rank": tp_rank}
        redundant = parallel.eplb_config.num_redundant_experts if parallel.enable_eplb else 0
        return {
            "tp": tp,
            "ep": tp * parallel.data_parallel_size,
            "rank": parallel.data_parallel_index * tp + tp_rank,
            "redundant": redundant,
        }

    def _report(self, binding: Binding) -> None:
        counts = binding.counts()
        logger.info("headrace: %s bound by %s: %s", type(self.model).__name__, binding.source or "no family", counts)
        for _, params in binding.leased:
            for param in params:
                logger.warning("headrace: %s goes through vLLM's own loader: %s", param, binding.not_direct[param])
        if binding.unreached:
            logger.warning("headrace: no tensor of the trainer leads to %s", ", ".join(binding.unreached))


def _rebalanced(model: nn.Module, binding: Binding) -> dict[str, str]:
    """Parameters of experts that would go through vLLM's loader, which knows only where experts were at first."""
    experts = tuple(name for name, module in model.named_modules() if getattr(module, "eplb_state", None) is not None)
    return {
        param: "vLLM's loader does not follow a rebalance of experts, and no family has a placement for it"
        for _, params in binding.leased
        for param in params
        if any(param.startswith(f"{name}.") for name in experts)
    }


def _dtype(name: str, text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise headrace.InvalidArgument(f"{name}: {text!r} is no dtype of torch", name=name, actual=text)
    return dtype


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def check_release() -> dict[str, Any]:
    """What this vLLM has of what the adapter meets. Raises headrace.Unsupported for an engine constructor that it does not know."""
    import vllm
    from vllm.v1.worker.gpu_worker import Worker

    parameters = tuple(inspect.signature(WeightTransferEngine.__init__).parameters)[1:]
    if parameters != ("config", "vllm_config", "device", "model"):
        raise headrace.Unsupported(
            f"vLLM {vllm.__version__} makes engines with {parameters}", expected="config, vllm_config, device, model"
        )
    return {"vllm": vllm.__version__, "shutdown_weight_transfer_engine": hasattr(Worker, "shutdown_weight_transfer_engine")}
