"""Batches of a sender: one is on its way while the next one is gathered, whatever gives the tensors does meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import headrace
import numpy as np
import pytest
from conftest import eventually

PATIENCE_S = 30
# Far more than all buckets that can be on the way.
LARGE = 1 << 20


class Array(np.ndarray):
    """One that can be watched."""


class Stalled:
    """A receiver that takes nothing behind the first tensor before it may go on, and a sender that has two small buckets."""

    def __init__(self, job: str) -> None:
        self.go_on = threading.Event()
        self.live = {
            "norm.weight": np.zeros(LARGE, np.uint16),
            "copy": np.zeros(4, np.float32),
            "model.norm.weight": np.zeros(4, np.uint16),
        }
        self.first = ("a", np.arange(4, dtype=np.float32))
        self.large = np.arange(LARGE, dtype=np.uint16)
        self.last = ("model.norm.weight", np.arange(4, dtype=np.uint16))
        tensors = [("norm.weight", "U16", (LARGE,)), ("model.norm.weight", "U16", (4,))]
        group = headrace.Group("one", entries=[("a", "F32", (4,))], outputs=[headrace.StorageSpec("copy", "F32", (4,))], hook="copied")
        layout = headrace.Layout.build(family="dense", tensors=tensors).with_groups([group])
        table = headrace.StorageTable.from_tensors(self.live)
        self.receiver = headrace.Receiver(table, layout, job=job, hooks=headrace.Hooks(staged={"copied": self._copied}))
        self.sender = headrace.Sender.connect(job=job, bucket_bytes=1 << 16)

    def _copied(self, group, inputs, work, outputs) -> None:
        assert self.go_on.wait(PATIENCE_S)
        outputs[0].numpy()[:] = inputs[0].numpy()

    def items(self) -> list[tuple[str, np.ndarray]]:
        return [self.first, ("norm.weight", self.large), self.last]

    def holds_all(self) -> bool:
        return all((self.live["copy" if name == "a" else name] == tensor).all() for name, tensor in self.items())

    def stalls(self) -> bool:
        """Whether the large tensor cannot have been sent."""
        return not self.go_on.is_set() and not self.live["norm.weight"][-1]

    def heals(self) -> bool:
        self.go_on.set()
        return self.sender.send("run/9", dict(self.items())).proven and self.holds_all()

    def close(self) -> None:
        self.go_on.set()
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def stalled(job):
    with contextlib.closing(Stalled(job)) as made:
        yield made


@contextlib.contextmanager
def aside(work):
    """On a thread of its own, which has ended afterwards."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def opened(stalled, version="run/1") -> headrace.sender.SenderUpdate:
    return stalled.sender.update(version, dict(stalled.items())).__enter__()


def stalling(stalled, then):
    """The first two tensors, of which the second one is on its way when `then` is called; what that gives comes behind them."""
    yield stalled.first
    yield "norm.weight", stalled.large
    assert stalled.stalls()
    yield from then() or ()


def test_the_next_tensors_are_gathered_while_a_batch_is_on_its_way(stalled):
    def rest():
        # Nothing but this lets the receiver go on: what is sent before the next one is asked for would wait for it in vain.
        stalled.go_on.set()
        yield stalled.last

    with stalled.sender.update("run/1", dict(stalled.items())) as update:
        assert update.add(stalling(stalled, rest), batch_tensors=2) == 16 + 2 * LARGE + 8
    assert update.report.proven and stalled.holds_all()


@pytest.mark.parametrize("limits", [{"batch_tensors": 1}, {"batch_bytes": 1}, {"batch_bytes": 16}])
def test_memory_may_be_handed_out_again_where_only_one_tensor_may_be_held(stalled, limits):
    memory, asked = np.zeros(LARGE, np.uint16), threading.Event()

    def reusing():
        yield stalled.first
        memory[:] = stalled.large
        yield "norm.weight", memory
        memory[:] = 7
        asked.set()
        memory[:4] = stalled.last[1]
        yield "model.norm.weight", memory[:4]

    def let_go():
        asked.wait(0.2)  # long enough for whoever would ask too soon
        stalled.go_on.set()

    update = opened(stalled)
    with aside(let_go):
        update.add(reusing(), **limits)
    assert update.finish().proven and stalled.holds_all()


@pytest.mark.parametrize("limits, at_once", [({"batch_tensors": n}, n) for n in (1, 2, 3, 4, 7)] + [({"batch_bytes": 96}, 3), ({}, 32)])
def test_no_tensor_is_asked_for_while_as_many_as_may_be_are_held(job, limits, at_once):
    live = {f"t{i}": np.zeros(8, np.float32) for i in range(32)}
    made: list[weakref.ref] = []
    held: list[int] = []

    def make():
        for i in range(32):
            tensor = np.full(8, i, np.float32).view(Array)
            made.append(weakref.ref(tensor))
            held.append(sum(ref() is not None for ref in made))
            item = (f"t{i}", tensor)
            del tensor
            yield item
            del item

    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job), headrace.Sender.connect(job=job) as sender:
        with sender.update("run/1", live) as update:
            assert update.add(make(), **limits) == 32 * 32
    assert max(held) <= at_once
    assert [tensor[0] for tensor in live.values()] == list(range(32))


