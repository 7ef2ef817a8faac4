"""Our two ends of verl's bucket wire, without verl."""

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import headrace
import pytest
import torch
import zmq
from headrace.integration.host_memory import Segment
from headrace.integration.peer_socket import PeerGone, PeerSocket, PeerTimeout
from headrace.integration.unpickle import RefusedPickle
from headrace.integration.verl.wire import BucketReceiver, BucketSender
from weight_streams import WAIT_S, Landed, assert_same, laughs, mixed, new_handle, nothing_left_behind, start, wait_until


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    with nothing_left_behind():
        yield


def receive(handle: str, landed: Landed, receiver: BucketReceiver | None = None) -> list[bool]:
    lasts = []

    def take(bucket: object, is_last: bool) -> None:
        lasts.append(is_last)
        landed.take(bucket.tensors())

    (receiver or BucketReceiver(handle, WAIT_S)).receive(take)
    return lasts


@pytest.mark.parametrize("bucket_bytes", [600, 1_500, 4_096, 1 << 20])
def test_every_tensor_arrives_whatever_the_bucket_holds(bucket_bytes: int) -> None:
    handle, landed, sent = new_handle("any"), Landed(), mixed()
    receiving = start(lambda: receive(handle, landed))
    BucketSender(handle, bucket_bytes, WAIT_S).send(iter(sent.items()))
    lasts = receiving.result(WAIT_S)
    assert_same(landed, sent)
    assert lasts[-1] is True and not any(lasts[:-1])


def test_the_sender_may_be_first() -> None:
    handle, landed, sent = new_handle("first"), Landed(), mixed()
    sending = start(lambda: BucketSender(handle, 1_000, WAIT_S).send(sent.items()))
    wait_until(lambda: os.path.exists(handle.removeprefix("ipc://")))
    receive(handle, landed)
    sending.result(WAIT_S)
    assert_same(landed, sent)


def test_an_update_of_nothing_is_one_empty_last_bucket() -> None:
    handle, landed = new_handle("empty"), Landed()
    receiving = start(lambda: receive(handle, landed))
    BucketSender(handle, 1_000, WAIT_S).send([])
    assert receiving.result(WAIT_S) == [True] and landed == {}


def test_three_updates_in_a_row_with_known_tables() -> None:
    handle = new_handle("again")
    receiver, sender = BucketReceiver(handle, WAIT_S), BucketSender(handle, 2_000, WAIT_S)
    for seed in range(3):
        landed, sent = Landed(), mixed(seed)
        receiving = start(lambda landed=landed: receive(handle, landed, receiver))
        sender.send(sent.items())
        receiving.result(WAIT_S)
        assert_same(landed, sent)


def test_an_asynchronous_source_is_taken() -> None:
    import asyncio

    handle, landed, sent = new_handle("async"), Landed(), mixed()

    async def source():
        for item in sent.items():
            await asyncio.sleep(0)
            yield item

    receiving = start(lambda: receive(handle, landed))
    asyncio.run(BucketSender(handle, 1_000, WAIT_S).async_send_weights(source()))
    receiving.result(WAIT_S)
    assert_same(landed, sent)


def test_a_view_that_is_kept_stays_mapped() -> None:
    handle, kept = new_handle("kept"), []
    sent = {"a": torch.arange(1_000, dtype=torch.int32)}
    receiving = start(lambda: BucketReceiver(handle, WAIT_S).receive(lambda bucket, _: kept.extend(bucket.tensors())))
    BucketSender(handle, 1 << 20, WAIT_S).send(sent.items())
    receiving.result(WAIT_S)
    assert torch.equal(kept[0][1], sent["a"])


