"""Which expert each physical slot holds now, as vLLM's load balancer has it."""

from __future__ import annotations

import headrace
import torch
from torch import nn


def physical_to_logical(logical_to_physical: torch.Tensor, replicas: torch.Tensor, slots: int) -> list[int]:
    """The inverse of a layer's map [logical, at most replicas] with its number of replicas [logical]."""
    experts = [-1] * slots
    for expert, (row, count) in enumerate(zip(logical_to_physical.tolist(), replicas.tolist(), strict=True)):
        for slot in row[:count]:
            experts[slot] = expert
    if -1 in experts:
        raise headrace.FailedPrecondition(f"physical slot {experts.index(-1)} holds no expert: a rebalance is under way")
    return experts


def expert_maps(model: nn.Module) -> list[list[int]]:
    """[MoE layer][physical slot], layers in the model's order."""
    states = {}
    for module in model.modules():
        state = getattr(module, "eplb_state", None)  # a layer and its router show the same one
        if state is not None and state.logical_to_physical_map is not None:
            states[id(state)] = state
    return [
        physical_to_logical(state.logical_to_physical_map, state.logical_replica_count, int(state.logical_replica_count.sum()))
        for state in states.values()
    ]