def test_what_was_given_before_an_error_is_sent_and_held_until_then_and_the_update_goes_on(stalled):
    raising, dropped = threading.Event(), []
    given = stalled.large.copy().view(Array)
    gone = weakref.ref(given, lambda _: dropped.append(stalled.go_on.is_set()))

    def broken():
        nonlocal given
        yield stalled.first
        pair, given = ("norm.weight", given), None
        yield pair
        del pair
        assert stalled.stalls() and gone() is not None
        raising.set()
        raise OSError("disk gone")

    def let_go():
        assert raising.wait(PATIENCE_S)
        stalled.go_on.set()

    update = opened(stalled)
    with aside(let_go), pytest.raises(OSError, match="disk gone"):
        update.add(broken(), batch_tensors=2)
    assert dropped == [True]
    update.add([stalled.last])
    assert update.finish().proven and stalled.holds_all()


def test_an_update_whose_source_fails_is_given_up_with_that_error(stalled):
    def broken():
        stalled.go_on.set()
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"), stalled.sender.update("run/1", dict(stalled.items())) as update:
        update.add(stalling(stalled, broken), batch_tensors=2)
    eventually(lambda: "OSError: disk gone" in (stalled.receiver.status().last_failure or ""))
    assert stalled.heals()


def test_the_sender_may_be_closed_by_what_gives_its_tensors(stalled):
    with pytest.raises(headrace.FailedPrecondition, match="the sender is closed"):
        opened(stalled).add(stalling(stalled, stalled.sender.close), batch_tensors=2)
    assert stalled.sender.closed


def test_the_sender_may_be_closed_by_another_thread_while_a_batch_is_on_its_way(stalled):
    on_its_way = threading.Event()

    def wait():
        on_its_way.set()
        eventually(lambda: stalled.sender.closed)

    def close():
        assert on_its_way.wait(PATIENCE_S)
        stalled.sender.close()

    with aside(close), pytest.raises(headrace.FailedPrecondition, match="the sender is closed"):
        opened(stalled).add(stalling(stalled, wait), batch_tensors=2)


@pytest.mark.parametrize("wanted", ["Cancelled", "ValueError"])
def test_the_update_may_be_given_up_by_what_gives_its_tensors(stalled, wanted):
    def give_up():
        stalled.sender._abort(OSError("no more"))
        if wanted == "ValueError":
            raise ValueError("mine")

    with pytest.raises((headrace.Cancelled, ValueError)) as raised:
        opened(stalled).add(stalling(stalled, give_up), batch_tensors=2)
    assert type(raised.value).__name__ == wanted
    assert stalled.heals()


def test_another_update_may_be_opened_by_what_gives_the_tensors_of_one_that_is_given_up(stalled):
    def anew():
        stalled.sender._abort(OSError("begin anew"))
        stalled.go_on.set()
        opened(stalled, "run/2")
        yield stalled.last

    with pytest.raises(headrace.FailedPrecondition, match="another update was opened"):
        opened(stalled).add(stalling(stalled, anew), batch_tensors=2)
    stalled.sender._abort(None)
    assert stalled.heals()


def test_what_gives_tensors_may_send_some_itself_and_finish(stalled):
    def itself():
        stalled.go_on.set()
        assert update.add([stalled.last]) == 8
        reports.append(update.finish())

    reports: list[headrace.Report] = []
    update = opened(stalled)
    update.add(stalling(stalled, itself), batch_tensors=2)
    assert [report.proven for report in reports] == [True] and stalled.holds_all()


def test_threads_that_send_at_once_take_turns(job):
    live = {f"t{i}": np.zeros(64, np.float32) for i in range(128)}
    both = threading.Barrier(2)

    def part(begin):
        for i in range(begin, 128, 2):
            if i < 2:
                both.wait(PATIENCE_S)
            yield f"t{i}", np.full(64, i, np.float32)

    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job), headrace.Sender.connect(job=job) as sender:
        with sender.update("run/1", live) as update:
            with aside(lambda: update.add(part(1), batch_tensors=2)):
                update.add(part(0), batch_tensors=2)
        assert update.report.proven
    assert [tensor[0] for tensor in live.values()] == list(range(128))


def test_what_progress_raises_ends_the_sending(stalled):
    def progress(done):
        raise ValueError(f"after {done}")

    stalled.go_on.set()
    opened(stalled)
    with pytest.raises(ValueError, match="^after 16$"):
        stalled.sender._core.add(iter(stalled.items()), 2, 1 << 30, progress)
    stalled.sender._abort(None)
    assert stalled.heals()