def test_a_callback_that_raises_does_not_stop_the_sender_and_is_raised_at_the_end() -> None:
    handle, calls = new_handle("raises"), []

    def fail_second(bucket: object, is_last: bool) -> None:
        calls.append(is_last)
        if len(calls) == 2:
            raise RuntimeError("no room for these")

    receiving = start(lambda: BucketReceiver(handle, WAIT_S).receive(fail_second))
    BucketSender(handle, 1_000, WAIT_S).send(mixed().items())
    with pytest.raises(RuntimeError, match="no room for these"):
        receiving.result(WAIT_S)
    assert calls == [False, False], "nothing is taken after the first error"


def test_what_is_no_exception_ends_the_update_at_once_with_an_answer() -> None:
    handle = new_handle("interrupt")

    def interrupt(bucket: object, is_last: bool) -> None:
        raise KeyboardInterrupt

    receiving = start(lambda: BucketReceiver(handle, WAIT_S).receive(interrupt))
    with pytest.raises((PeerGone, PeerTimeout)):
        BucketSender(handle, 1_000, WAIT_S).send(mixed().items())
    with pytest.raises(KeyboardInterrupt):
        receiving.result(WAIT_S)


def test_a_source_that_raises_ends_both_sides() -> None:
    handle, landed = new_handle("source"), Landed()

    def source():
        yield from list(mixed().items())[:30]
        raise ValueError("the trainer has lost a shard")

    receiving = start(lambda: receive(handle, landed))
    with pytest.raises(ValueError, match="lost a shard"):
        BucketSender(handle, 1_000, WAIT_S).send(source())
    with pytest.raises(PeerGone, match="a bucket's table"):
        receiving.result(WAIT_S)


def test_a_wait_for_nobody_ends() -> None:
    handle = new_handle("nobody")
    with pytest.raises(PeerTimeout, match="nobody connected within 0.1 s"):
        BucketSender(handle, 1_000, 0.1).send(mixed().items())
    with pytest.raises(PeerTimeout, match="no the name of the shared segment within 0.1 s"):
        BucketReceiver(handle, 0.1).receive(lambda *_: None)


def test_what_torch_computes_as_it_reads_is_sent_as_it_is_read() -> None:
    handle, landed = new_handle("lazy"), Landed()
    complex_one = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    sent = {"neg": torch._neg_view(torch.ones(4)), "conj": complex_one.conj(), "imag": complex_one.conj().imag}
    receiving = start(lambda: receive(handle, landed))
    BucketSender(handle, 4_096, WAIT_S).send(sent.items())
    receiving.result(WAIT_S)
    assert landed["neg"].tolist() == [-1] * 4
    assert landed["conj"].tolist() == [1 - 2j, 3 + 4j] and landed["imag"].tolist() == [-2, 4]


def test_a_tensor_without_memory_is_refused_by_name() -> None:
    handle = new_handle("gone")
    receiving = start(lambda: receive(handle, Landed()))
    gone = torch.ones(4)
    gone.untyped_storage().resize_(0)
    with pytest.raises(headrace.InvalidArgument, match="w has no memory"):
        BucketSender(handle, 4_096, WAIT_S).send([("w", gone)])
    with pytest.raises(PeerGone):
        receiving.result(WAIT_S)


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), 0, -1])
def test_a_wait_that_would_not_end_is_refused(wait_s: float) -> None:
    with pytest.raises(ValueError, match="a wait of"):
        BucketReceiver(new_handle("wait"), wait_s).receive(lambda *_: None)


def test_a_name_that_comes_twice_and_a_tensor_of_a_device_are_refused() -> None:
    for sent, words in (
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "a came twice"),
        ([("a", torch.empty(2, device="meta"))], "a is on meta"),
    ):
        handle = new_handle("refused")
        receiving = start(lambda handle=handle: receive(handle, Landed()))
        with pytest.raises(headrace.Error, match=words):
            BucketSender(handle, 1_000, WAIT_S).send(sent)
        with pytest.raises(PeerGone):
            receiving.result(WAIT_S)


