"""What an engine is asked, and what becomes of its exceptions and of the views that it is lent."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading

import headrace
import ml_dtypes
import numpy as np
import pytest
from conftest import eventually

W = {"w": np.arange(4, dtype=np.float32)}


def table_of(**tensors) -> headrace.StorageTable:
    return headrace.StorageTable.from_tensors(tensors or {"w": np.zeros(4, np.float32)})


def update(receiver, version="run/1", tensors=W):
    with receiver.update(version) as plain:
        plain.load(tensors)
    return plain.receipt


def test_hooks_run_once_each_and_in_order(job):
    calls = []
    live = np.zeros(4, np.float32)
    hooks = headrace.Hooks(
        quiescent=lambda: calls.append("quiescent"),
        derive=lambda: calls.append(("derive", live.tolist())),
        committed=lambda: calls.append("committed"),
        finish_tables=lambda: calls.append("finish_tables"),
    )
    with headrace.Receiver(table_of(w=live), job=job, hooks=hooks) as receiver:
        update(receiver)
    # Asked before an update is taken, and again before it is published.
    assert calls == ["quiescent", ("derive", [0, 1, 2, 3]), "quiescent", "committed"]


@pytest.mark.parametrize("name", ["quiescent", "derive", "committed", "locate"])
def test_what_a_hook_raises_is_the_cause_of_what_the_engine_gets(job, name):
    thrown = RuntimeError("the engine's own")

    def hook():
        raise thrown

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(**{name: hook})) as receiver:
        with pytest.raises(headrace.Error, match="RuntimeError: the engine's own") as caught:
            update(receiver)
        assert caught.value.__cause__ is thrown
        assert receiver.serving_version() is None


def test_a_hook_may_say_no_or_raise_an_error_with_a_code(job):
    answers = [False, headrace.DeadlineExceeded("still busy"), True, None]

    def quiescent():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(quiescent=quiescent)) as receiver:
        with pytest.raises(headrace.FailedPrecondition, match="quiescent hook: it said no"):
            update(receiver)
        with pytest.raises(headrace.DeadlineExceeded, match="still busy"):
            update(receiver)
        assert update(receiver).proven


def test_a_sender_hears_what_a_hook_of_the_engine_raised(job):
    def derive():
        raise ValueError("no such table")

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(derive=derive)), headrace.Sender.connect(job=job) as sender:
        with pytest.raises(headrace.Error, match="derive hook: it raised: ValueError: no such table") as caught:
            sender.send("run/1", W)
    assert (caught.value.rank, caught.value.phase) == (0, "prepare")


def test_storage_that_moved_is_refused_by_name(job):
    places = {"w": np.zeros(4, np.float32)}
    hooks = headrace.Hooks(locate=lambda: dict(places))
    with headrace.Receiver(table_of(**places), job=job, hooks=hooks) as receiver:
        assert update(receiver).proven
        places["w"] = np.zeros(4, np.float32)
        with pytest.raises(headrace.FailedPrecondition, match="w"):
            update(receiver, "run/2")
        del places["w"]
        with pytest.raises(headrace.FailedPrecondition, match="w"):
            update(receiver, "run/2")


def test_hooks_may_ask_the_receiver(job):
    seen = []
    ends = []
    hooks = headrace.Hooks(derive=lambda: seen.append(ends[0].status().state))
    with headrace.Receiver(table_of(), job=job, hooks=hooks) as receiver:
        ends.append(receiver)
        update(receiver)
        ends.clear()
    assert seen == ["applying"]


def interleave_layout() -> headrace.Layout:
    """Two tensors of nibbles become one of bytes."""
    plain = headrace.Layout.build(family="dense", tensors=[("norm.weight", "BF16", (4,))])
    return plain.with_groups(
        [
            headrace.Group(
                f"pair{i}",
                entries=[(f"low{i}", "U8", (2, 3)), (f"high{i}", "U8", (2, 3))],
                outputs=[headrace.StorageSpec(f"packed{i}", "U8", (2, 3))],
                hook="interleave",
                work_bytes=8,
            )
            for i in range(2)
        ]
    )


def interleave_live() -> dict[str, np.ndarray]:
    live = {f"packed{i}": np.zeros((2, 3), np.uint8) for i in range(2)}
    layout = interleave_layout()
    return {layout.storages[0].name: np.zeros(4, ml_dtypes.bfloat16), **live}


def interleave_given(seed=3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    given = {"norm.weight": rng.random(4).astype(ml_dtypes.bfloat16)}
    for i in range(2):
        for part in ("low", "high"):
            given[f"{part}{i}"] = rng.integers(0, 16, (2, 3)).astype(np.uint8)
    return given


def interleave(group, inputs, work, outputs):
    assert [view.name for view in inputs] == [group.replace("pair", "low"), group.replace("pair", "high")]
    assert [view.shape for view in (*inputs, *outputs)] == [(2, 3)] * 3
    assert work.nbytes == 8
    low, high = (view.numpy() for view in inputs)
    outputs[0].numpy()[:] = low | high << 4


def grouped_receiver(job, live, hook) -> headrace.Receiver:
    hooks = headrace.Hooks(staged={"interleave": hook})
    return headrace.Receiver(headrace.StorageTable.from_tensors(live), interleave_layout(), job=job, hooks=hooks)


def check_interleaved(live, given) -> None:
    for i in range(2):
        assert live[f"packed{i}"].tobytes() == bytes(
            low | high << 4 for low, high in zip(given[f"low{i}"].tobytes(), given[f"high{i}"].tobytes(), strict=True)
        )


@pytest.mark.parametrize("way", ["sender", "one call", "a call each", "one generator", "mixed"])
def test_staged_groups_by_every_way(job, way):
    live, given = interleave_live(), interleave_given()
    with grouped_receiver(job, live, interleave) as receiver:
        if way == "sender":
            mixed = dict(sorted(given.items(), reverse=True))
            with headrace.Sender.connect(job=job) as sender:
                receipt = sender.send("run/1", mixed).receipts[0]
        else:
            with receiver.update("run/1") as plain:
                if way == "one call":
                    plain.load(given)
                elif way == "one generator":
                    plain.load((name, tensor) for name, tensor in given.items())
                elif way == "mixed":
                    names = list(given)
                    plain.load([(name, given[name]) for name in (names[1], names[0], names[3])])
                    plain.load([(name, given[name]) for name in (names[4], names[2])])
                else:
                    for name, tensor in given.items():
                        scratch = tensor.copy()
                        plain.load([(name, scratch)])
                        scratch.fill(0)  # its bytes may be reused once the call has returned
            receipt = plain.receipt
        assert receipt.proved_inputs == 2
        assert receipt.outputs == (("packed0", "inputs"), ("packed1", "inputs"))
    check_interleaved(live, given)


def test_a_group_that_stays_incomplete_is_refused_with_the_name_of_what_is_missing(job):
    live, given = interleave_live(), interleave_given()
    del given["high1"]
    with grouped_receiver(job, live, interleave) as receiver:
        with pytest.raises(headrace.InvalidArgument, match="high1"), receiver.update("run/1") as plain:
            plain.load(given)
        assert receiver.serving_version() is None
        with receiver.update("run/2") as plain:
            plain.load(interleave_given())


def test_a_staged_hook_that_raises_tears_and_is_the_cause(job):
    thrown = ArithmeticError("not today")

    def hook(group, inputs, work, outputs):
        raise thrown

    with grouped_receiver(job, interleave_live(), hook) as receiver:
        with pytest.raises(headrace.Error, match="ArithmeticError: not today") as caught, receiver.update("run/1") as plain:
            plain.load(interleave_given())
        assert caught.value.__cause__ is thrown
        assert receiver.status().state == "torn"


def test_views_end_with_the_call_and_what_was_taken_of_them_stays_mapped(job):
    kept = []

    def hook(group, inputs, work, outputs):
        interleave(group, inputs, work, outputs)
        kept.append((inputs[0], inputs[1].numpy(), inputs[0].data[1:3], work, outputs[0], outputs[0].data))

    live = interleave_live()
    with grouped_receiver(job, live, hook) as receiver, receiver.update("run/1") as plain:
        plain.load(interleave_given())
    # The receiver is closed, and its scratch would be gone.
    packed = live["packed0"].tobytes()
    del live, receiver, plain
    gc.collect()
    first, array, part, work, output, written = kept[0]
    for ended in (first, output):
        for use in (lambda view=ended: view.data, ended.numpy):
            with pytest.raises(ValueError, match="the hook has returned"):
                use()
    assert len(bytes(part)) == 2
    assert len(bytes(work)) == 8
    assert array.max() < 16
    assert bytes(written) == packed
    address = array.ctypes.data
    assert is_mapped(address)
    kept.clear()
    del first, array, part, work, output, written, ended, use
    gc.collect()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [line.split(" ", 1)[0].split("-") for line in maps]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_inputs_are_read_only(job):
    def hook(group, inputs, work, outputs):
        inputs[0].data[0] = 1

    with grouped_receiver(job, interleave_live(), hook) as receiver:
        with pytest.raises(headrace.Error, match="TypeError"), receiver.update("run/1") as plain:
            plain.load(interleave_given())


def test_a_layout_with_groups_needs_their_hooks(job):
    with pytest.raises(headrace.InvalidArgument, match="the engine gave no hook interleave"):
        headrace.Receiver(headrace.StorageTable.from_tensors(interleave_live()), interleave_layout(), job=job)


def test_place_refuses_tensors_of_groups():
    table = headrace.StorageTable.from_tensors(interleave_live())
    with pytest.raises(headrace.InvalidArgument, match="low0"):
        interleave_layout().place(table, [("low0", np.zeros((2, 3), np.uint8))])


class Held:
    """A hook that holds its caller until it is told to go on, and sends Control-C to the process once it is there."""

    def __init__(self):
        self.go_on = threading.Event()
        self.calls = 0

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert self.go_on.wait(30)


@pytest.mark.parametrize("name", ["quiescent", "derive"])
def test_control_c_ends_an_engines_own_update(job, name):
    held = Held()
    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(**{name: held})) as receiver:
        try:
            with pytest.raises(KeyboardInterrupt):
                update(receiver)
        finally:
            held.go_on.set()
        assert receiver.status().state == ("torn" if name == "derive" else "idle")
        assert update(receiver, "run/2").proven


@pytest.mark.parametrize("name", ["quiescent", "derive"])
def test_control_c_ends_a_senders_update_everywhere(job, name):
    held = Held()
    with (
        headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(**{name: held})) as receiver,
        headrace.Sender.connect(job=job) as sender,
    ):
        try:
            with pytest.raises(KeyboardInterrupt):
                sender.send("run/1", W)
        finally:
            held.go_on.set()
        eventually(lambda: receiver.status().state in ("torn", "idle"))
        assert sender.send("run/2", W).proven
        assert receiver.serving_version() == "run/2"


def test_control_c_ends_a_connect_to_nobody(job, run_directory):
    # A receiver that is stopped answers nobody.
    with headrace.Receiver(table_of(), job=job, endpoint=None) as receiver:
        code = f"""
import headrace, threading, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    headrace.Sender.connect(job="other", endpoints=["ipc://{run_directory}/nobody.ipc"], connect_timeout_ms=600_000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(0)
"""
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert ran.stdout == "interrupted\n", ran.stderr
        assert receiver.status().state == "idle"


def test_the_end_of_the_interpreter_leaves_no_socket_behind(run_directory):
    code = """
import headrace
live = bytearray(16)
receiver = headrace.Receiver(headrace.StorageTable.from_tensors({"w": live}), job="left", hooks=headrace.Hooks(derive=lambda: receiver))
sender = headrace.Sender.connect(job="left")
sender.update("run/1", {"w": bytes(16)}).__enter__()
raise SystemExit(7)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (7, "")
