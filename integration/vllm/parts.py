"""The models that one engine holds: its target, and perhaps a drafter beside it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import headrace
import torch
from torch import nn

from .derived import derivations, derive, unrepeatable
from .experts import expert_maps

DRAFT_PREFIX = "draft."


def in_parts() -> contextlib.AbstractContextManager:
    """While it is open, vLLM's drafters take a part of their checkpoint without asking for the rest."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return contextlib.nullcontext()
    return disable_mtp_completeness_check()


@dataclass(frozen=True)
class Part:
    """A model, vLLM's ModelConfig of it, and what the names of its storages begin with. tp: by how many ranks it is divided."""

    model: nn.Module
    config: Any
    tp: int
    prefix: str = ""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            yield self.prefix + name, tensor.detach()

    def family_config(self, names: Iterable[str], drafter: bool) -> Mapping[str, Any]:
        """config.json for the families. A drafter's layers are counted on from the target's, in a config that is the target's."""
        config = self.config.hf_config.to_dict()
        if not drafter:
            return config
        layers = [int(number) for name in names for number in re.findall(r"layers\.(\d+)\.", name)]
        return config | {"num_hidden_layers": max(layers, default=0) + 1, "num_nextn_predict_layers": 0}

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad(), in_parts():
            self.model.load_weights(iter(named))

    def has_derived(self) -> bool:
        return next(iter(derivations(self.model, self.config.dtype)), None) is not None

    def unrepeatable(self) -> dict[str, str]:
        return {self.prefix + name: reason for name, reason in unrepeatable(self.model, self.config.dtype).items()}

    def derive(self) -> None:
        derive(self.model, self.config.dtype)

    def expert_maps(self) -> list[list[int]]:
        return expert_maps(self.model)

    def unbalanced(self, leased: Iterable[str]) -> dict[str, str]:
        """Of an engine that moves experts: parameters of theirs that could not follow. leased: those that vLLM's loader would write."""
        states = {f"{self.prefix}{name}.": getattr(module, "eplb_state", None) for name, module in self.model.named_modules()}
        moving = tuple(name for name, state in states.items() if state is not None)
        seen = tuple(name for name in moving if states[name].logical_to_physical_map is not None)
        problems = {
            param: "vLLM's loader does not follow a rebalance of experts, and no family has a placement for it"
            for param in leased
            if param.startswith(moving)
        }
        for name, module in self.model.named_modules():
            if hasattr(module, "w13_weight") and not f"{self.prefix}{name}.".startswith(seen):
                problems[f"{self.prefix}{name}"] = "the engine balances experts, and where these live is not to be seen"
        return problems


def table_of(parts: Iterable[Part], names: Iterable[str]) -> headrace.StorageTable:
    tensors = {name: tensor for part in parts for name, tensor in part.tensors()}
    return headrace.StorageTable.from_tensors({name: tensors[name] for name in names})