class RawSender:
    """A sender that puts any bytes on the wire, one answer after the other."""

    def __init__(self, handle: str):
        self.socket = zmq.Context.instance().socket(zmq.REQ)
        self.socket.rcvtimeo = self.socket.sndtimeo = int(WAIT_S * 1_000)
        self.socket.bind(handle)
        self.path = handle.removeprefix("ipc://")

    def say(self, message: object) -> bytes:
        self.socket.send(message if isinstance(message, bytes) else pickle.dumps(message, 4))
        return self.socket.recv()

    def __enter__(self) -> "RawSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)
        if os.path.exists(self.path):
            os.remove(self.path)


LAST = {"bucket_meta": {}, "is_last": True}


def entry(name: str = "w", **changes: object) -> dict:
    return {"name": name, "shape": torch.Size([2]), "dtype": torch.float32, "offset": 0, "handle": None, **changes}


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (entry(offset=4_090), "bytes 4090 to 4098 of a buffer of 4096"),
        (entry(offset=-4), "bytes -4 to 4"),
        (entry(offset=2**62), "of a buffer of 4096"),
        (entry(shape=torch.Size([2**40, 2**40])), "of a buffer of 4096"),
        (entry(shape="no"), "name, offset, shape and dtype are expected"),
        (entry(shape=(-1,)), r"shape \(-1,\)"),
        (entry(dtype="float32"), "name, offset, shape and dtype are expected"),
        (entry(name=3), "name, offset, shape and dtype are expected"),
        (entry(handle=(os.system, ("true",))), "posix.system"),
        (entry(handle=(torch.zeros, (1,))), "not in the list"),
        (entry(handle=("a", "b", "c")), "no \\(function, arguments\\)"),
        ("w", "an entry that is a str"),
        # A word too much of these, and the message of the error would have no end.
        (entry(name=laughs()), "name, offset, shape and dtype are expected"),
        (entry(shape=(laughs(),)), "shape"),
        (entry(handle=(laughs(), ())), "no \\(function, arguments\\)"),
        (entry(shape=(2**62,) * 5_000), "5000 dimensions, at most 64"),
        (entry(shape=[2**62] * 300_000), "300000 dimensions, at most 64"),
        (entry(shape=(2**63,)), "shape"),
    ],
)
def test_a_hostile_table_is_answered_refused_and_nothing_is_taken(meta: object, words: str) -> None:
    handle, calls = new_handle("table"), []
    with RawSender(handle) as sender:
        segment = Segment(4_096, "verl_weights")
        receiving = start(lambda: BucketReceiver(handle, WAIT_S).receive(lambda *bucket: calls.append(bucket)))
        assert sender.say({"name": segment.name, "size": 4_096}) == b""
        segment.unlink()
        assert sender.say({"bucket_meta": {"w": meta}, "is_last": False}) == b""
        assert sender.say(LAST) == b""
        with pytest.raises(RefusedPickle, match=words):
            receiving.result(WAIT_S)
    assert calls == []


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        ({"name": "../etc/passwd", "size": 10}, ValueError, "no name of a shared segment"),
        ({"name": "/verl_weights_x", "size": 10}, ValueError, "no name of a shared segment"),
        ({"name": "verl_weights_not_there", "size": 10}, FileNotFoundError, "verl_weights_not_there"),
        ({"name": "verl_weights_x"}, RefusedPickle, "no shared segment"),
        ({"name": laughs(), "size": 10}, ValueError, "no name of a shared segment"),
        ([1], RefusedPickle, "no shared segment"),
        (b"no pickle", RefusedPickle, "protocol 4 or 5"),
        (pickle.dumps((torch.multiprocessing.reductions.rebuild_cuda_tensor, (1, 2))), headrace.Unsupported, "CUDA memory"),
    ],
)
def test_a_hostile_first_message_is_answered_and_refused(message: object, error: type, words: str) -> None:
    handle = new_handle("begin")
    with RawSender(handle) as sender:
        receiving = start(lambda: BucketReceiver(handle, WAIT_S).receive(lambda *_: None))
        assert sender.say(message) == b""
        assert sender.say(LAST) == b""
        with pytest.raises(error, match=words):
            receiving.result(WAIT_S)


