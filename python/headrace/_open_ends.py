"""Receivers and senders that are open, so that the end of the interpreter leaves no thread, socket or file of theirs behind."""

from __future__ import annotations

import atexit
import logging
import weakref

_ends: weakref.WeakSet = weakref.WeakSet()


def add(end) -> None:
    _ends.add(end)


def discard(end) -> None:
    _ends.discard(end)


@atexit.register
def _close_all() -> None:
    for end in list(_ends):
        try:
            end.close()
        except Exception:  # the others are closed all the same
            logging.getLogger(__name__).exception("%s could not be closed", type(end).__name__)