def test_a_receiver_that_goes_while_tensors_are_gathered_is_unavailable(job):
    live = {f"t{i}": np.zeros(LARGE, np.uint16) for i in range(3)}
    receiver = headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job)

    def make():
        yield "t0", live["t0"]
        receiver.close()
        yield "t1", live["t1"]
        yield "t2", live["t2"]

    with headrace.Sender.connect(job=job, bucket_bytes=1 << 16) as sender, pytest.raises(headrace.Error) as raised:
        with sender.update("run/1", live) as update:
            update.add(make(), batch_tensors=2)
    assert isinstance(raised.value, (headrace.Unavailable, headrace.Cancelled))


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_control_c_while_tensors_are_gathered_does_not_wait_for_a_receiver_that_stalls(stalled):
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        opened(stalled).add(stalling(stalled, interrupt), batch_tensors=2)
    assert stalled.stalls() and time.monotonic() - begun < PATIENCE_S / 2
    assert stalled.heals()


@pytest.mark.parametrize("error", [None, OSError("disk gone")])
def test_control_c_ends_the_wait_for_the_last_batch_also_after_an_error(stalled, error):
    waiting = threading.Event()

    def end():
        waiting.set()
        if error:
            raise error

    def press():
        assert waiting.wait(PATIENCE_S)
        # Behind what the generator has left to do, as far as that can be told.
        for _ in range(20):
            stalled.receiver.status()
        interrupt()

    with pytest.raises(KeyboardInterrupt), aside(press):
        opened(stalled).add(stalling(stalled, end), batch_tensors=2)
    assert stalled.stalls()
    assert stalled.heals()


@pytest.mark.parametrize("end", ["return", "raise SystemExit(0)"])
def test_a_child_that_is_forked_while_a_batch_is_on_its_way_ends(job, end):
    code = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import headrace
from test_batches import Stalled, opened, stalling
stalled = Stalled({job!r})
def fork():
    global child
    child = os.fork()
    if child == 0:
        {end}
    assert os.waitpid(child, 0)[1] == 0
    stalled.go_on.set()
    yield stalled.last
update = opened(stalled)
try:
    update.add(stalling(stalled, fork), batch_tensors=2)
except headrace.FailedPrecondition as error:
    assert child == 0 and "was forked from" in str(error)
    sys.exit(0)
print(child != 0 and update.finish().proven and stalled.holds_all())
stalled.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "True\n"


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_a_load_of_many_tensors_is_proven_on_any_number_of_threads(job, threads):
    # Small ones, and such as are summed as they are copied.
    live = {f"t{i}": np.zeros(1 << 18 if i % 25 == 3 else 1 + i % 7, np.float32) for i in range(211)}
    given = {name: np.full(tensor.shape, i, np.float32) for i, (name, tensor) in enumerate(live.items())}
    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job, threads=threads) as receiver:
        with receiver.update("run/1") as update:
            update.load(given)
        assert update.receipt.proven and update.receipt.fingerprints == 211
    assert all((live[name] == tensor).all() for name, tensor in given.items())


@pytest.mark.parametrize("threads", [1, 2])
def test_large_tensors_of_a_load_land_in_storage_of_any_shape(job, threads):
    """Rows with gaps between them, single elements with gaps, columns: whatever way the copy takes, its sum is proven."""
    memory = {name: np.zeros((2048, 4096), np.uint16) for name in ("whole", "rows", "elements", "columns", "other")}
    live = {
        "whole": memory["whole"],
        "rows": memory["rows"][:, :1800],
        "elements": memory["elements"][::2, ::2],
        "columns": memory["columns"].T,
        "other": memory["other"],
    }
    random = np.random.default_rng(1)
    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job, threads=threads) as receiver:
        for step in (1, 2):
            given = {name: random.integers(0, 1 << 16, tensor.shape, np.uint16) for name, tensor in live.items()}
            with receiver.update(f"run/{step}") as update:
                update.load(given)
            assert update.receipt.proven
            assert update.receipt.applied_bytes == sum(tensor.nbytes for tensor in given.values())
            assert all(np.array_equal(live[name], given[name]) for name in live)
    assert not memory["rows"][:, 1800:].any()
    assert not memory["elements"][1::2].any() and not memory["elements"][:, 1::2].any()


def test_a_hook_that_calls_the_sender_which_waits_for_it_is_refused_at_once(job):
    live = {"t": np.zeros(8, np.float32)}
    refused = []

    def quiescent():
        for call in (lambda: sender.send("run/2", given), lambda: sender.resolve_in_doubt(), lambda: sender._core.order()):
            try:
                call()
            except headrace.FailedPrecondition as error:
                refused.append(str(error))
        return True

    given = {"t": np.ones(8, np.float32)}
    table = headrace.StorageTable.from_tensors(live)
    with headrace.Receiver(table, job=job, hooks=headrace.Hooks(quiescent=quiescent)), headrace.Sender.connect(job=job) as sender:
        assert sender.send("run/1", given).proven
    assert (live["t"] == given["t"]).all()
    assert len(refused) >= 3 and all("waits for its receivers" in text for text in refused)
    assert {text.split("sender, ")[1].split("()")[0] for text in refused} == {"open", "finish"}
