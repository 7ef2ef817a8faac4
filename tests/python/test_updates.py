"""Receivers and senders of one process, over the run directory."""

from __future__ import annotations

import asyncio
import gc
import io
import sys
from collections import Counter

import headrace
import ml_dtypes
import numpy as np
import pytest
from conftest import eventually, mapped_segments, open_files
from headrace import sender as sender_module


def live_tensors() -> dict[str, object]:
    return {
        "a": np.zeros((4, 8), np.float32),
        "b": np.zeros((3, 5), ml_dtypes.bfloat16),
        "turned": np.zeros((8, 4), np.float32).T,
        "bytes": bytearray(16),
        "scalar": np.zeros((), np.int64),
    }


def new_tensors(seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.random((4, 8), np.float32),
        "b": rng.random((3, 5)).astype(ml_dtypes.bfloat16),
        "turned": rng.random((4, 8), np.float32),
        "bytes": rng.integers(0, 255, 16, np.uint8),
        "scalar": np.int64(rng.integers(1 << 60)),
    }


def content(tensors) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(np.asarray(tensor)).tobytes() for name, tensor in tensors.items()}


@pytest.fixture
def live():
    return live_tensors()


@pytest.fixture
def receiver(job, live):
    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job) as receiver:
        yield receiver


class WithMetadata:
    def __init__(self, tensors):
        self.tensors = tensors
        self.metadata = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]

    def __iter__(self):
        return iter(self.tensors.items())


