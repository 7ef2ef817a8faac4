"""The parameter server's end of checkpoint-engine's wire: drives one worker, stock or ours, from host memory."""

import pickle
from collections.abc import Iterable

import zmq

from ..buckets import BucketWriter
from ..host_memory import Segment, tensor_handle
from ..peer_socket import PeerFailed, PeerGone, PeerSocket, PeerTimeout

__all__ = ["CheckpointEngineSender"]

_ALIGNMENT = 256


class CheckpointEngineSender:
    """Sends updates to the worker that connects to `handle` (ipc://… or an abstract ipc://@…).

    The buffer is one shared segment of two buckets of `bucket_bytes`: one is filled while the worker takes the other. Its name is gone
    as soon as the worker has opened it. A stock worker must be able to import headrace.integration.host_memory, whose function the
    handle names. `wait_s` bounds each wait for the worker. One thread at a time.
    """

    def __init__(self, handle: str, bucket_bytes: int = 512 << 20, wait_s: float = 600.0, context: zmq.Context | None = None):
        if bucket_bytes < _ALIGNMENT:
            raise ValueError(f"buckets of {bucket_bytes} bytes, at least {_ALIGNMENT} are needed")
        self._handle = handle
        # A second half at an odd place would make every view in it misaligned.
        self._bucket_bytes = (bucket_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        self._wait_s = wait_s
        self._context = context or zmq.Context.instance()

    def send(self, weights: Iterable[tuple[str, object]]) -> None:
        """One update from (name, torch tensor of host memory). Raises PeerFailed with the worker's words, PeerTimeout, PeerGone.

        A worker that fails is told so and stops. An exception of `weights` is told as well.
        """
        segment = Segment(2 * self._bucket_bytes)
        try:
            with PeerSocket(self._context, zmq.REQ, self._handle, self._wait_s) as peer:
                _Update(peer, segment).run(weights)
        finally:
            segment.unlink()


class _Update:
    def __init__(self, peer: PeerSocket, segment: Segment):
        self._peer = peer
        self._segment = segment

    def run(self, weights: Iterable[tuple[str, object]]) -> None:
        import torch

        self._send(tensor_handle(self._segment, self._segment.size, "uint8", (self._segment.size,)))
        writer = BucketWriter(self._segment.memory, _ALIGNMENT, may_write=self._settle, full=self._send_table)
        try:
            with torch.no_grad():
                for name, tensor in weights:
                    writer.put(name, tensor)
            writer.flush()
            self._settle()
        except (PeerFailed, PeerGone, PeerTimeout):
            raise
        except BaseException as error:
            self._give_up(error)
            raise
        self._finish()

    def _finish(self) -> None:
        """The two None. A worker answers both whatever happens to it, and leaves."""
        answers = []
        for _ in range(2):
            self._send(None)
            answers.append(self._peer.settle())
        for answer in filter(None, answers):
            raise PeerFailed(answer.decode("utf-8", "replace"))

    def _send_table(self, metas: list[dict]) -> None:
        self._settle()
        self._send(metas)

    def _send(self, payload: object) -> None:
        self._peer.send(pickle.dumps(payload, 4), "although an update is waiting for it")

    def _settle(self) -> None:
        answer = self._peer.settle()
        self._segment.unlink()
        if answer:
            error = PeerFailed(answer.decode("utf-8", "replace"))
            self._peer.send(pickle.dumps(RuntimeError("the update has failed"), 4), "which waits for the end")
            raise error

    def _give_up(self, error: BaseException) -> None:
        """Tells a worker that waits for the next bucket that none will come; what the worker says now no longer matters."""
        try:
            self._peer.settle()
            self._peer.send(pickle.dumps(RuntimeError(f"the sender failed: {error}"), 4), "which waits for the end")
        except (PeerGone, PeerTimeout):
            pass
