"""Tensors that a model computes from its weights when they have been loaded, and computes again, in place, when they have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .shadow import digest


def derivations(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module, Callable[[], Any]]]:
    """What vLLM runs after loading beyond the modules' quantisation methods: (name, module, call)."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for name, module in model.named_modules():
        if is_deferred_attention_layer(module):
            yield name, module, lambda module=module: module.process_weights_after_loading(dtype)
    if callable(getattr(model, "process_weights_after_loading", None)):
        yield "the model", model, model.process_weights_after_loading


def _state(module: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Tensors of a module and its children: (tensor, whether it has to stay where it is). Parameters and buffers are what kernels read;
    plain attributes (copies of scales for the host) are made anew by each of vLLM's own reloads too."""
    tensors: dict[str, tuple[torch.Tensor, bool]] = {}
    for path, child in module.named_modules():
        for kind in (child._parameters, child._buffers, child.__dict__):
            for name, value in kind.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{path}.{name}" if path else name] = value.detach(), kind is not child.__dict__
    return tensors


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def unrepeatable(model: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """Runs every derivation again, on unchanged weights: {tensor: what is different then}. Empty: they may be run after each update."""
    problems: dict[str, str] = {}
    for name, module, call in derivations(model, dtype):
        before = {key: (_place(tensor), digest(tensor)) for key, (tensor, _) in _state(module).items()}
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            problems[name] = f"cannot be run again: {type(error).__name__}: {error}"
            continue
        after = _state(module)
        for key in sorted(before.keys() | after.keys()):
            full = key if module is model else f"{name}.{key}"
            if key not in after or key not in before:
                problems[full] = "is gone" if key not in after else "is new"
            elif after[key][1] and _place(after[key][0]) != before[key][0]:
                problems[full] = "lies elsewhere"
            elif digest(after[key][0]) != before[key][1]:
                problems[full] = "has other bytes"
    return problems


def derive(model: nn.Module, dtype: torch.dtype) -> None:
    """Computes them again."""
    with torch.no_grad():
        for _, _, call in derivations(model, dtype):
            call()
