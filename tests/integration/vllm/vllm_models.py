"""Small models of vLLM's own classes on the CPU, loaded by its own loader, and checkpoints for them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from headrace.integration.vllm.shadow import random_tensor

DENSE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA = DENSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = DENSE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
QWEN2 = DENSE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3_MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MIXTRAL = DENSE | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3 = DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,
}
# Latent attention without experts: the part of DeepSeek whose post-processing runs on a CPU.
DEEPSEEK_DENSE = DEEPSEEK_V3 | {"first_k_dense_replace": 2}
# With a layer behind those of the target that drafts, without experts too.
DEEPSEEK_MTP = DEEPSEEK_V3 | {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
DEEPSEEK_MOE_MTP = DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}
EAGLE = LLAMA | {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass
class Loaded:
    model: torch.nn.Module
    vllm_config: Any
    model_config: Any = None  # of a drafter; a target's is in vllm_config


def seen(*classes: type) -> None:
    """Says which code a test ran: the class's file and its package's version."""
    from importlib import metadata

    for cls in classes:
        package = cls.__module__.partition(".")[0]
        print(f"{cls.__module__}.{cls.__qualname__}: {package} {metadata.version(package)}, {sys.modules[cls.__module__].__file__}")


@functools.cache
def folder(text: str) -> str:
    path = new_folder()
    (Path(path) / "config.json").write_text(text)
    return path


def new_folder() -> str:
    """A folder that is gone at the end of this process."""
    path = tempfile.mkdtemp(prefix="headrace-vllm-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def vllm_config_of(config: dict[str, Any], **parallel: Any) -> Any:
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    path = folder(json.dumps(config))
    return VllmConfig(
        model_config=ModelConfig(
            model=path, tokenizer=path, skip_tokenizer_init=True, dtype=config["dtype"], max_model_len=64, enforce_eager=True
        ),
        parallel_config=ParallelConfig(**parallel),
        device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(load_format="dummy"),
    )


def join_groups(rank: int = 0, ranks: int = 1, meeting: str = "") -> None:
    """vLLM's process groups over gloo, those of expert parallelism included, which vLLM makes only for a model with experts."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    meeting = meeting or os.path.join(new_folder(), "meeting")
    with set_current_vllm_config(vllm_config_of(QWEN3_MOE, tensor_parallel_size=ranks)):
        init_distributed_environment(ranks, rank, f"file://{meeting}", rank, backend="gloo")
        ensure_model_parallel_initialized(ranks, 1)


def load(config: dict[str, Any], *, processed: bool = True, rank: int = 0, **parallel: Any) -> Loaded:
    """A model as vLLM's own loader leaves it, with dummy weights. processed: with post-processing, for which experts need compiled
    operations."""
    from vllm.config import set_current_vllm_config

    if not torch.distributed.is_initialized():
        join_groups()
    vllm_config = vllm_config_of(config, **parallel)
    vllm_config.parallel_config.rank = rank
    with set_current_vllm_config(vllm_config):
        return Loaded(_made(vllm_config, vllm_config.model_config, processed), vllm_config)


def _made(vllm_config: Any, model_config: Any, processed: bool) -> torch.nn.Module:
    from vllm.model_executor.model_loader import get_model, get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    if processed:
        return get_model(vllm_config=vllm_config, model_config=model_config)
    with set_default_torch_dtype(torch.bfloat16):
        model = get_model_loader(vllm_config.load_config).create_model(vllm_config=vllm_config, model_config=model_config)
    for number, parameter in enumerate(model.parameters()):
        parameter.data.copy_(random_tensor(parameter.dtype, parameter.shape, number))
    return model


