"""A transformers model as an engine: its parameters are the live storage, and updates leave what load_state_dict leaves."""

from __future__ import annotations

import copy

import headrace
import pytest
import torch
import transformers

CONFIGS = {
    "llama": transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=320
    ),
    "tied qwen3": transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=320,
        tie_word_embeddings=True,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_three_updates_leave_what_load_state_dict_leaves(name: str) -> None:
    print(f"transformers {transformers.__version__}, {transformers.__file__}")
    live = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()
    stock = copy.deepcopy(live)
    places = {key: tensor.data_ptr() for key, tensor in live.state_dict().items()}
    tokens = torch.arange(12).reshape(1, 12)
    with headrace.Receiver(headrace.StorageTable.from_module(live), job=f"transformers-{name.replace(' ', '-')}") as receiver:
        for step in (1, 2, 3):
            torch.manual_seed(step)
            trained = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16)
            weights = trained.state_dict() | {key: buffer for key, buffer in trained.named_buffers()}
            with receiver.update(f"run/{step}") as update:
                update.load(weights)
            assert update.receipt.proven
            stock.load_state_dict(trained.state_dict())
            assert [key for key, tensor in stock.state_dict().items() if not torch.equal(tensor, live.state_dict()[key])] == []
            with torch.no_grad():
                assert torch.equal(live(tokens).logits, stock(tokens).logits)
    assert {key: tensor.data_ptr() for key, tensor in live.state_dict().items()} == places
