"""checkpoint-engine's wire between its parameter server and an engine's worker, both ends, for host memory.

`update_weights_from_ipc` takes the place of checkpoint_engine.worker's function of that name; `receive_into` writes the same stream
through a headrace.Receiver; `CheckpointEngineSender` drives a stock worker.
"""

from .receiver import receive_into, serve, update_weights_from_ipc
from .sender import CheckpointEngineSender

__all__ = ["CheckpointEngineSender", "receive_into", "serve", "update_weights_from_ipc"]
