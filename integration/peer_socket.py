"""One ZeroMQ REQ or REP socket to a peer, with a deadline on every wait and an end to it when the peer goes.

The peers' own loops block without a limit. Here a wait ends with a message, with PeerGone as soon as the connection breaks, or with
PeerTimeout.
"""

import math
import os
import socket
import stat
import time
from typing import Self

import zmq
from headrace.errors import Cancelled, DeadlineExceeded, Unavailable
from zmq.utils.monitor import recv_monitor_message

__all__ = ["PeerFailed", "PeerGone", "PeerSocket", "PeerTimeout", "Stop"]

# The last acknowledgement may still be on its way when a socket closes.
_LINGER_MS = 5_000
# Whoever connects is often first, by less than ZeroMQ's own 100 ms. Where it is by more, ever less often.
_RECONNECT_MS, _RECONNECT_MAX_MS = 1, 20
# Until a socket's file that nobody reads any more says so.
_PROBE_S = 0.2


class PeerTimeout(DeadlineExceeded):
    """The peer did not answer within the deadline."""


class PeerGone(Unavailable, ConnectionError):
    """The peer closed the connection, or died, while something was expected of it."""


class PeerFailed(Cancelled, RuntimeError):
    """The peer says that it failed; the message holds its own words."""


class Stop:
    """Ends the waits of the sockets that were made with it, from any thread: they raise Cancelled. For good."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.why = ""

    def set(self, why: str) -> None:
        self.why = why
        os.eventfd_write(self.descriptor, 1)

    def check(self) -> None:
        if self.why:
            raise Cancelled(self.why)

    def __del__(self) -> None:
        os.close(self.descriptor)


class PeerSocket:
    """A REQ socket that binds, or a REP socket that connects. One thread at a time; a context manager.

    `wait_s` bounds each single wait, and `stop` ends it.
    """

    def __init__(self, context: zmq.Context, kind: int, handle: str, wait_s: float, stop: Stop | None = None):
        if not 0 < wait_s < math.inf:
            raise ValueError(f"a wait of {wait_s} s")
        self._handle = handle
        self._asks = kind == zmq.REQ
        self._wait_s = wait_s
        self._stop = stop
        self._bound: tuple[str, int] | None = None  # its file and that file's number
        self._owed = False  # the answer to what was asked last
        self._socket = context.socket(kind)
        self._socket.linger = _LINGER_MS
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
        )
        self._there = False  # the peer, since ZeroMQ's handshake
        self._went = False
        self._stranger = False  # the next connection to end is one without a handshake
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        if stop is not None:
            self._poller.register(stop.descriptor, zmq.POLLIN)
        try:
            if self._asks:
                self._bind()
            else:
                self._socket.connect(handle)
        except PeerGone:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise PeerGone(f"{handle}: {error}") from error

    def _bind(self) -> None:
        path = _file_of(self._handle)
        if path is None:
            self._socket.bind(self._handle)
            return
        _remove_socket(path)
        # ZeroMQ takes the file of a socket away by its name, some time after the socket's end: by then the name may be the next one's.
        first = f"{path}.{os.urandom(2).hex()}"
        self._socket.bind(f"ipc://{first}")
        try:
            os.link(first, path)
        except OSError as error:
            raise PeerGone(f"{self._handle}: {error}") from error
        finally:
            os.unlink(first)
        self._bound = (path, os.lstat(path).st_ino)

    def send(self, data: bytes, expected: str) -> None:
        """Sends one message; waits, while nobody is connected, for `expected`."""
        waiting = zmq.Poller()
        waiting.register(self._socket, zmq.POLLOUT)
        waiting.register(self._monitor, zmq.POLLIN)
        if self._stop is not None:
            waiting.register(self._stop.descriptor, zmq.POLLIN)
        deadline = time.monotonic() + self._wait_s
        try:
            while True:
                left_ms = max(0.0, deadline - time.monotonic()) * 1_000
                ready = dict(waiting.poll(left_ms))
                self._check_stop()
                if self._monitor in ready and self._peer_went() and self._asks:
                    raise PeerGone(f"{self._handle}: the peer went away, {expected}")
                if self._socket in ready:
                    self._socket.send(data, zmq.NOBLOCK)
                    self._owed = self._asks
                    return
                if left_ms == 0:
                    raise PeerTimeout(f"{self._handle}: nobody connected within {self._wait_s:g} s, {expected}")
        except zmq.ZMQError as error:
            raise PeerGone(f"{self._handle}: cannot send, {expected}: {error}") from error

    def receive(self, expected: str) -> bytes:
        """The next message, which should be `expected` (words for the error)."""
        deadline = time.monotonic() + self._wait_s
        gone = self._went
        while True:
            left_ms = max(0.0, deadline - time.monotonic()) * 1_000
            ready = dict(self._poller.poll(0 if gone else left_ms))
            self._check_stop()
            if self._socket in ready:
                self._owed = False
                return self._socket.recv()
            if gone:
                raise PeerGone(f"{self._handle}: the peer went away instead of sending {expected}")
            if self._monitor in ready:
                gone = self._peer_went()
            elif left_ms == 0:
                raise PeerTimeout(f"{self._handle}: no {expected} within {self._wait_s:g} s")

    def settle(self) -> bytes:
        """The answer to what a REQ side sent last, or nothing where it was read: before it the peer may still read memory of this side."""
        return self.receive("an answer") if self._owed else b""

    def _check_stop(self) -> None:
        if self._stop is not None:
            self._stop.check()

    def lost(self) -> bool:
        """Whether whom this socket connects to is not there: no more, or not yet."""
        self._peer_went()
        return self._went or not self._there

    def _peer_went(self) -> bool:
        """Reads the connection's events; true when the connection has ended. The wires know no second one.

        Who connects and leaves without ZeroMQ's handshake, as _is_listened_to() does, was no peer.
        """
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._there = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._stranger = True
            elif self._stranger:
                self._stranger = False
            elif self._there:
                self._there, self._went = False, True
        return self._went

    def close(self, discard: bool = False) -> None:
        """Closes; with `discard`, drops what was not sent yet. Takes a bound socket's file away."""
        if self._socket.closed:
            return
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if discard else _LINGER_MS)
        if self._bound:
            _remove_socket(*self._bound)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        failed = kind is not None
        # What a failed REQ side has not sent yet is of no use; a REP side's last answer must still reach the peer.
        self.close(discard=failed and self._asks)
        # Whether or not this socket has heard yet that its peer is gone: another connection may have told of it first.
        if failed and not self._asks:
            _remove_left(_file_of(self._handle))


def _file_of(handle: str) -> str | None:
    """The file of an ipc:// address; abstract ones (with an @) and other transports have none."""
    path = handle.removeprefix("ipc://")
    return None if path == handle or path.startswith("@") else path


def _remove_left(path: str | None) -> None:
    """A process that was killed has left its socket's file; the next one's of that name stays."""
    if not path:
        return
    try:
        inode = os.lstat(path).st_ino
        if not _is_listened_to(path):
            _remove_socket(path, inode)
    except OSError:
        return  # gone, or another user's: what failed before is what counts


def _is_listened_to(path: str) -> bool:
    """Whether a process accepts at a socket's file. One that is on its way out may still do so: then the connection ends without a word."""
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(path)
                if probe.recv(1):
                    return True
            except ConnectionError:
                continue
            except OSError:
                return True
    return False


def _remove_socket(path: str, inode: int | None = None) -> None:
    """Removes a socket's file, whosever it is or that of `inode`; anything else of that name is not ours to remove."""
    try:
        found = os.lstat(path)
        if stat.S_ISSOCK(found.st_mode) and inode in (None, found.st_ino):
            os.unlink(path)
    except FileNotFoundError:
        pass
