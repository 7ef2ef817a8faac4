"""What `--worker-extension-cls` adds to vLLM's worker: questions that are answered through collective_rpc."""

from __future__ import annotations

from typing import Any


class HeadraceWorkerExtension:
    """For `--worker-extension-cls`. Answers are plain values, which cross processes and HTTP."""

    def hr_bind(self) -> dict[str, Any]:
        """How the model of this worker was bound, and why what is not direct is not."""
        return _engine_of(self).status()

    def hr_status(self) -> dict[str, Any]:
        """State and version of this rank, the guard of its engine, the last failure."""
        status = _engine_of(self).status()
        return {key: status[key] for key in ("bound", "endpoint", "state", "version", "serving", "last_failure") if key in status}

    def hr_fingerprint(self) -> dict[str, str]:
        """{checkpoint tensor: 32 hexadecimal digits}, read from live storage through the placements."""
        receiver = _engine_of(self).receiver
        return {} if receiver is None else {name: found.value for name, found in receiver.fingerprint().items()}

    def hr_receipt(self) -> dict[str, Any]:
        """Of the last committed update."""
        return _engine_of(self).receipt()


def _engine_of(worker: Any) -> Any:
    from .engine import HeadraceEngine

    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, HeadraceEngine):
        raise RuntimeError(f"the worker's weight transfer engine is {type(engine).__name__}: start vLLM with backend headrace")
    return engine