FORMS = {
    "mapping": lambda tensors: tensors,
    "pairs": lambda tensors: list(tensors.items()),
    "generator": lambda tensors: ((name, tensor) for name, tensor in tensors.items()),
    "callable": lambda tensors: lambda: ((name, tensor.copy()) for name, tensor in tensors.items()),
    "metadata": WithMetadata,
    "backwards": lambda tensors: list(reversed(tensors.items())),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_sender_takes_every_form_of_source(job, live, receiver, form):
    given = new_tensors()
    with headrace.Sender.connect(job=job) as sender:
        report = sender.send("run/1", FORMS[form](given))
    assert content(live) == content(given)
    assert report.proven
    assert report.version == "run/1"
    assert [receipt.tensors for receipt in report.receipts] == [5]
    assert report.wire_bytes == sum(map(len, content(given).values()))
    assert receiver.serving_version() == "run/1"


@pytest.mark.parametrize("form", ["mapping", "pairs", "generator", "bucket"])
def test_a_plain_update_takes_every_form(live, receiver, form):
    given = new_tensors()
    with receiver.update("run/1") as update:
        if form == "bucket":
            memory, metas = bytearray(), []
            for name, tensor in given.items():
                memory += bytes(-len(memory) % 16)
                metas.append((name, len(memory), tensor.shape, tensor.dtype))
                memory += tensor.tobytes()
            update.load(headrace.Bucket(memory, metas))
        else:
            update.load(FORMS[form](given))
    assert content(live) == content(given)
    assert update.receipt.proven
    assert update.receipt.proved_bytes == 5
    assert receiver.serving_version() == "run/1"


def test_sources_that_are_not_contiguous_arrive_in_order(job, live, receiver):
    given = new_tensors()
    given["a"] = np.asfortranarray(given["a"])
    given["b"] = np.repeat(given["b"], 2, axis=1)[:, ::2]
    with receiver.update("run/1") as update:
        update.load(given)
    assert content(live) == content(given)
    again = new_tensors(2)
    again["a"] = np.asfortranarray(again["a"])
    with headrace.Sender.connect(job=job) as sender:
        sender.send("run/2", again)
    assert content(live) == content(again)


def test_both_ways_prove_the_same_fingerprints(job, receiver):
    given = new_tensors()
    with receiver.update("run/1") as update:
        update.load(given)
    plain = receiver.fingerprint()
    with headrace.Sender.connect(job=job) as sender:
        sender.send("run/2", given)
        assert receiver.fingerprint() == plain
        assert len({value.value for value in plain.values()}) == 5
        sender.send("run/3", new_tensors(2))
    assert all(value.value != plain[name].value for name, value in receiver.fingerprint().items())


def test_many_updates_leave_no_file_and_no_mapping_behind(job, live, receiver):
    given = new_tensors()
    before = Counter()
    for step in range(1, 31):
        with headrace.Sender.connect(job=job, bucket_bytes=1 << 16) as sender:
            sender.send(f"run/{step}", given)
        if step == 5:
            gc.collect()
            before = Counter(open_files())
    gc.collect()
    # The receiver lets go of a sender's memory when it has seen it leave.
    eventually(lambda: not mapped_segments() and Counter(open_files()) <= before)


def test_receivers_that_come_and_go_leave_nothing(job, live):
    table = headrace.StorageTable.from_tensors(live)
    counts = []
    for _ in range(3):
        with headrace.Receiver(table, job=job):
            pass
        counts.append(open_files())
    assert counts[0] == counts[1] == counts[2]


def test_nothing_is_served_before_an_update_and_while_one_is_torn(live, receiver):
    assert receiver.serving_version() is None
    given = new_tensors()
    with receiver.update("run/1") as update:
        update.load(given)
    with pytest.raises(RuntimeError, match="mine"), receiver.update("run/2") as update:
        update.load([("a", given["a"])])
        raise RuntimeError("mine")
    assert receiver.status().state == "torn"
    assert receiver.serving_version() is None
    assert "RuntimeError: mine" in receiver.status().last_failure
    with receiver.update("run/3") as update:
        update.load(given)
    assert receiver.serving_version() == "run/3"


def test_an_exception_before_the_first_byte_changes_nothing(live, receiver):
    with receiver.update("run/1") as update:
        update.load(new_tensors())
    with pytest.raises(KeyError), receiver.update("run/2"):
        raise KeyError("nothing was loaded")
    assert receiver.serving_version() == "run/1"


@pytest.mark.parametrize(
    ("change", "field", "expected", "actual"),
    [
        ({"a": np.zeros((4, 9), np.float32)}, "a", "[4,8]", "[4,9]"),
        ({"b": np.zeros((3, 5), np.float64)}, "b", None, None),
        ({"other": np.zeros(2)}, "other", None, None),
    ],
    ids=["shape", "dtype", "name"],
)
def test_a_refused_update_names_the_tensor_in_a_field(job, live, receiver, change, field, expected, actual):
    before = content(live)
    with headrace.Sender.connect(job=job) as sender:
        with pytest.raises(headrace.InvalidArgument) as caught:
            sender.send("run/1", {**new_tensors(), **change})
        assert caught.value.name == field
        assert caught.value.rank == 0
        assert caught.value.phase == "manifest"
        if expected:
            assert (caught.value.expected, caught.value.actual) == (expected, actual)
        assert content(live) == before
        sender.send("run/1", new_tensors())
    assert receiver.serving_version() == "run/1"


def test_what_is_missing_is_refused_by_both_ways(job, live, receiver):
    given = new_tensors()
    del given["b"]
    with headrace.Sender.connect(job=job) as sender, pytest.raises(headrace.InvalidArgument, match="b: no sender brings it"):
        sender.send("run/1", given)
    with pytest.raises(headrace.InvalidArgument, match="b: no sender brings it"), receiver.update("run/1") as update:
        update.load(given)
    assert receiver.status().state == "torn"


class Counted(np.ndarray):
    """An array that knows how many of its kind exist."""

    alive = 0
    most = 0

    def __new__(cls, data):
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        return data.view(cls)

    def __del__(self):
        if self.base is not None:
            Counted.alive -= 1


@pytest.mark.parametrize("batch, at_once", [(1, 2), (4, 5), (10_000, 64)])
def test_of_a_source_that_makes_its_tensors_as_many_exist_as_are_gathered(job, batch, at_once):
    live = {f"t{i}": np.zeros(8, np.float32) for i in range(64)}

    def make():
        for i in range(64):
            yield f"t{i}", Counted(np.full(8, i, np.float32))

    class Announced:
        metadata = [(name, "F32", (8,)) for name in live]

        def __iter__(self):
            return iter(())

    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job), headrace.Sender.connect(job=job) as sender:
        Counted.most = 0
        with sender.update("run/1", Announced()) as update:
            assert update.add(make(), batch_tensors=batch) == 64 * 32
        assert Counted.most <= at_once
        Counted.most = 0
        update = sender.update("run/2", make)
        update.__enter__()
        assert Counted.most <= 2, "for names and shapes one at a time will do"
        update.finish()
    assert [tensor[0] for tensor in live.values()] == list(range(64))