def load_with_drafter(
    target: dict[str, Any],
    draft: dict[str, Any] | None = None,
    *,
    share: bool = True,
    processed: bool = True,
    rank: int = 0,
    **parallel: Any,
) -> tuple[Loaded, Loaded]:
    """A target and its drafter: the MTP layers of the target's own checkpoint, or an EAGLE model of another. share: embedding and output
    head are the target's, as vLLM's proposer makes it. processed: see load()."""
    from vllm.config import SpeculativeConfig, VllmConfig, set_current_vllm_config
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    if not torch.distributed.is_initialized():
        join_groups()
    alone = vllm_config_of(target, **parallel)
    alone.parallel_config.rank = rank
    speculative = SpeculativeConfig(
        method="eagle" if draft else "mtp",
        model=folder(json.dumps(draft)) if draft else None,
        num_speculative_tokens=1,
        target_model_config=alone.model_config,
        target_parallel_config=alone.parallel_config,
    )
    vllm_config = VllmConfig(
        model_config=alone.model_config,
        parallel_config=alone.parallel_config,
        device_config=alone.device_config,
        load_config=alone.load_config,
        speculative_config=speculative,
    )
    with set_current_vllm_config(vllm_config):
        model = _made(vllm_config, vllm_config.model_config, processed)
        drafter = _made(vllm_config, speculative.draft_model_config, processed)
        if share:
            proposer = types.SimpleNamespace(model=drafter, vllm_config=vllm_config, use_local_argmax_reduction=False)
            SpecDecodeBaseProposer._maybe_share_embeddings(proposer, model)
            SpecDecodeBaseProposer._maybe_share_lm_head(proposer, model)
            seen(SpecDecodeBaseProposer)
    seen(type(model), type(drafter))
    return Loaded(model, vllm_config), Loaded(drafter, vllm_config, speculative.draft_model_config)


@functools.cache
def _entries(text: str) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    import transformers

    config = json.loads(text)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder(text)), dtype=torch.bfloat16)
    experts = next((config[key] for key in EXPERTS if key in config), 0)
    mixtral = config["model_type"] == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    entries = []
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        stem, _, leaf = name.rpartition(".")
        if mixtral:
            stem = stem.replace(".mlp", ".block_sparse_moe")
        if leaf == "gate_up_proj":
            for e in range(experts):
                entries += [(f"{stem}.{e}.{w}.weight", tensor.dtype, (shape[1] // 2, shape[2])) for w in (gate, up)]
        elif leaf == "down_proj":
            entries += [(f"{stem}.{e}.{down}.weight", tensor.dtype, shape[1:]) for e in range(experts)]
        else:
            entries.append((f"{stem}.{leaf}", tensor.dtype, shape))
    return tuple(entries)


def entries_of(config: dict[str, Any]) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    """Names, dtypes and shapes of a checkpoint as published: those of the transformers model, experts one by one."""
    return _entries(json.dumps(config))


def checkpoint(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    return {name: random_tensor(dtype, shape, seed * 100_000 + i) for i, (name, dtype, shape) in enumerate(entries_of(config))}


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything that a model holds: parameters, buffers, and tensors that are plain attributes of its modules."""
    held = {}
    for path, module in model.named_modules():
        for kind in (module._parameters, module._buffers, module.__dict__):
            held.update({f"{path}.{name}": value.detach() for name, value in kind.items() if isinstance(value, torch.Tensor)})
    return held


def stock_load(loaded: Loaded, tensors: dict[str, torch.Tensor], *, processed: bool = True) -> None:
    """What vLLM does with a checkpoint: its load_weights, then its post-processing."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with set_current_vllm_config(loaded.vllm_config), torch.no_grad():
        loaded.model.load_weights(iter(tensors.items()))
        if processed:
            process_weights_after_loading(loaded.model, loaded.model_config or loaded.vllm_config.model_config, torch.device("cpu"))


def mtp_checkpoint(seed: int, config: dict[str, Any] = DEEPSEEK_MTP) -> dict[str, torch.Tensor]:
    """As published: the drafting layer behind the others, with copies of embedding and output head."""
    tensors = checkpoint(config, seed)
    hidden, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    layer = f"model.layers.{config['num_hidden_layers']}."
    kinds = {layer + name[len(last) :]: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if name.startswith(last)}
    kinds |= {layer + name: (torch.bfloat16, (hidden,)) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    kinds[layer + "eh_proj.weight"] = torch.bfloat16, (hidden, 2 * hidden)
    own = {name: random_tensor(*kind, seed * 100_000 + 50_000 + i) for i, (name, kind) in enumerate(kinds.items())}
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return tensors | own | {layer + name: tensors[original] for name, original in copies.items()}


def eagle_checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Of EAGLE, as published: without output head, its names without the word model."""
    hidden = EAGLE["hidden_size"]
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in checkpoint(EAGLE, seed + 500).items()
        if name not in ("lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")
    }
    return tensors | {"fc.weight": random_tensor(torch.bfloat16, (hidden, 2 * hidden), seed * 100_000 + 90_000)}
