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

from . import meeting
from .binding import Binder, Binding, Brought, Member, bind_together, family_layouts, tensors_of
from .parts import DRAFT_PREFIX, Part, table_of

logger = logging.getLogger(__name__)


@dataclass
class HeadraceInitInfo(WeightTransferInitInfo):
    """What a trainer says when it comes: where to meet, and every tensor of its checkpoint.

    processed: whether the model went through vLLM's post-processing, as every model that a worker loads has; only tests say no.
    model: "target", or "draft" for a trainer of the drafter alone, which meets the workers under names of its own: see meeting().
    """

    job: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    engine: str = "vllm"
    threads: int = 0
    deadline_ms: int = 60_000
    processed: bool = True
    model: str = "target"


@dataclass
class HeadraceUpdateInfo(WeightTransferUpdateInfo):
    """kind: "receive" waits until `version` is committed here; "abort" raises, which is how vLLM's worker learns that a session is over."""

    kind: str = "receive"
    version: str = ""
    reason: str = ""


class HeadraceEngine(WeightTransferEngine[HeadraceInitInfo, HeadraceUpdateInfo]):
    """Receives on threads of a headrace.Receiver, straight into a loaded model's parameters. The worker's calls come from one thread.

    A session that vLLM aims at the drafter is one of an engine of the same kind for the drafter, with a binding and a receiver of its own.
    """

    init_info_cls = HeadraceInitInfo
    update_info_cls = HeadraceUpdateInfo
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.draft: HeadraceEngine | None = None  # of the drafter alone, once vLLM has shown it
        self._draft_info: HeadraceInitInfo | None = None
        self._aimed_at_draft = False
        self.binding: Binding | None = None
        self.receiver: headrace.Receiver | None = None
        self._bound_for: HeadraceInitInfo | None = None
        self._deadline_ms = 0
        self._places: dict[str, tuple] = {}
        self._session = False  # between the worker's start and finish: no forward pass runs
        self._awaited = ""
        self._mark = 0  # the receiver's, from before a trainer could begin

    # What the worker calls.

    def set_weight_update_target(self, model: nn.Module, model_config: Any) -> None:
        """The session that begins is the drafter's."""
        if self.draft is None or self.draft.model is not model:
            if self.draft is not None:
                self.draft.shutdown()
            self.draft = _DraftEngine(self, model, model_config)
        self._aimed_at_draft = True

    def reset_weight_update_target(self) -> None:
        self._aimed_at_draft = False

    def init_transfer_engine(self, init_info: HeadraceInitInfo) -> None:
        """Binds the model and starts listening. A trainer that comes later replaces the one before; a torn rank stays bound as it is, and
        its guard closed. The drafter is bound where vLLM shows it: when its first session begins.

        Raises headrace.Unsupported with every parameter that can be written neither in place nor through vLLM's loader, and
        headrace.FailedPrecondition where a torn rank would have to be bound anew: its guard would open on what it holds.
        """
        job, engine = meeting(init_info.job, init_info.engine, init_info.model)
        if init_info.model == "draft" and not self._is_draft():
            if self.draft is not None and self.draft._is_torn():
                self.draft.init_transfer_engine(init_info)
            elif self.draft is not None:
                # Between sessions vLLM may keep a quantised copy in place of an output head: it is bound as a session shows it.
                self.draft._unbind()
            self._draft_info = init_info
            return
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
        parts = self._parts()
        with self._in_vllm():
            binding = bind_together([self._member(part, brought, init_info.processed) for part in parts], self._held())
            problems = dict(binding.refused)
            for part in parts:
                if init_info.processed:
                    problems |= part.unrepeatable()
                if self.parallel_config.enable_eplb:
                    problems |= part.unbalanced(param for _, params in binding.leased for param in params)
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
            table_of(parts, [spec.name for spec in binding.layout.storages]),
            binding.layout,
            job=job,
            engine=engine,
            rank=rank,
            ranks=ranks,
            threads=init_info.threads,
            deadline_ms=init_info.deadline_ms,
            hooks=self._hooks(init_info.processed),
        )

    def start_weight_update(self) -> None:
        """From here on no forward pass runs until finish or a failed update: what vLLM's caller promises with this call."""
        if self._aimed_at_draft:
            if self.draft.receiver is None and self._draft_info is not None:
                self.draft.init_transfer_engine(self._draft_info)
            return self.draft.start_weight_update()
        receiver = self._need_receiver()
        self._check_places()
        self._mark = receiver.mark()
        self._session = True
        self._awaited = ""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base's, without waiting for an accelerator. What it raises ends the worker's session."""
        if self._aimed_at_draft:
            return self.draft.update_weights(update_info)
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._session = False
            raise

    def receive_weights(self, update_info: HeadraceUpdateInfo) -> None:
        if self._aimed_at_draft:
            return self.draft.receive_weights(update_info)
        receiver = self._need_receiver()
        if update_info.kind == "abort":
            raise headrace.Cancelled(f"the session was ended by its trainer: {update_info.reason}")
        if update_info.kind != "receive" or not update_info.version:
            raise headrace.InvalidArgument(f"update of kind {update_info.kind!r} to version {update_info.version!r}")
        self._awaited = update_info.version
        receiver.wait_for(update_info.version, since=self._mark, deadline_ms=self._deadline_ms)

    def finish_weight_update(self) -> None:
        """Every byte is in place, proven and committed, or this raises and may be called again."""
        if self._aimed_at_draft:
            return self.draft.finish_weight_update()
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
        """Lets the trainer go, and that of the drafter too, since vLLM's call does not say which; serving goes on. init_transfer_engine()
        may follow.

        A rank that is torn keeps its receiver, and with it the guard closed, until the next trainer's update or the end of the process.
        """
        self._draft_info = None
        if self.draft is not None:
            self.draft.shutdown()
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
            "shared": list(self.binding.shared),
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
        has_derived = processed and any(part.has_derived() for part in self._parts())
        return headrace.Hooks(
            quiescent=self._quiescent,
            locate=self._locate,
            expert_map=self._expert_maps if self.parallel_config.enable_eplb else None,
            derive=self._derive if has_derived else None,
            staged={"load_weights": self._load_group},
        )

    def _quiescent(self) -> None:
        if not self._session:
            raise headrace.FailedPrecondition("vLLM has no weight update open: start_weight_update comes first")

    def _locate(self) -> dict[str, torch.Tensor]:
        named = {name: tensor for part in self._parts() for name, tensor in part.tensors()}
        return {spec.name: named[spec.name] for spec in self.binding.layout.storages}

    def _expert_maps(self) -> list[list[int]]:
        return [slots for part in self._parts() for slots in part.expert_maps()]

    def _derive(self) -> None:
        with self._in_vllm():
            for part in self._parts():
                part.derive()

    def _load_group(self, group: str, inputs: list[headrace.View], work: memoryview, outputs: list[headrace.View]) -> None:
        with self._in_vllm():
            for part in self._parts():
                named = [(view.name, view.torch()) for view in inputs if view.name in self.binding.loads[part.prefix]]
                if named:
                    part.load(named)

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

    def _parts(self) -> tuple[Part, ...]:
        """The models that an update of this engine writes, all at once."""
        return (Part(self.model, self.model_config, self.parallel_config.tensor_parallel_size),)

    def _held(self) -> Mapping[str, torch.Tensor]:
        """Tensors whose memory is another engine's to write."""
        return {}

    def _is_draft(self) -> bool:
        return False

    def _member(self, part: Part, brought: list[Brought], processed: bool) -> Member:
        config = part.family_config([tensor.name for tensor in brought], drafter=self._is_draft() or bool(part.prefix))
        layouts = family_layouts(config, brought, dtype=part.config.dtype, **self._division(part.tp))
        return Member(Binder(part.model, brought, processed=processed), layouts, part.prefix)

    def _place(self) -> tuple[int, int]:
        """This worker among all of the data-parallel engine, as vLLM counts them."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return rank, parallel.data_parallel_size * parallel.world_size

    def _division(self, tp: int) -> dict[str, int]:
        """How a model is divided, in the words of a layout. Ranks of tensor parallelism are neighbours in vLLM."""
        parallel = self.parallel_config
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
        if binding.shared:
            logger.warning("headrace: left aside, since they lead to memory of another model only: %s", ", ".join(binding.shared))
        if binding.unreached:
            logger.warning("headrace: no tensor of the trainer leads to %s", ", ".join(binding.unreached))


class _DraftEngine(HeadraceEngine):
    """For the drafter alone. Embedding and output head that it shares with the target are the target's to write."""

    def __init__(self, target: HeadraceEngine, model: nn.Module, model_config: Any) -> None:
        super().__init__(target.config, target.vllm_config, target.device, model)
        self.model_config = self._default_model_config = model_config
        self._target_model = target.model

    def _parts(self) -> tuple[Part, ...]:
        return (Part(self.model, self.model_config, draft_ranks(self.vllm_config)),)

    def _held(self) -> Mapping[str, torch.Tensor]:
        return tensors_of(self._target_model)

    def _is_draft(self) -> bool:
        return True


def draft_ranks(vllm_config: Any) -> int:
    """By how many ranks tensor parallelism divides the drafter."""
    parallel = getattr(vllm_config.speculative_config, "draft_parallel_config", None) or vllm_config.parallel_config
    return parallel.tensor_parallel_size


def drafter_part(vllm_config: Any, model: nn.Module, model_config: Any) -> Part:
    """A drafter that takes its part of every update of the target."""
    return Part(model, model_config, draft_ranks(vllm_config), DRAFT_PREFIX)


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