def test_the_same_tuple_of_metadata_stays_known_and_another_one_does_not(job, live, receiver):
    class Announced:
        def __init__(self, metadata):
            self.metadata = metadata

        def __iter__(self):
            return iter(new_tensors(self.step).items())

    given = new_tensors()
    fixed = tuple((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in given.items())
    changing = [list(meta) for meta in fixed]
    with headrace.Sender.connect(job=job) as sender:
        for step, source in enumerate([Announced(fixed), Announced(fixed), Announced(tuple(changing)), Announced(fixed)], 1):
            source.step = step
            report = sender.send(f"run/{step}", source)
            assert content(live) == content(new_tensors(step)), step
            assert [receipt.tensors for receipt in report.receipts] == [5]
        changing[0][2] = (8, 4)
        with pytest.raises(headrace.InvalidArgument, match=r"a: shape \[8,4\]"):
            sender.send("run/5", Announced(tuple(changing)))
        source.step = 6
        sender.send("run/6", source)
    assert content(live) == content(new_tensors(6))


def test_a_source_whose_metadata_opens_another_update_of_its_sender_leaves_that_one_as_it_is(job, live, receiver):
    class Nested:
        def metadata(self):
            for name, tensor in new_tensors().items():
                yield name, str(tensor.dtype), tensor.shape
                if name == "b":
                    sender.send("run/1", new_tensors(2))

        def __iter__(self):
            return iter(new_tensors(3).items())

    with headrace.Sender.connect(job=job) as sender:
        sender.send("run/2", Nested())
    assert content(live) == content(new_tensors(3))


def test_a_source_that_hands_out_one_list_again_and_again_is_read_as_it_was(job, live, receiver):
    def reusing(tensors):
        pair = [None, None]
        for name, tensor in tensors.items():
            pair[0], pair[1] = "".join(reversed(name[::-1])), tensor
            yield pair

    with receiver.update("run/1") as update:
        update.load(reusing(new_tensors()))
    assert content(live) == content(new_tensors())
    with headrace.Sender.connect(job=job) as sender:
        with sender.update("run/2", new_tensors(2)) as update:
            update.add(reusing(new_tensors(2)))
        assert content(live) == content(new_tensors(2))
        sender.send("run/3", lambda: reusing(new_tensors(3)))
    assert content(live) == content(new_tensors(3))


@pytest.mark.parametrize("other", [{"w": np.zeros(4, np.float32)}, {"x": np.zeros(4, np.float32)}], ids=["same name", "other name"])
def test_an_update_that_is_refused_leaves_the_open_one_with_its_own_tensors(job, other):
    live = {"w": np.zeros(65_536, np.float32)}
    given = np.arange(65_536, dtype=np.float32)
    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job), headrace.Sender.connect(job=job) as sender:
        with sender.update("run/1", {"w": given}) as update:
            with pytest.raises(headrace.FailedPrecondition, match="an update is open"):
                sender.update("run/2", other).__enter__()
            with pytest.raises(headrace.InvalidArgument, match="w: the tensor is F32 of shape"):
                update.add([("w", np.zeros(4, np.float32))])
            update.add([("w", given)])
    assert (live["w"] == given).all()


def test_tensors_that_open_another_update_as_they_are_gathered_are_not_taken_for_its_own(job):
    live = {"w": np.zeros(65_536, np.float32), "v": np.zeros(4, np.float32)}
    small = {"w": np.zeros(65_536, np.float32), "v": np.ones(4, np.float32)}
    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job), headrace.Sender.connect(job=job) as sender:
        first = sender.update("run/1", small)

        def reopening():
            yield "v", small["v"]
            sender._abort(OSError("begin anew"))
            sender.update("run/2", small).__enter__()

        with pytest.raises(headrace.FailedPrecondition, match="another update was opened"):
            first.__enter__().add(reopening())
        sender._abort(None)
        sender.send("run/3", small)
    assert (live["v"] == 1).all()


@pytest.mark.parametrize("limit", ["batch_tensors", "batch_bytes"])
def test_a_batch_of_nothing_is_refused(job, receiver, limit):
    with headrace.Sender.connect(job=job) as sender, pytest.raises(headrace.InvalidArgument, match=limit):
        with sender.update("run/1", new_tensors()) as update:
            update.add(new_tensors().items(), **{limit: 0})


def test_what_is_gathered_is_sent_when_it_has_its_bytes(job):
    live = {f"t{i}": np.zeros(8, np.float32) for i in range(8)}
    alive = []

    def make():
        for i in range(8):
            alive.append(Counted.alive)
            yield f"t{i}", Counted(np.full(8, i, np.float32))

    with headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job), headrace.Sender.connect(job=job) as sender:
        before = Counted.alive
        with sender.update("run/1", live) as update:
            update.add(make(), batch_bytes=64)
    assert max(alive) - before <= 2, "two of 32 bytes"
    assert [tensor[0] for tensor in live.values()] == list(range(8))


