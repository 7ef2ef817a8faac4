"""The bind check against vLLM's own models and loaders: what is written in place is what they would have made."""

from __future__ import annotations

import headrace
import pytest
import torch
import vllm_models as models
from headrace.integration.vllm.binding import Binder, Binding, Brought, Member, bind_together, family_layouts
from headrace.integration.vllm.shadow import same_bytes
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def bind(loaded: models.Loaded, entries, *, processed: bool = True) -> Binding:
    from vllm.config import set_current_vllm_config

    brought = [Brought(*entry) for entry in entries]
    config = loaded.vllm_config.model_config.hf_config.to_dict()
    with set_current_vllm_config(loaded.vllm_config):
        layouts = family_layouts(config, brought, dtype=torch.bfloat16)
        return bind_together([Member(Binder(loaded.model, brought, processed=processed), layouts)])


NAMED = {
    "llama": (models.LLAMA, True),
    "qwen2": (models.QWEN2, True),
    "qwen3": (models.QWEN3, True),
    "deepseek_dense": (models.DEEPSEEK_DENSE, True),
    "qwen3_moe": (models.QWEN3_MOE, False),
    "mixtral": (models.MIXTRAL, False),
    "deepseek_v3": (models.DEEPSEEK_V3, False),
}


@pytest.mark.parametrize("name", NAMED)
def test_every_parameter_of_a_named_model_is_written_in_place(name: str) -> None:
    config, processed = NAMED[name]
    loaded = models.load(config, processed=processed)
    models.seen(type(loaded.model), QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    before = {key: tensor.clone() for key, tensor in models.state(loaded.model).items()}
    binding = bind(loaded, models.entries_of(config), processed=processed)
    assert binding.refused == {}
    assert binding.not_direct == {}
    counts = binding.counts()
    assert counts["direct"] > 0
    assert counts["leased"] == 0
    assert counts["direct"] + counts["dropped"] == len(models.entries_of(config))
    after = models.state(loaded.model)
    assert [key for key in before if not same_bytes(before[key], after[key])] == [], "a live tensor was touched"


@pytest.mark.parametrize("name", NAMED)
def test_placements_give_the_bytes_of_vllms_loaders(name: str) -> None:
    config, processed = NAMED[name]
    stock, ours = models.load(config, processed=processed), models.load(config, processed=processed)
    binding = bind(ours, models.entries_of(config), processed=processed)
    tensors = models.checkpoint(config, seed=1)
    models.stock_load(stock, tensors, processed=processed)
    held = dict(ours.model.named_parameters())
    table = headrace.StorageTable.from_tensors({param: held[param] for param in binding.direct})
    binding.layout.place(table, [(key, tensor) for key, tensor in tensors.items() if key not in binding.dropped])
    theirs, mine = models.state(stock.model), models.state(ours.model)
    assert theirs.keys() == mine.keys()
    assert [key for key in theirs if not same_bytes(theirs[key], mine[key])] == []


def test_a_loader_that_turns_the_rows_is_found_and_leased() -> None:
    loaded = models.load(models.LLAMA)
    projection = loaded.model.model.layers[1].mlp.down_proj.weight
    original = projection.weight_loader

    def turned(param: torch.Tensor, tensor: torch.Tensor, *args, **kwargs) -> None:
        original(param, tensor.flip(0), *args, **kwargs)

    projection._weight_loader = turned
    binding = bind(loaded, models.entries_of(models.LLAMA))
    assert binding.refused == {}
    assert list(binding.not_direct) == ["model.layers.1.mlp.down_proj.weight"]
    assert "other bytes" in binding.not_direct["model.layers.1.mlp.down_proj.weight"]
    assert binding.counts()["leased"] == 1


def test_a_parameter_that_post_processing_changes_is_refused() -> None:
    loaded = models.load(models.LLAMA)
    module = loaded.model.model.layers[0].mlp.gate_up_proj

    class Shuffling(type(module.quant_method)):
        def process_weights_after_loading(self, layer) -> None:
            layer.weight.data.copy_(layer.weight.data.roll(1, 0))

    module.quant_method = Shuffling()
    before = module.weight.detach().clone()
    binding = bind(loaded, models.entries_of(models.LLAMA))
    assert list(binding.refused) == ["model.layers.0.mlp.gate_up_proj.weight"]
    assert "post-processing" in binding.refused["model.layers.0.mlp.gate_up_proj.weight"]
    assert same_bytes(module.weight, before), "the trial ran on the live module"


def test_a_name_that_vllms_loader_refuses_is_refused_by_name() -> None:
    loaded = models.load(models.LLAMA)
    entries = (*models.entries_of(models.LLAMA), ("model.layers.0.self_attn.odd.weight", torch.bfloat16, (4, 4)))
    binding = bind(loaded, entries)
    assert list(binding.refused) == ["model.layers.0.self_attn.odd.weight"]


def test_a_shape_that_the_model_has_not_is_refused_by_name() -> None:
    loaded = models.load(models.LLAMA)
    entries = [
        (name, dtype, (shape[0], shape[1] + 2) if name == "model.layers.0.mlp.up_proj.weight" else shape)
        for name, dtype, shape in models.entries_of(models.LLAMA)
    ]
    binding = bind(loaded, entries)
    assert "model.layers.0.mlp.up_proj.weight" in binding.refused


def test_leased_groups_that_come_in_turns_become_one() -> None:
    loaded = models.load(models.LLAMA)
    layer = loaded.model.model.layers[0]
    for weight in (layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight):
        original = weight.weight_loader
        weight._weight_loader = lambda param, tensor, *args, original=original: original(param, tensor.flip(0), *args)
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "down", "up")]
    entries = sorted(models.entries_of(models.LLAMA), key=lambda entry: names.index(entry[0]) if entry[0] in names else -1)
    binding = bind(loaded, entries)
    assert binding.refused == {}
    assert binding.leased == [(tuple(names), ("model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight"))]


def test_a_value_that_goes_through_a_python_number_is_refused_by_name() -> None:
    loaded = models.load(models.LLAMA)
    norm = loaded.model.model.norm.weight
    norm.weight_loader = lambda param, tensor: param.data.fill_(float(tensor[0]))
    binding = bind(loaded, models.entries_of(models.LLAMA))
    assert list(binding.refused) == ["model.norm.weight"]
    assert "cannot be followed" in binding.refused["model.norm.weight"]


def test_a_loader_that_needs_the_rest_of_the_layer_is_refused_by_name() -> None:
    loaded = models.load(models.LLAMA)
    last: list[torch.Tensor] = []
    mlp = loaded.model.model.layers[0].mlp
    up = mlp.gate_up_proj.weight.weight_loader

    def noted(param: torch.Tensor, tensor: torch.Tensor, *args) -> None:
        last[:] = [tensor]
        up(param, tensor, *args)

    def mixed(param: torch.Tensor, tensor: torch.Tensor, *args) -> None:
        param.data.fill_(float(last[0][0, 0]) if last else 0.0)
        last.clear()
        param.data[0].copy_(tensor[0])

    mlp.gate_up_proj.weight._weight_loader = noted
    mlp.down_proj.weight._weight_loader = mixed
    binding = bind(loaded, models.entries_of(models.LLAMA))
    assert list(binding.refused) == ["model.layers.0.mlp.down_proj.weight"]
    assert "alone" in binding.refused["model.layers.0.mlp.down_proj.weight"]
