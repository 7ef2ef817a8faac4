"""One rank of a divided model, in a process of its own: binds it, loads a checkpoint as vLLM does and as we do, and tells what differs.

vllm_rank.py RANK RANKS MEETING: prints one JSON document {case: {...}}.
"""

from __future__ import annotations

import json
import sys

import headrace
import torch
import vllm_models as models
from headrace.integration.vllm.binding import Binder, Brought, Member, bind_together, family_layouts
from headrace.integration.vllm.engine import drafter_part
from headrace.integration.vllm.parts import Part, table_of
from headrace.integration.vllm.shadow import same_bytes
from vllm.config import set_current_vllm_config

CASES = {
    "qwen3": (models.QWEN3 | {"tie_word_embeddings": False}, {}),
    "llama with a vocabulary that is padded": (models.LLAMA | {"vocab_size": 330}, {}),
    "qwen2 with biases": (models.QWEN2, {}),
    "mixtral": (models.MIXTRAL, {}),
    "qwen3_moe": (models.QWEN3_MOE, {}),
    "qwen3_moe with divided experts": (models.QWEN3_MOE, {"enable_expert_parallel": True}),
    "deepseek_v3": (models.DEEPSEEK_V3, {}),
    "deepseek_v3 with divided experts": (models.DEEPSEEK_V3, {"enable_expert_parallel": True}),
}
# With a drafter beside the target, whose layer has experts too.
DRAFTED = {
    "deepseek_v3 with a drafter": (True, {}),
    "deepseek_v3 with a drafter and divided experts": (True, {"enable_expert_parallel": True}),
    "deepseek_v3 with a drafter that shares nothing": (False, {}),
}


def run_drafted(share: bool, rank: int, ranks: int, parallel: dict) -> dict:
    config = models.DEEPSEEK_MOE_MTP
    parallel = {"tensor_parallel_size": ranks, **parallel}
    stock, ours = (models.load_with_drafter(config, share=share, processed=False, rank=rank, **parallel) for _ in range(2))
    tensors = models.mtp_checkpoint(1, config)
    brought = [Brought(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    ep = ranks if parallel.get("enable_expert_parallel") else 1
    vllm_config = ours[0].vllm_config
    parts = (Part(ours[0].model, vllm_config.model_config, ranks), drafter_part(vllm_config, ours[1].model, ours[1].model_config))
    with set_current_vllm_config(vllm_config):
        members = []
        for part in parts:
            described = part.family_config(tensors, drafter=bool(part.prefix))
            layouts = family_layouts(described, brought, dtype=torch.bfloat16, tp=part.tp, ep=ep, rank=rank)
            members.append(Member(Binder(part.model, brought, processed=False), layouts, part.prefix))
        binding = bind_together(members)
    wanted = {tensor.name for tensor in binding.layout.tensors}
    binding.layout.place(table_of(parts, binding.direct), [(name, tensor) for name, tensor in tensors.items() if name in wanted])
    different = []
    for mine, theirs in zip(ours, stock, strict=True):
        models.stock_load(theirs, tensors, processed=False)
        held, expected = models.state(mine.model), models.state(theirs.model)
        different += [name for name in expected if not same_bytes(held[name], expected[name])]
    return {
        "layout": binding.source,
        "parameters": len({parameter.data_ptr() for part in parts for parameter in part.model.parameters()}),
        "direct": len(binding.direct),
        "refused": binding.refused,
        "not_direct": binding.not_direct,
        "different": different,
    }


def run(config: dict, rank: int, ranks: int, parallel: dict) -> dict:
    processed = not any(key in config for key in models.EXPERTS)
    stock, ours = (models.load(config, processed=processed, rank=rank, tensor_parallel_size=ranks, **parallel) for _ in range(2))
    brought = [Brought(*entry) for entry in models.entries_of(config)]
    ep = ranks if parallel.get("enable_expert_parallel") else 1
    hf_config = ours.vllm_config.model_config.hf_config.to_dict()
    with set_current_vllm_config(ours.vllm_config):
        layouts = family_layouts(hf_config, brought, dtype=torch.bfloat16, tp=ranks, ep=ep, rank=rank)
        binding = bind_together([Member(Binder(ours.model, brought, processed=processed), layouts)])
    tensors = models.checkpoint(config, seed=1)
    models.stock_load(stock, tensors, processed=processed)
    held = dict(ours.model.named_parameters())
    wanted = {tensor.name for tensor in binding.layout.tensors}
    table = headrace.StorageTable.from_tensors({param: held[param] for param in binding.direct})
    binding.layout.place(table, [(name, tensor) for name, tensor in tensors.items() if name in wanted])
    theirs, mine = models.state(stock.model), models.state(ours.model)
    return {
        "layout": binding.source,
        "parameters": len(held),
        "direct": len(binding.direct),
        "refused": binding.refused,
        "not_direct": binding.not_direct,
        "different": [key for key in theirs if not same_bytes(theirs[key], mine[key])],
    }


def main() -> None:
    rank, ranks, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    models.join_groups(rank, ranks, meeting)
    found = {case: run(config, rank, ranks, parallel) for case, (config, parallel) in CASES.items()}
    found |= {case: run_drafted(share, rank, ranks, parallel) for case, (share, parallel) in DRAFTED.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
