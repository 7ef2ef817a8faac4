"""What `--worker-extension-cls` adds to vLLM's worker: questions that are answered through collective_rpc."""

from __future__ import annotations

from typing import Any


class HeadraceWorkerExtension:
    """For `--worker-extension-cls`. Answers are plain values, which cross processes and HTTP. model: "target", or "draft" for a drafter
    that is updated alone."""

    def hr_bind(self, model: str = "target") -> dict[str, Any]:
        """How the model of this worker was bound, and why what is not direct is not."""
        return _engine_of(self, model).status()

    def hr_status(self, model: str = "target") -> dict[str, Any]:
        """State and version of this rank, the guard of its engine, the last failure."""
        status = _engine_of(self, model).status()
        return {key: status[key] for key in ("bound", "endpoint", "state", "version", "serving", "last_failure") if key in status}

    def hr_fingerprint(self, model: str = "target") -> dict[str, str]:
        """{checkpoint tensor: 32 hexadecimal digits}, read from live storage through the placements."""
        receiver = _engine_of(self, model).receiver
        return {} if receiver is None else {name: found.value for name, found in receiver.fingerprint().items()}

    def hr_receipt(self, model: str = "target") -> dict[str, Any]:
        """Of the last committed update."""
        return _engine_of(self, model).receipt()


def _engine_of(worker: Any, model: str) -> Any:
    from .engine import HeadraceEngine

    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, HeadraceEngine):
        raise RuntimeError(f"the worker's weight transfer engine is {type(engine).__name__}: start vLLM with backend headrace")
    if model == "draft" and engine.draft is None:
        raise RuntimeError("no session of the drafter has begun yet")
    return engine.draft if model == "draft" else engine
