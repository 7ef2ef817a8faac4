"""An engine that waits until senders have brought a version."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import headrace
import numpy as np
import pytest

W = {"w": np.arange(4, dtype=np.float32)}
PATIENCE_S = 30


def table_of() -> headrace.StorageTable:
    return headrace.StorageTable.from_tensors({"w": np.zeros(4, np.float32)})


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def receiver(job):
    with headrace.Receiver(table_of(), job=job) as made:
        yield made


def fail(job: str, version: str) -> None:
    """An update that its trainer gives up before its first byte."""
    with headrace.Sender.connect(job=job) as sender, pytest.raises(OSError, match="lost its shard"):
        with sender.update(version, W):
            raise OSError("the trainer lost its shard")


def waiting(pool, receiver, version, **options) -> Future:
    """A wait on a thread of its own, that looks from this moment on."""
    mark = receiver.mark()
    return pool.submit(lambda: receiver.wait_for(version, since=mark, **options))


def test_all_that_wait_get_the_receipt_of_the_commit_and_whoever_comes_later_too(job, receiver, pool):
    waits = [waiting(pool, receiver, "run/2") for _ in range(3)]
    with headrace.Sender.connect(job=job) as sender:
        sender.send("run/1", W)
        report = sender.send("run/2", W)
    for wait in waits:
        assert wait.result(PATIENCE_S) == report.receipts[0]
    assert receiver.wait_for("run/2") == report.receipts[0]
    assert asyncio.run(receiver.wait_for_async("run/2")).version == "run/2"


def test_an_update_that_came_and_went_since_the_mark_is_not_missed(job, receiver):
    mark = receiver.mark()
    fail(job, "run/1")
    with headrace.Sender.connect(job=job) as sender:
        sender.send("run/2", W)
        sender.send("run/3", W)
    with pytest.raises(headrace.FailedPrecondition, match="update to run/1 has failed, rank 0 of engine-0 is idle: .*shard") as raised:
        receiver.wait_for("run/1", since=mark, deadline_ms=PATIENCE_S * 1_000)
    assert (raised.value.rank, raised.value.engine) == (0, "engine-0")
    assert receiver.wait_for("run/2", since=mark).version == "run/2", "it was committed, although another one was since"
    with pytest.raises(headrace.DeadlineExceeded):
        receiver.wait_for("run/1", deadline_ms=100)


def test_what_a_hook_raised_is_the_cause_and_a_later_failure_has_none_of_it(job, pool):
    errors = [ValueError("no memory"), None]

    def derive():
        if errors[0] is not None:
            raise errors[0]

    with headrace.Receiver(table_of(), job=job, engine="a", hooks=headrace.Hooks(derive=derive)) as receiver:
        wait = waiting(pool, receiver, "run/1")
        with headrace.Sender.connect(job=job) as sender, pytest.raises(headrace.Error):
            sender.send("run/1", W)
        error = wait.exception(PATIENCE_S)
        assert isinstance(error, headrace.FailedPrecondition) and "rank 0 of a is torn" in str(error) and "no memory" in str(error)
        assert error.__cause__ is errors[0] and error.phase == "prepare"
        errors.pop(0)
        wait = waiting(pool, receiver, "run/2")
        fail(job, "run/2")
        assert wait.exception(PATIENCE_S).__cause__ is None


def test_an_opening_that_is_refused_has_no_cause_in_what_a_hook_raised_before(job, pool):
    thrown, errors = ValueError("not quiescent"), []

    def quiescent():
        if errors:
            raise errors[0]

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(quiescent=quiescent)) as receiver:
        mark = receiver.mark()
        with headrace.Sender.connect(job=job) as sender:
            sender.send("run/5", W)
            errors.append(thrown)
            with pytest.raises(headrace.Error, match="not quiescent"):
                sender.send("run/6", W)
            wait = waiting(pool, receiver, "run/4")
            with pytest.raises(headrace.FailedPrecondition, match="steps rise"):
                sender.send("run/4", W)
        refused = wait.exception(PATIENCE_S)
        assert isinstance(refused, headrace.FailedPrecondition) and "steps rise" in str(refused) and refused.__cause__ is None
        with pytest.raises(headrace.FailedPrecondition, match="not quiescent") as raised:
            receiver.wait_for("run/6", since=mark)
        assert raised.value.__cause__ is thrown, "it is still that failure"


def test_nothing_that_begins_in_time_is_a_deadline_that_says_what_is_held(job, receiver):
    with headrace.Sender.connect(job=job) as sender:
        sender.send("run/1", W)
    begun = time.monotonic()
    words = "update to run/2 did not begin within 150 ms: rank 0 of engine-0 is idle, its version run/1"
    with pytest.raises(headrace.DeadlineExceeded, match=words) as raised:
        receiver.wait_for("run/2", deadline_ms=150)
    assert 0.15 <= time.monotonic() - begun < PATIENCE_S
    assert (raised.value.expected, raised.value.actual) == ("run/2", "run/1")


def test_an_open_update_that_goes_on_is_waited_for_beyond_the_deadline_of_its_beginning(job, pool):
    inside, go_on = threading.Event(), threading.Event()

    def hook():
        inside.set()
        assert go_on.wait(PATIENCE_S)

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(derive=hook)) as receiver:
        with headrace.Sender.connect(job=job) as sender:
            sending = pool.submit(lambda: sender.send("run/1", W))
            assert inside.wait(PATIENCE_S)
            wait = waiting(pool, receiver, "run/1", deadline_ms=PATIENCE_S * 1_000)
            assert not wait.done()
            go_on.set()
            assert wait.result(PATIENCE_S).version == "run/1"
            sending.result(PATIENCE_S)


def test_close_ends_the_waits_of_other_threads(job, pool):
    receiver = headrace.Receiver(table_of(), job=job)
    waits = [waiting(pool, receiver, "run/1") for _ in range(3)]
    receiver.close()
    for wait in waits:
        error = wait.exception(PATIENCE_S)
        # One that had not begun yet finds it closed.
        assert isinstance(error, (headrace.Cancelled, headrace.FailedPrecondition)) and "the receiver is closed" in str(error)
    with pytest.raises(headrace.FailedPrecondition, match="the receiver is closed"):
        receiver.wait_for("run/1")


def test_a_wait_in_a_hook_is_refused(job):
    said = []

    def hook():
        with pytest.raises(headrace.FailedPrecondition) as raised:
            receiver.wait_for("run/1")
        said.append(str(raised.value))
        receiver.mark()

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(derive=hook)) as receiver, receiver.update("run/1") as update:
        update.load(W)
    assert said == ["wait_for() in a hook waits for the hook's own end: raise to fail the update"]


@pytest.mark.parametrize("others", [0, 2])
def test_control_c_ends_the_wait_of_the_main_thread_and_no_other(job, receiver, pool, others):
    waits = [waiting(pool, receiver, "run/1") for _ in range(others)]

    def interrupt():
        # Behind the wait in the receiver's order, as far as that can be told.
        for _ in range(20):
            receiver.status()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.1, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        receiver.wait_for("run/1")
    timer.join()
    assert not any(wait.done() for wait in waits)
    with headrace.Sender.connect(job=job) as sender:
        sender.send("run/1", W)
    assert [wait.result(PATIENCE_S).version for wait in waits] == ["run/1"] * others
    assert receiver.status().state == "idle"


def test_a_cancelled_task_ends_its_wait(receiver):
    async def patient():
        await asyncio.wait_for(receiver.wait_for_async("run/1"), 0.1)

    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(patient())
    # asyncio.run() waits for its threads: one that went on waiting would take the receiver's deadline.
    assert time.monotonic() - begun < PATIENCE_S


def test_waits_leave_the_loops_executor_to_what_they_wait_for(job, receiver):
    async def update():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        mark = receiver.mark()
        waits = [asyncio.ensure_future(receiver.wait_for_async("run/1", since=mark, deadline_ms=5_000)) for _ in range(3)]
        await asyncio.sleep(0)  # they have begun
        with headrace.Sender.connect(job=job) as sender:
            report = await asyncio.to_thread(sender.send, "run/1", W)
        assert await asyncio.gather(*waits) == [report.receipts[0]] * 3

    asyncio.run(update())


def test_what_a_wait_raises_reaches_its_task(job, receiver):
    async def update():
        wait = asyncio.ensure_future(receiver.wait_for_async("run/1", since=receiver.mark()))
        await asyncio.sleep(0)
        await asyncio.to_thread(fail, job, "run/1")
        with pytest.raises(headrace.FailedPrecondition, match="lost its shard"):
            await wait
        with pytest.raises(headrace.InvalidArgument, match="expected RUN/STEP"):
            await receiver.wait_for_async("run")

    asyncio.run(update())


def test_an_interpreter_whose_loop_was_left_with_a_wait_ends_at_once(job):
    code = f"""
import asyncio, headrace, numpy as np
receiver = headrace.Receiver(headrace.StorageTable.from_tensors({{"w": np.zeros(4, np.float32)}}), job={job!r})
loop = asyncio.new_event_loop()
tasks = [loop.create_task(receiver.wait_for_async("run/1", deadline_ms=600_000)) for _ in range(4)]
loop.run_until_complete(asyncio.sleep(0.1))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "terminate" not in ran.stderr and "Exception in thread" not in ran.stderr


@pytest.mark.parametrize(
    ("version", "options", "words"), [("run", {}, "expected RUN/STEP"), ("run/1", {"deadline_ms": -1}, "deadline of -1 ms")]
)
def test_what_cannot_be_waited_for_is_refused(receiver, version, options, words):
    with pytest.raises(headrace.InvalidArgument, match=words):
        receiver.wait_for(version, **options)
