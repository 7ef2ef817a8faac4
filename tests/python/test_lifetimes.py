"""Ends that are closed while they are in use, used from inside their own hooks, forked, or left to the end of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types

import headrace
import numpy as np
import pytest

W = {"w": np.arange(4, dtype=np.float32)}


def table_of(**tensors) -> headrace.StorageTable:
    return headrace.StorageTable.from_tensors(tensors or {"w": np.zeros(4, np.float32)})


def update(receiver, version="run/1"):
    with receiver.update(version) as plain:
        plain.load(W)
    return plain.receipt


def run_alone(code: str) -> str:
    """What a process of its own prints; it has to end by itself, and well."""
    head = 'import headrace, numpy as np, os, sys, threading\ntable = headrace.StorageTable.from_tensors({"w": np.zeros(4, np.float32)})\n'
    ran = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("call", ["close", "load", "begin", "finish", "fingerprint"])
@pytest.mark.parametrize("name", ["quiescent", "derive", "committed"])
def test_what_would_wait_for_a_hooks_own_end_is_refused_in_the_hook(job, name, call):
    calls = {
        "close": lambda: receiver.close(),
        "load": lambda: receiver._core.load(W.items()),
        "begin": lambda: receiver._core.begin("run/9"),
        "finish": lambda: receiver._core.finish(),
        "fingerprint": lambda: receiver.fingerprint(),
    }
    said = []

    def hook():
        with pytest.raises(headrace.FailedPrecondition) as raised:
            calls[call]()
        said.append(str(raised.value))

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(**{name: hook})) as receiver:
        assert update(receiver).proven
        with headrace.Sender.connect(job=job) as sender:
            assert sender.send("run/2", W).proven
    assert said and set(said) == {f"{call}() in a hook waits for the hook's own end: raise to fail the update"}


def test_a_hook_may_ask_for_the_status_and_tell_of_events(job):
    def hook():
        states.append(receiver.status().state)
        receiver.notify("recapture")

    states: list[str] = []
    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(committed=hook)) as receiver:
        assert update(receiver).proven
    assert states == ["idle"]


@pytest.mark.parametrize("name", ["quiescent", "derive"])
def test_close_ends_an_update_of_another_thread(job, name):
    inside, go_on = threading.Event(), threading.Event()

    def hook():
        inside.set()
        assert go_on.wait(30)

    receiver = headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(**{name: hook}))
    raised: list[BaseException] = []

    def engine():
        try:
            update(receiver)
        except BaseException as error:
            raised.append(error)

    updating, closing = threading.Thread(target=engine), threading.Thread(target=receiver.close)
    updating.start()
    assert inside.wait(30)
    closing.start()
    updating.join(30)
    go_on.set()
    closing.join(30)
    assert receiver.closed and not updating.is_alive() and not closing.is_alive()
    assert [type(error) for error in raised] == [headrace.Cancelled] and "the receiver is closed" in str(raised[0])


def test_close_ends_a_send_of_another_thread(job):
    inside, go_on = threading.Event(), threading.Event()

    def hook():
        inside.set()
        assert go_on.wait(30)

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(derive=hook)):
        sender = headrace.Sender.connect(job=job)
        raised: list[BaseException] = []

        def trainer():
            try:
                sender.send("run/1", W)
            except BaseException as error:
                raised.append(error)

        sending = threading.Thread(target=trainer)
        sending.start()
        assert inside.wait(30)
        sender.close()
        sending.join(30)
        go_on.set()
    assert [type(error) for error in raised] == [headrace.Cancelled] and "the sender is closed" in str(raised[0])


def test_a_refused_begin_takes_nothing_from_the_update_that_is_open(job):
    def added(group, inputs, work, outputs):
        outputs[0].numpy()[:] = inputs[0].numpy() + inputs[1].numpy()

    live = {"norm.weight": np.zeros(4, np.uint16), "sum": np.zeros(4, np.float32)}
    plain_layout = headrace.Layout.build(family="dense", tensors=[("norm.weight", "U16", (4,))])
    entries, outputs = [("a", "F32", (4,)), ("b", "F32", (4,))], [headrace.StorageSpec("sum", "F32", (4,))]
    layout = plain_layout.with_groups([headrace.Group("sum", entries=entries, outputs=outputs, hook="added")])
    with headrace.Receiver(table_of(**live), layout, job=job, hooks=headrace.Hooks(staged={"added": added})) as receiver:
        with receiver.update("run/1") as plain:
            plain.load({"a": W["w"], "norm.weight": np.ones(4, np.uint16)})
            with pytest.raises(headrace.FailedPrecondition), receiver.update("run/2"):
                pass
            plain.load({"b": W["w"]})
        assert live["sum"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("end", ["sys.exit(0)", "del receiver, sender; import gc; gc.collect(); os._exit(0)"])
def test_a_forked_child_ends_and_leaves_its_parents_ends_alone(job, end):
    printed = run_alone(f"""
