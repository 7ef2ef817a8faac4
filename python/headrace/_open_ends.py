"""Receivers and senders that are open, and threads that wait at them: the interpreter's end leaves no thread, socket or file behind."""

from __future__ import annotations

import atexit
import threading
import weakref

_ends: weakref.WeakSet = weakref.WeakSet()
_waits: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

# For a thread whose wait has ended already.
_JOIN_S = 5.0


def add(end) -> None:
    _ends.add(end)


def discard(end) -> None:
    _ends.discard(end)


def start_wait(wait) -> None:
    """Runs what ends when its end is closed, on a thread of its own that the interpreter's end does not wait for before that."""
    thread = threading.Thread(target=wait, name="headrace-wait", daemon=True)
    _waits.add(thread)
    thread.start()


@atexit.register
def _close_all() -> None:
    for end in list(_ends):
        try:
            end.close()
        except Exception:  # the others are closed all the same
            import logging  # a tenth of the time that importing the package takes

            logging.getLogger(__name__).exception("%s could not be closed", type(end).__name__)
    for thread in list(_waits):
        thread.join(_JOIN_S)  # one that came back to a finished interpreter would take the process down
