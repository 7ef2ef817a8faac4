"""Shared by all tests: a run directory of one's own, and a look at what is left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import time
import uuid

import pytest


@pytest.fixture(autouse=True)
def run_directory(monkeypatch):
    """Sockets, locks and guard pages lie here, in a path short enough for a socket; nothing of them may be left."""
    folder = tempfile.mkdtemp(prefix="hr-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield folder
    gc.collect()
    left = [os.path.join(path, name) for path, _, names in os.walk(folder) for name in names]
    shutil.rmtree(folder)
    assert not left


@pytest.fixture(autouse=True)
def control_c_interrupts():
    """Also where the tests were started in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def job() -> str:
    return f"job-{uuid.uuid4().hex[:8]}"


def open_files() -> list[str]:
    """What /proc/self/fd shows, by what it is."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            pass  # the listing's own
    return sorted(target.split(":")[0] for target in targets)


def mapped_segments() -> list[str]:
    """Shared memory of ours that is mapped."""
    with open("/proc/self/maps") as maps:
        return [line.rsplit(" ", 1)[-1].strip() for line in maps if "memfd:headrace" in line]


def eventually(holds) -> None:
    """Asks until it holds. What is asked makes a round trip, which is all the waiting there is."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
