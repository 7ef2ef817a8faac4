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


def meeting(job: str, engine: str, model: str) -> tuple[str, str]:
    """Job and engine under which a model's trainer and workers meet. A sender sends to all that is in its job, so that a drafter that is
    updated alone has its own."""
    import headrace

    if model not in ("target", "draft"):
        raise headrace.InvalidArgument(f"an engine has no model {model!r}", expected="target or draft", actual=model)
    return (job, engine) if model == "target" else (f"{job}-draft", f"{engine}-draft")
