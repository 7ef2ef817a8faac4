"""vLLM's scheduler, stopped while the guard of its engine is closed."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from . import meeting

_HEADER, _SLOT = 128, 64
_NONE, _COMMITTED = 0, 1


class Guard:
    """The guard page of an engine, as docs/protocol.md describes it, read without a lock.

    Shut while a rank is being written, torn, prepared or in doubt, and while ranks differ in what they serve. Before the first update no
    rank has a version: vLLM serves what it loaded itself. The page is looked for until it is there; what stands in it from the start was
    left by an engine that is gone, and counts as nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._page: mmap.mmap | None = None
        self._file = (0, 0)  # what the page is mapped from
        self._left: dict[int, int] = {}
        if self._open():
            self._left = {rank: self._word(rank) for rank in range(self._ranks())}

    def shut(self) -> bool:
        slots = self._slots()
        if {slot[0] for slot in slots} <= {_NONE} and self._replaced() and self._open():
            slots = self._slots()
        states = {slot[0] for slot in slots}
        return not states <= {_NONE} and (states != {_COMMITTED} or len(set(slots)) != 1)

    def _replaced(self) -> bool:
        """Whether another page stands there: the last receiver that ends takes its page along, and the next one makes a new one."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) != self._file

    def _open(self) -> bool:
        try:
            with open(self.path, "rb") as file:
                page = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                found = os.fstat(file.fileno())
        except (FileNotFoundError, ValueError):
            return False
        if page[:8] != b"HARGARD1":
            raise ValueError(f"{self.path} is no guard page")
        self._page = page
        self._file = (found.st_dev, found.st_ino)
        self._left = {}
        return True

    def _slots(self) -> list[tuple[int, int, int]]:
        return [] if self._page is None else [self._slot(rank) for rank in range(self._ranks())]

    def _ranks(self) -> int:
        return struct.unpack_from("<I", self._page, 12)[0]

    def _word(self, rank: int) -> int:
        return struct.unpack_from("<Q", self._page, _HEADER + rank * _SLOT)[0]

    def _slot(self, rank: int) -> tuple[int, int, int]:
        """(state, run, step). A slot's word names the bank of its numbers; the same word after reading means that they belong to it."""
        banks = _HEADER + rank * _SLOT + 8
        while True:
            word = self._word(rank)
            state = word & 0xFF
            if word == self._left.get(rank):
                return _NONE, 0, 0
            _, run, step = struct.unpack_from("<3Q", self._page, banks + (word >> 8 & 1) * 24)
            if self._word(rank) == word:
                return (state, run, step) if state == _COMMITTED else (state, 0, 0)


def guard_of(job: str, engine: str) -> Guard:
    """Of a job's run directory on this host."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    home = Path(base) / "headrace" if base else Path(f"/tmp/headrace-{os.getuid()}")
    return Guard(home / job / f"{engine}.guard")


class _Gate:
    """For a scheduler of vLLM: all requests are paused while the guard is shut, and otherwise what vLLM itself says.

    The pause state is what vLLM's scheduler and engine core ask before every step, so that nothing is scheduled, nothing is lost, and the
    core sleeps until its next call: that of finish_weight_update at the latest. `additional_config` of vLLM names the guard: {"headrace":
    {"job": ..., "engine": "vllm", "draft": false}}. draft: a drafter is updated alone, and its guard counts too.
    """

    _own_pause_state = PauseState.UNPAUSED
    _guards: tuple[Guard, ...] = ()

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        where = (vllm_config.additional_config or {}).get("headrace")
        if not where or "job" not in where:
            raise ValueError('the scheduler of headrace needs --additional-config \'{"headrace": {"job": JOB}}\'')
        models = ("target", "draft") if where.get("draft") else ("target",)
        self._guards = tuple(guard_of(*meeting(where["job"], where.get("engine", "vllm"), model)) for model in models)
        super().__init__(vllm_config, *args, **kwargs)

    @property
    def _pause_state(self) -> PauseState:
        return PauseState.PAUSED_ALL if any(guard.shut() for guard in self._guards) else self._own_pause_state

    @_pause_state.setter
    def _pause_state(self, state: PauseState) -> None:
        self._own_pause_state = state


class HeadraceScheduler(_Gate, Scheduler):
    """`--scheduler-cls headrace.integration.vllm.gate.HeadraceScheduler`, with `--no-async-scheduling`."""


class HeadraceAsyncScheduler(_Gate, AsyncScheduler):
    """`--scheduler-cls headrace.integration.vllm.gate.HeadraceAsyncScheduler`, for vLLM's default of asynchronous scheduling."""
