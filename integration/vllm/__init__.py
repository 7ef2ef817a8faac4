"""Headrace inside vLLM 0.33: a weight transfer engine, its trainer, a worker extension and a scheduler that waits for the guard.

vLLM finds register() through the entry point group `vllm.general_plugins`; `--weight-transfer-config '{"backend": "headrace"}'` chooses the
engine. docs/guides/vllm.md has the whole of it.
"""

from __future__ import annotations

BACKEND = "headrace"


def register() -> None:
    """Makes the engine and its trainer known to vLLM's factories. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    package = "headrace.integration.vllm"
    for factory, module, name in (
        (WeightTransferEngineFactory, f"{package}.engine", "HeadraceEngine"),
        (WeightTransferTrainerFactory, f"{package}.trainer", "HeadraceTrainerEngine"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, module, name)