def test_a_segment_that_is_shorter_than_announced_is_refused() -> None:
    handle = new_handle("short")
    segment = Segment(4_096, "verl_weights")
    with RawSender(handle) as sender:
        receiving = start(lambda: BucketReceiver(handle, WAIT_S).receive(lambda *_: None))
        sender.say({"name": segment.name, "size": 1 << 40})
        segment.unlink()
        sender.say(LAST)
        with pytest.raises(ValueError, match="1099511627776 bytes are announced, it has 4096"):
            receiving.result(WAIT_S)


def test_any_alignment_and_any_gap_is_read() -> None:
    handle, landed = new_handle("gap"), Landed()
    segment = Segment(4_096, "verl_weights")
    values = torch.tensor([1.5, -2.0])
    segment.memory[17:25] = values.numpy().tobytes()
    segment.memory[4_088:4_096] = values.numpy().tobytes()
    with RawSender(handle) as sender:
        receiving = start(lambda: receive(handle, landed))
        sender.say({"name": segment.name, "size": 4_096})
        segment.unlink()
        sender.say({"bucket_meta": {"odd": entry("odd", offset=17), "end": entry("end", offset=4_088)}, "is_last": False})
        sender.say(LAST)
        receiving.result(WAIT_S)
    assert_same(landed, {"odd": values, "end": values})


CHILD = """
import sys, time, torch, zmq
from headrace.integration.peer_socket import PeerSocket
from headrace.integration.verl.wire import BucketReceiver, BucketSender
def sleep(*_):
    print("here", flush=True)
    time.sleep(600)
def source():
    yield "a", torch.ones(100)
    yield "b", torch.ones(200)
    sleep()
if sys.argv[1] == "receive":
    BucketReceiver(sys.argv[2]).receive(sleep)
elif sys.argv[1] == "ask":
    asking = PeerSocket(zmq.Context.instance(), zmq.REQ, sys.argv[2], 600)
    asking.send(b"a question", "in a test")
    asking.receive("an answer")
else:
    BucketSender(sys.argv[2], 1024).send(source())
"""


def child(role: str, handle: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", CHILD, role, handle], stdout=subprocess.PIPE, text=True)


def test_a_receiver_that_is_killed_ends_the_senders_wait_at_once() -> None:
    handle = new_handle("killed")
    process = child("receive", handle)
    sending = start(lambda: BucketSender(handle, 1_000, 600).send(mixed().items()))
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerGone, match="an answer"):
        sending.result(WAIT_S)
    process.wait(WAIT_S)


def test_a_sender_that_is_killed_ends_the_receivers_wait_at_once_and_leaves_no_segment() -> None:
    handle, landed = new_handle("killed"), Landed()
    process = child("send", handle)
    receiving = start(lambda: BucketReceiver(handle, 600).receive(lambda bucket, _: landed.take(bucket.tensors())))
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerGone, match="a bucket's table"):
        receiving.result(WAIT_S)
    process.wait(WAIT_S)
    # A killed process cannot take its socket's file away; the next sender of that address does.
    receiving = start(lambda: receive(handle, Landed()))
    BucketSender(handle, 1_000, WAIT_S).send([])
    receiving.result(WAIT_S)


def test_an_answer_is_settled_once_however_often_it_is_asked_for() -> None:
    handle, context = new_handle("settle"), zmq.Context.instance()

    def echo() -> None:
        with PeerSocket(context, zmq.REP, handle, WAIT_S) as peer:
            for _ in range(2):
                peer.send(peer.receive("a question"), "which waits for an answer")

    with PeerSocket(context, zmq.REQ, handle, WAIT_S) as peer:
        assert peer.settle() == b"", "nothing was asked"
        answering = start(echo)
        for question in (b"one", b"two"):
            peer.send(question, "an answer")
            assert [peer.settle(), peer.settle()] == [question, b""]
        answering.result(WAIT_S)