def test_a_source_that_raises_midway_tears_and_the_next_update_heals(job, live, receiver):
    def broken():
        for count, item in enumerate(new_tensors().items()):
            if count == 3 and calls:
                raise OSError("disk gone")
            yield item
        calls.append(1)

    calls: list[int] = []
    with headrace.Sender.connect(job=job, bucket_bytes=1 << 16) as sender:
        with pytest.raises(OSError, match="disk gone"):
            sender.send("run/1", broken)
        sender.send("run/2", new_tensors())
    assert content(live) == content(new_tensors())


def test_an_exception_in_the_body_gives_the_update_up(job, live, receiver):
    with headrace.Sender.connect(job=job) as sender:
        with pytest.raises(ZeroDivisionError), sender.update("run/1", new_tensors()):
            raise ZeroDivisionError("in the middle")
        assert receiver.serving_version() is None
        eventually(lambda: "ZeroDivisionError: in the middle" in (receiver.status().last_failure or ""))
        assert sender.send("run/2", new_tensors()).proven


def test_tensors_may_be_added_by_hand(job, live, receiver):
    given = new_tensors()
    with headrace.Sender.connect(job=job) as sender, sender.update("run/1", given) as update:
        for item in given.items():
            assert update.add([item]) == item[1].nbytes
    assert update.report.proven
    assert content(live) == content(given)


class Announced:
    """Says first what it does not bring then."""

    metadata = [("w", "F32", (4,))]

    def __init__(self, tensor):
        self.tensor = tensor

    def __iter__(self):
        yield "w", self.tensor


@pytest.mark.parametrize(
    "tensor",
    [
        np.ones(2, np.float32),
        np.ones((), np.float32),
        np.ones(10, np.float32),
        np.ones((2, 2), np.float32),
        np.ones(4, np.float16),
        np.ones(4, np.float64),
        np.ones(4, np.int32),
    ],
)
def test_a_tensor_that_is_not_what_was_announced_is_refused_and_nothing_is_committed(job, tensor):
    first = iter([np.ones(4, np.float32), tensor])
    whole = {"w": headrace.Part(tensor, (4,), ((0,), (4,)))} if tensor.dtype == np.float32 else {}
    live = np.zeros(4, np.float32)
    table = headrace.StorageTable.from_tensors({"w": live})
    with headrace.Receiver(table, job=job) as receiver, headrace.Sender.connect(job=job) as sender:
        for source in (Announced(tensor), lambda: iter([("w", next(first))]), whole):
            if source:
                with pytest.raises(headrace.InvalidArgument, match=r"^w: the tensor is .*, its entry F32 of shape \[4\]"):
                    sender.send("run/1", source)
        assert receiver.serving_version() is None and live.tolist() == [0] * 4
        assert sender.send("run/1", {"w": np.arange(4, dtype=np.float32)}).proven


@pytest.mark.parametrize(
    "metadata, why",
    [
        ([("w", "F32", 4)], "^w: expected a sequence of integers"),
        ([("w", "F32", ("x",))], "^w: expected a sequence of integers"),
        ([("w", "F32", (1 << 70,))], "^w: expected a sequence of integers"),
        ([("w", "F32", (4,), "box")], r"^w: expected a box \(lo, hi\), not 'box'"),
        ([("w", "F32", (4,), ("l", "h"))], "^w: expected a sequence of integers"),
        ([("w",)], "metadata: expected"),
        ([None], "metadata: expected"),
        ([(7, "F32", (4,))], "expected a name, text of UTF-8, not 7"),
    ],
)
def test_metadata_that_is_none_is_refused_with_what_it_is(job, metadata, why):
    source = Announced(np.ones(4, np.float32))
    source.metadata = metadata
    table = headrace.StorageTable.from_tensors({"w": np.zeros(4, np.float32)})
    with headrace.Receiver(table, job=job), headrace.Sender.connect(job=job) as sender:
        with pytest.raises(headrace.InvalidArgument, match=why):
            sender.send("run/1", source)


def test_fingerprints_are_not_read_where_storage_was(job):
    live = np.zeros(4, np.float32)
    places = [{"w": live}]
    table = headrace.StorageTable.from_tensors({"w": live})
    with headrace.Receiver(table, job=job, hooks=headrace.Hooks(locate=lambda: places[-1])) as receiver:
        assert list(receiver.fingerprint()) == ["w"]
        for elsewhere in ({"w": np.zeros(4, np.float32)}, {}):
            places.append(elsewhere)
            with pytest.raises(headrace.FailedPrecondition, match="w lies elsewhere than it was sealed"):
                receiver.fingerprint()