receiver = headrace.Receiver(table, job={job!r})
sender = headrace.Sender.connect(job={job!r})
child = os.fork()
if child == 0:
    for use in (lambda: receiver.status(), lambda: sender.send("run/9", {{"w": np.ones(4, np.float32)}})):
        try:
            use()
        except headrace.FailedPrecondition as error:
            print(error, flush=True)
    {end}
assert os.waitpid(child, 0)[1] == 0
print(sender.send("run/1", {{"w": np.ones(4, np.float32)}}).proven, receiver.serving_version())
""").splitlines()
    assert [line.split(" is of process ")[0] for line in printed[:2]] == ["the receiver", "the sender"]
    assert printed[2:] == ["True run/1"]


@pytest.mark.parametrize(
    "work", ["with receiver.update('run/1') as plain: plain.load(w)", "headrace.Sender.connect(job=job).send('run/1', w)"]
)
def test_the_interpreter_ends_while_a_daemon_thread_is_in_an_update(job, work):
    printed = run_alone(f"""
job, w = {job!r}, {{"w": np.ones(4, np.float32)}}
inside, go_on = threading.Event(), threading.Event()
def hook():
    inside.set()
    go_on.wait(1)
receiver = headrace.Receiver(table, job=job, hooks=headrace.Hooks(derive=hook))
def engine():
    try:
        {work}
    except headrace.Cancelled:
        pass
threading.Thread(target=engine, daemon=True).start()
inside.wait()
print("inside", flush=True)
""")
    assert printed == "inside\n"


class Speechless(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("name", ["quiescent", "locate", "derive", "committed", "expert_map"])
@pytest.mark.parametrize(
    "error, words",
    [
        (Speechless(), "what cannot be written"),
        (OSError("no file \udc80"), r"no file \\udc80"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RuntimeError("ä" * 40_000), "RuntimeError: ä"),
    ],
)
def test_whatever_a_hook_raises_fails_the_update_and_is_the_cause(job, name, error, words):
    def hook():
        raise error

    with headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(**{name: hook})) as receiver:
        with pytest.raises(headrace.Error) as raised:
            update(receiver)
    assert raised.value.__cause__ is error
    assert name in str(raised.value) and words.replace("\\\\", "\\") in str(raised.value)


def test_storages_may_be_located_by_any_mapping_and_by_nothing_else(job):
    live = np.zeros(4, np.float32)
    answer: list = [types.MappingProxyType({"w": live})]
    with headrace.Receiver(table_of(w=live), job=job, hooks=headrace.Hooks(locate=lambda: answer[0])) as receiver:
        assert update(receiver).proven
        for answer[0] in (None, 3, [("w", live)], "w"):
            with pytest.raises(headrace.FailedPrecondition, match="locate hook.* expected a mapping of storage names to tensors"):
                update(receiver, "run/2")


def test_a_name_may_hold_a_zero_character(job):
    live = np.zeros(4, np.float32)
    with headrace.Receiver(table_of(**{"a\0b": live}), job=job, hooks=headrace.Hooks(locate=lambda: {"a\0b": live})) as receiver:
        with receiver.update("run/1") as plain:
            plain.load({"a\0b": W["w"]})
        assert list(receiver.fingerprint()) == ["a\0b"] and live.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("item", [("w",), None, "w", (7, W["w"]), ("\ud800", W["w"]), ("w", W["w"], 1)])
def test_a_source_of_what_is_no_pair_is_refused_with_what_it_is(job, item):
    with headrace.Receiver(table_of(), job=job), headrace.Sender.connect(job=job) as sender:
        for source in ([item], lambda: iter([item])):
            with pytest.raises(headrace.InvalidArgument, match=r"expected \(name, tensor\), not"):
                sender.send("run/1", source)
        assert sender.send("run/1", W).proven


def test_arguments_of_another_kind_are_refused_as_what_they_are(job):
    table = table_of()
    for place, made in (("table", (3, headrace.Layout.identity(table))), ("layout", (table, 3)), ("layout", (table, table))):
        with pytest.raises(headrace.InvalidArgument, match=f"^{place}: expected a headrace"):
            headrace.Receiver(*made, job=job)
    with pytest.raises(headrace.InvalidArgument, match="expected a name, text of UTF-8, not 7"):
        headrace.Receiver(table, job=job, hooks=headrace.Hooks(staged={7: print}))
    with pytest.raises(headrace.InvalidArgument, match="expected a name, text of UTF-8, not 7"):
        headrace.Layout.identity(table).dropping([7])
    with pytest.raises(headrace.InvalidArgument, match="^x: expected a sequence of integers"):
        headrace.Layout.build(family="dense", tensors=[("x", "F32", 4)])


def test_a_hook_that_cannot_be_called_is_refused_at_once(job):
    with pytest.raises(headrace.InvalidArgument, match="hook derive: 3 cannot be called"):
        headrace.Receiver(table_of(), job=job, hooks=headrace.Hooks(derive=3))
    assert not os.path.exists(os.path.join(os.environ["XDG_RUNTIME_DIR"], "headrace", job))
