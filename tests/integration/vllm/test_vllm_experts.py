"""Which expert each slot holds, read from vLLM's own state of a layer after a rebalance."""

from __future__ import annotations

import headrace
import pytest
import torch
import vllm_models as models
from headrace.integration.vllm.experts import expert_maps
from headrace.integration.vllm.parts import Part
from torch import nn
from vllm.distributed.eplb.eplb_state import EplbLayerState, EplbState, compute_logical_maps

EXPERTS = 4


def layers_of(held: list[list[int]]) -> nn.Module:
    """Layers with vLLM's state, for these physical slots, from vLLM's own inverse of the map."""
    places, counts = compute_logical_maps(torch.tensor(held), EXPERTS)
    model = nn.Module()
    for layer in range(len(held)):
        runner, router = nn.Module(), nn.Module()
        runner.eplb_state = router.eplb_state = EplbLayerState()
        runner.eplb_state.set_layer_state(layer, torch.zeros(len(held), 8), places, counts)
        runner.add_module("router", router)
        model.add_module(str(layer), runner)
    models.seen(EplbLayerState, EplbState)
    return model


def test_the_initial_map_is_vllms() -> None:
    initial = list(EplbState.build_initial_global_physical_to_logical_map(EXPERTS, 3))
    assert expert_maps(layers_of([initial, initial])) == [initial, initial]


def test_a_rebalanced_map_is_read_layer_by_layer() -> None:
    held = [[3, 0, 2, 2, 1, 0, 3], [0, 1, 2, 3, 3, 3, 3], [1, 0, 3, 2, 1, 1, 0]]
    assert expert_maps(layers_of(held)) == held


def test_a_model_without_load_balancing_has_none() -> None:
    assert expert_maps(nn.Sequential(nn.Linear(2, 2))) == []


def test_a_map_with_a_hole_is_refused() -> None:
    model = layers_of([[0, 1, 2, 3, 0]])
    state = next(model.children()).eplb_state
    state.logical_to_physical_map = state.logical_to_physical_map.clone()
    state.logical_to_physical_map[0, 1] = 0
    with pytest.raises(headrace.FailedPrecondition, match="slot 4 holds no expert"):
        expert_maps(model)


def test_experts_whose_map_is_not_to_be_seen_cannot_be_updated_in_an_engine_that_moves_them() -> None:
    model = layers_of([[0, 1, 2, 3]])
    runner = next(model.children())
    runner.register_parameter("w13_weight", nn.Parameter(torch.zeros(4, 2)))
    part = Part(model, None, 1, "draft.")
    assert part.unbalanced([]) == {}
    assert list(part.unbalanced(["draft.0.w13_weight", "draft.norm.weight"])) == ["draft.0.w13_weight"]
    runner.eplb_state.logical_to_physical_map = None
    assert list(part.unbalanced([])) == ["draft.0"]
    del runner.eplb_state
    assert list(part.unbalanced([])) == ["draft.0"]
