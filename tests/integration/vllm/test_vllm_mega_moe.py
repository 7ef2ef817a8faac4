"""DeepSeek-V4.1's experts in the layout of DeepGEMM's kernel: our placements against vLLM's DeepGemmMegaMoEExperts, byte for byte.

The object is made without its constructor, which demands an SM100 GPU; its tensors are made by its own _create_weights, and its own loaders
write them.
"""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import headrace
import pytest
import torch
import vllm_models as models
from headrace.integration.vllm.shadow import random_tensor, same_bytes
from torch import nn
from vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe import MEGA_MOE_WEIGHT_FORMATS, DeepGemmMegaMoEExperts

V41 = json.loads((Path(__file__).parents[3] / "examples" / "deepseek_v41" / "config.json").read_text())
LAYER = 3
RUNTIME = f"model.layers.{LAYER}.ffn.experts."
BROUGHT = f"layers.{LAYER}.ffn.experts."
SHARED = f"layers.{LAYER}.ffn.shared_experts."
_jobs = itertools.count()


def smaller(experts: int) -> dict[str, Any]:
    config = copy.deepcopy(V41)
    config["text_config"] |= {"n_routed_experts": experts, "hidden_size": 512, "moe_intermediate_size": 256, "num_experts_per_tok": 2}
    return config


def experts_of(config: dict[str, Any], *, physical: int, local: int, start: int, shared: bool = False) -> DeepGemmMegaMoEExperts:
    text = config["text_config"]
    experts = object.__new__(DeepGemmMegaMoEExperts)
    nn.Module.__init__(experts)
    experts.num_experts = physical
    experts.num_local_experts = local
    experts.experts_start_idx = start
    experts.experts_end_idx = start + local
    experts.num_logical_experts = text["n_routed_experts"]
    experts.hidden_size = text["hidden_size"]
    experts.intermediate_size = text["moe_intermediate_size"]
    experts.weight_format = MEGA_MOE_WEIGHT_FORMATS["mxfp4"]
    experts.num_shared_experts = int(shared)
    experts.shared_spec = experts.weight_format.shared[0] if shared else None
    experts._create_weights()
    models.seen(DeepGemmMegaMoEExperts)
    return experts


def layout_of(config: dict[str, Any], **request: Any) -> headrace.Layout:
    layout = headrace.Layout.build(config=config, family="deepseek_v4", **request)
    return layout.only([spec.name for spec in layout.storages if spec.name.startswith(RUNTIME)])


def brought(layout: headrace.Layout, seed: int = 0) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors of these storages, with random bytes."""
    dtypes = {"I8": torch.int8, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
    return {t.name: random_tensor(dtypes[t.dtype], t.shape, seed * 10_000 + i) for i, t in enumerate(layout.tensors)}


def parameters(experts: DeepGemmMegaMoEExperts) -> dict[str, torch.Tensor]:
    return {RUNTIME + name: parameter.data for name, parameter in experts.named_parameters()}


def load_as_vllm(experts: DeepGemmMegaMoEExperts, tensors: dict[str, torch.Tensor]) -> None:
    """As vLLM's load_weights does: the parameter and the shard from the name, scales under their runtime name."""
    for name, tensor in tensors.items():
        if name.startswith(SHARED):
            experts_name = name.replace(".scale", ".weight_scale")
            for leaf in ("shared_l1_weight", "shared_l2_weight"):
                if leaf == ("shared_l2_weight" if ".w2." in name else "shared_l1_weight"):
                    param = getattr(experts, leaf + ("_scale" if name.endswith("scale") else ""))
                    experts.shared_weight_loader(param, tensor, experts_name)
            continue
        expert, shard, leaf = name.removeprefix(BROUGHT).split(".")
        param_name = ("w2_" if shard == "w2" else "w13_") + ("weight_scale" if leaf == "scale" else "weight")
        param = getattr(experts, param_name)
        assert experts.weight_loader(param, tensor, RUNTIME + param_name, shard, int(expert), return_success=True)


def check(experts: DeepGemmMegaMoEExperts, layout: headrace.Layout, tensors: dict[str, torch.Tensor]) -> None:
    ours = {name: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).zero_() for name, t in parameters(experts).items()}
    layout.place(headrace.StorageTable.from_tensors(ours), tensors.items())
    load_as_vllm(experts, tensors)
    theirs = parameters(experts)
    assert {spec.name: spec.shape for spec in layout.storages} == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert [name for name in theirs if not same_bytes(theirs[name], ours[name])] == []
    assert all(theirs[name].view(torch.uint8).any() if theirs[name].is_contiguous() else theirs[name].any() for name in theirs)


@pytest.mark.parametrize("rank", [0, 5, 127])
def test_v41_on_128_ranks(rank: int) -> None:
    layout = layout_of(V41, layout="ep128", rank=rank)
    check(experts_of(V41, physical=384, local=3, start=3 * rank), layout, brought(layout))


@pytest.mark.parametrize(("redundant", "ep", "rank"), [(4, 1, 0), (8, 1, 0), (4, 2, 1), (4, 4, 3)])
def test_every_replica_of_an_expert_is_written(redundant: int, ep: int, rank: int) -> None:
    config = smaller(4)
    local = (4 + redundant) // ep
    layout = layout_of(config, layout=f"ep{ep}", rank=rank, redundant_experts=redundant)
    check(experts_of(config, physical=4 + redundant, local=local, start=rank * local), layout, brought(layout))


def test_a_rotated_map_of_experts_is_followed() -> None:
    """After a rebalance: our receiver asks the engine's live map; vLLM's loader, which knows the first one only, is told each slot."""
    config = smaller(4)
    layout = layout_of(config, layout="ep1", redundant_experts=4)
    experts = experts_of(config, physical=8, local=8, start=0)
    held = [3, 0, 2, 2, 1, 0, 3, 1]
    tensors = brought(layout)
    for slot, expert in enumerate(held):
        for shard, leaf in itertools.product(("w1", "w2", "w3"), ("weight", "scale")):
            param = getattr(experts, ("w2_" if shard == "w2" else "w13_") + ("weight" if leaf == "weight" else "weight_scale"))
            experts._load_weight(param.data[slot], tensors[f"{BROUGHT}{expert}.{shard}.{leaf}"], shard, leaf == "scale")
    theirs = parameters(experts)
    ours = {name: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).zero_() for name, t in theirs.items()}
    hooks = headrace.Hooks(expert_map=lambda: [held] * config["text_config"]["num_hidden_layers"])
    with headrace.Receiver(headrace.StorageTable.from_tensors(ours), layout, job=f"mega-{next(_jobs)}", hooks=hooks) as receiver:
        with receiver.update("rotated/1") as update:
            update.load(tensors)
        assert update.receipt.proven
    assert [name for name in theirs if not same_bytes(theirs[name], ours[name])] == []


def test_a_shared_expert_in_the_kernel_has_its_scales_repeated() -> None:
    layout = layout_of(V41, layout="ep384", rank=7, variant="plain+fused_shared")
    assert any("shared_l1" in spec.name for spec in layout.storages)
    check(experts_of(V41, physical=384, local=1, start=7, shared=True), layout, brought(layout))