@pytest.mark.parametrize(
    "meta", [("w", 1 << 70, (4,), "F32"), ("w", 0.5, (4,), "F32"), ("w", "0", (4,), "F32"), ("w", 0, 4, "F32"), ("w", 0, ("4",), "F32")]
)
def test_a_bucket_with_what_is_no_number_names_the_tensor(meta):
    with pytest.raises(headrace.InvalidArgument, match="^w: "):
        headrace.Bucket(bytearray(16), [meta])


def test_parts_of_two_senders_make_a_whole(job, live, receiver):
    given = new_tensors()
    rest = {name: tensor for name, tensor in given.items() if name != "a"}
    upper = headrace.Part(given["a"][:2], (4, 8), ((0, 0), (2, 8)))
    lower = headrace.Part(given["a"][2:], (4, 8), ((2, 0), (4, 8)))
    names = ["lead", "second"]

    async def both():
        with headrace.Sender.connect(job=job, sender="lead") as lead, headrace.Sender.connect(job=job, sender="second") as second:
            return await asyncio.gather(
                lead.send_async("run/1", {**rest, "a": upper}, senders=names), second.send_async("run/1", {"a": lower}, senders=names)
            )

    reports = asyncio.run(both())
    assert all(report.proven for report in reports)
    assert content(live) == content(given)


def test_plain_updates_have_an_async_form(live, receiver):
    receipt = asyncio.run(receiver.load_async("run/1", new_tensors()))
    assert receipt.proven
    assert content(live) == content(new_tensors())


def test_packed_fp4_travels_as_bytes(job):
    live = np.zeros((2, 4), np.uint8)
    given = np.arange(8, dtype=np.uint8).reshape(2, 4)
    with headrace.Receiver(headrace.StorageTable.from_tensors({"w": live}), job=job) as receiver:
        with receiver.update("run/1") as update:
            update.load(headrace.Bucket(given.tobytes(), [("w", 0, (2, 8), "F4")]))
        assert live.tobytes() == given.tobytes()
        with pytest.raises(headrace.InvalidArgument, match="whole bytes"):
            headrace.Bucket(bytes(8), [("w", 0, (2, 7), "F4")])


@pytest.mark.parametrize(
    "meta", [("w", -1, (4,), "U8"), ("w", 5, (4,), "U8"), ("w", 0, (1 << 62, 4), "F32"), ("w", 0, (4,), "nonsense"), ("w", 0)]
)
def test_a_bucket_whose_table_lies_is_refused(meta):
    with pytest.raises(headrace.InvalidArgument):
        headrace.Bucket(bytes(8), [meta])


def test_engine_events_and_wrong_arguments(live, receiver, job):
    receiver.notify("discard")
    assert receiver.status().discards == 1
    with pytest.raises(headrace.InvalidArgument, match="event nap"):
        receiver.notify("nap")
    for version in ("run", "run/x", "", "a b/1"):
        with pytest.raises(headrace.InvalidArgument, match="RUN/STEP|run id"):
            receiver.update(version).__enter__()
    with pytest.raises(headrace.FailedPrecondition):
        headrace.Receiver(receiver.table, job=job)
    with pytest.raises(headrace.InvalidArgument, match="expected \\(name, tensor\\)"), receiver.update("run/1") as update:
        update.load(["a"])


def test_a_closed_end_says_so(job, live):
    receiver = headrace.Receiver(headrace.StorageTable.from_tensors(live), job=job)
    sender = headrace.Sender.connect(job=job)
    assert [info.rank for info in sender.receivers] == [0]
    sender.close()
    receiver.close()
    sender.close()
    receiver.close()
    for call in (receiver.status, lambda: sender.send("run/1", new_tensors()), lambda: sender.receivers):
        with pytest.raises(headrace.FailedPrecondition, match="closed"):
            call()


def test_no_receiver_is_unavailable(job):
    with pytest.raises(headrace.Unavailable):
        headrace.Sender.connect(job=job, connect_timeout_ms=50)


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_after_a_second(monkeypatch, terminal):
    now = [100.0]
    monkeypatch.setattr(sender_module.time, "monotonic", lambda: now[0])
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    progress = sender_module._Progress("sending run/1", 4_000_000_000)
    for now[0], done in ((100.5, 500_000_000), (102.0, 2_000_000_000), (102.05, 2_100_000_000)):
        progress.update(done)
    shown = screen.getvalue()
    progress.end()
    assert shown == ("\r\x1b[Ksending run/1 2.00 of 4.00 GB, 1.00 GB/s, 2 s left" if terminal else "")
    assert screen.getvalue() == shown + ("\r\x1b[K" if terminal else "")
