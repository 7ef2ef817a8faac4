"""One rank of a divided model, in a process of its own: binds it, loads a checkpoint as vLLM does and as we do, and tells what differs.

vllm_rank.py RANK RANKS MEETING: prints one JSON document {case: {...}}.
"""

from __future__ import annotations

import json
import sys

import headrace
import torch
import vllm_models as models
from headrace.integration.vllm.binding import Binder, Brought, family_layouts
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


def run(config: dict, rank: int, ranks: int, parallel: dict) -> dict:
    processed = not any(key in config for key in models.EXPERTS)
    stock, ours = (models.load(config, processed=processed, rank=rank, tensor_parallel_size=ranks, **parallel) for _ in range(2))
    brought = [Brought(*entry) for entry in models.entries_of(config)]
    ep = ranks if parallel.get("enable_expert_parallel") else 1
    hf_config = ours.vllm_config.model_config.hf_config.to_dict()
    with set_current_vllm_config(ours.vllm_config):
        layouts = family_layouts(hf_config, brought, dtype=torch.bfloat16, tp=ranks, ep=ep, rank=rank)
        binding = Binder(ours.model, brought, processed=processed).bind(layouts)
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
    print(json.dumps({case: run(config, rank, ranks, parallel) for case, (config, parallel) in CASES.items()}))


if __name__ == "__main__":
    main()