def knock(handle: str) -> None:
    """Connects to a socket's file and leaves, when it has been let in: ZeroMQ then begins to speak."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(handle.removeprefix("ipc://"))
        assert stranger.recv(1)


def test_who_connects_without_a_handshake_and_leaves_is_no_lost_peer() -> None:
    handle, context = new_handle("stranger"), zmq.Context.instance()

    def echo() -> None:
        with PeerSocket(context, zmq.REP, handle, WAIT_S) as peer:
            for _ in range(2):
                peer.send(peer.receive("a question"), "which waits for an answer")

    with PeerSocket(context, zmq.REQ, handle, WAIT_S) as peer:
        for question in (b"before the peer came", b"beside the peer"):
            knock(handle)
            wait_until(lambda: peer._monitor.poll(0))
            if question.startswith(b"before"):
                answering = start(echo)
            peer.send(question, "an answer")
            assert peer.settle() == question
        answering.result(WAIT_S)
        with pytest.raises(PeerGone, match="went away"):
            peer.send(b"to nobody", "an answer")
            peer.settle()


def test_a_side_that_fails_leaves_its_peer_that_lives_the_file_and_what_it_can_do_with_it() -> None:
    handle, context = new_handle("alive"), zmq.Context.instance()
    with context.socket(zmq.REQ) as bound:
        bound.linger = 0
        bound.rcvtimeo = bound.sndtimeo = int(WAIT_S * 1_000)
        bound.bind(handle)
        with pytest.raises(ValueError, match="of its own"), PeerSocket(context, zmq.REP, handle, WAIT_S) as peer:
            wait_until(lambda: not peer.lost())
            raise ValueError("a failure of its own")
        assert os.path.exists(handle.removeprefix("ipc://"))
        with PeerSocket(context, zmq.REP, handle, WAIT_S) as peer:
            bound.send(b"still there?")
            assert peer.receive("a question") == b"still there?"
            peer.send(b"yes", "in a test")
            assert bound.recv() == b"yes"
    os.unlink(handle.removeprefix("ipc://"))


def test_a_side_that_fails_takes_the_file_of_a_killed_peer_away_before_it_has_heard_of_its_end() -> None:
    handle = new_handle("killed-first")
    process = child("ask", handle)
    with pytest.raises(ValueError, match="heard of it elsewhere"), PeerSocket(zmq.Context.instance(), zmq.REP, handle, WAIT_S) as peer:
        assert peer.receive("a question") == b"a question"
        process.kill()
        raise ValueError("heard of it elsewhere")
    assert not os.path.exists(handle.removeprefix("ipc://"))
    process.wait(WAIT_S)


def test_the_end_of_a_socket_takes_nothing_from_the_next_one_of_its_name() -> None:
    handle = new_handle("again")
    contexts = [zmq.Context() for _ in range(3)]
    first = PeerSocket(contexts[0], zmq.REQ, handle, WAIT_S)
    with PeerSocket(contexts[1], zmq.REQ, handle, WAIT_S) as second:
        first.close()
        contexts[0].term()  # returns when ZeroMQ has done all that it does at a socket's end
        with PeerSocket(contexts[2], zmq.REP, handle, WAIT_S) as peer:
            second.send(b"there?", "in a test")
            assert peer.receive("a question") == b"there?"
            peer.send(b"yes", "in a test")
            assert second.receive("an answer") == b"yes"
    assert not os.path.exists(handle.removeprefix("ipc://"))
    for context in contexts[1:]:
        context.term()


def test_a_file_of_a_sockets_name_that_is_none_stays_as_it_is() -> None:
    handle = new_handle("file")
    path = handle.removeprefix("ipc://")
    with open(path, "w") as file:
        file.write("kept")
    try:
        with pytest.raises(PeerGone, match="File exists"):
            PeerSocket(zmq.Context.instance(), zmq.REQ, handle, WAIT_S)
        with open(path) as file:
            assert file.read() == "kept"
    finally:
        os.unlink(path)
