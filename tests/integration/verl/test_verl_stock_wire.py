"""verl's own BucketedWeightSender and BucketedWeightReceiver with our receiver and sender at the other end."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
import verl_cpu_platform  # noqa: F401
from headrace.integration.peer_socket import PeerGone, PeerTimeout
from headrace.integration.verl.wire import BucketReceiver, BucketSender
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender
from weight_streams import WAIT_S, Landed, assert_same, mixed, new_handle, nothing_left_behind, start, wait_until

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    print(f"\n{inspect.getfile(BucketedWeightSender)} of verl {metadata.version('verl')}")
    with nothing_left_behind():
        yield


def large() -> dict[str, torch.Tensor]:
    """More than one bucket of a megabyte."""
    named = mixed()
    for i in range(5):
        named[f"large.{i}"] = torch.arange(120_000 + i, dtype=torch.int32)
    return named


def stock_send(handle: str, named: object, megabytes: int = 1) -> None:
    asyncio.run(BucketedWeightSender(handle, bucket_size_mb=megabytes, use_shm=True).async_send_weights(named))


def stock_receive(handle: str, landed: Landed) -> list[bool]:
    lasts = []

    def take(named: list, is_last: bool) -> None:
        lasts.append(is_last)
        landed.take(named)

    BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(take)
    return lasts


def our_receive(handle: str, landed: Landed) -> list[bool]:
    lasts = []

    def take(bucket: object, is_last: bool) -> None:
        lasts.append(is_last)
        landed.take(bucket.tensors())

    BucketReceiver(handle, WAIT_S).receive(take)
    return lasts


def our_send(handle: str, named: object) -> None:
    BucketSender(handle, MEGABYTE, WAIT_S).send(named)


SIDES = {
    "the stock sender and our receiver": (stock_send, our_receive),
    "our sender and the stock receiver": (our_send, stock_receive),
    "both stock": (stock_send, stock_receive),
}


@pytest.mark.parametrize("sides", SIDES)
def test_receiver_first(sides: str) -> None:
    send, receive = SIDES[sides]
    handle, landed, sent = new_handle("stock"), Landed(), large()
    receiving = start(lambda: receive(handle, landed))
    send(handle, iter(sent.items()))
    lasts = receiving.result(WAIT_S)
    assert_same(landed, sent)
    assert len(lasts) > 1 and lasts[-1] is True and not any(lasts[:-1])


@pytest.mark.parametrize("sides", SIDES)
def test_sender_first(sides: str) -> None:
    send, receive = SIDES[sides]
    handle, landed, sent = new_handle("stock"), Landed(), large()
    sending = start(lambda: send(handle, iter(sent.items())))
    wait_until(lambda: os.path.exists(handle.removeprefix("ipc://")))
    receive(handle, landed)
    sending.result(WAIT_S)
    assert_same(landed, sent)


@pytest.mark.parametrize("sides", SIDES)
def test_an_update_of_nothing(sides: str) -> None:
    send, receive = SIDES[sides]
    handle, landed = new_handle("stock"), Landed()
    receiving = start(lambda: receive(handle, landed))
    send(handle, iter(()))
    assert receiving.result(WAIT_S) == [True] and landed == {}


def test_three_updates_of_one_receiver_from_new_stock_senders() -> None:
    handle = new_handle("stock")
    receiver = BucketReceiver(handle, WAIT_S)
    for seed in range(3):
        landed, sent = Landed(), mixed(seed)
        receiving = start(lambda landed=landed: receiver.receive(lambda bucket, _: landed.take(bucket.tensors())))
        stock_send(handle, iter(sent.items()))
        receiving.result(WAIT_S)
        assert_same(landed, sent)


def test_the_stock_receiver_takes_a_tensor_that_our_bucket_does_not_hold() -> None:
    handle, landed = new_handle("stock"), Landed()
    sent = {"small": torch.ones(3), "large": torch.arange(MEGABYTE, dtype=torch.int32).view(1024, -1), "after": torch.zeros(2)}
    receiving = start(lambda: stock_receive(handle, landed))
    our_send(handle, iter(sent.items()))
    receiving.result(WAIT_S)
    assert_same(landed, sent)


def test_a_callback_that_raises_lets_the_stock_sender_end_and_is_raised() -> None:
    handle, calls = new_handle("stock"), []

    def fail(bucket: object, is_last: bool) -> None:
        calls.append(bucket)
        raise RuntimeError("no such layer")

    receiving = start(lambda: BucketReceiver(handle, WAIT_S).receive(fail))
    stock_send(handle, iter(large().items()))
    with pytest.raises(RuntimeError, match="no such layer"):
        receiving.result(WAIT_S)
    assert len(calls) == 1


def test_a_callback_of_the_stock_receiver_that_raises_ends_our_senders_wait() -> None:
    handle = new_handle("stock")

    def fail(named: list, is_last: bool) -> None:
        raise RuntimeError("no such layer")

    stock = BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    receiving = start(lambda: stock.receive_weights(fail))
    # Views that the traceback holds keep it from closing its segment, and then it does not close its socket: only the deadline is left.
    with pytest.raises((PeerGone, PeerTimeout), match="an answer"):
        BucketSender(handle, MEGABYTE, 2.0).send(iter(large().items()))
    with pytest.raises((RuntimeError, BufferError)):
        receiving.result(WAIT_S)
    if stock.socket is not None:
        stock.socket.close(linger=0)


def test_a_source_that_raises_in_the_stock_sender_ends_our_receivers_wait() -> None:
    handle = new_handle("stock")

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(large().items())[:-1]
        raise ValueError("lost")

    receiving = start(lambda: BucketReceiver(handle, 600).receive(lambda *_: None))
    with pytest.raises(ValueError, match="lost"):
        stock_send(handle, source())
    with pytest.raises(PeerGone, match="a bucket's table"):
        receiving.result(WAIT_S)


CHILD = """
import sys, time, asyncio
sys.path.insert(0, sys.argv[3])
import torch, verl_cpu_platform
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender
def sleep(*_):
    print("here", flush=True)
    time.sleep(600)
def source():
    for i in range(4):
        yield f"a{i}", torch.ones(200_000)
    sleep()
if sys.argv[1] == "receive":
    BucketedWeightReceiver(sys.argv[2], torch.device("cpu"), use_shm=True).receive_weights(sleep)
else:
    asyncio.run(BucketedWeightSender(sys.argv[2], bucket_size_mb=1, use_shm=True).async_send_weights(source()))
"""


def child(role: str, handle: str) -> subprocess.Popen:
    arguments = [sys.executable, "-W", "ignore", "-c", CHILD, role, handle, str(Path(__file__).parents[1])]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_a_stock_receiver_that_is_killed_ends_our_senders_wait_and_no_segment_stays() -> None:
    handle = new_handle("stock")
    process = child("receive", handle)
    sending = start(lambda: BucketSender(handle, MEGABYTE, 600).send(iter(large().items())))
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerGone, match="an answer"):
        sending.result(WAIT_S)
    process.wait(WAIT_S)


def test_a_stock_sender_that_is_killed_ends_our_receivers_wait() -> None:
    handle, landed = new_handle("stock"), Landed()
    process = child("send", handle)
    receiving = start(lambda: BucketReceiver(handle, 600).receive(lambda bucket, _: landed.take(bucket.tensors())))
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerGone, match="a bucket's table"):
        receiving.result(WAIT_S)
    process.wait(WAIT_S)
    assert landed, "buckets before the end were taken"
    assert not os.path.exists(handle.removeprefix("ipc://")), "a killed process leaves its socket's file (its tracker takes the segment)"
    receiving = start(lambda: our_receive(handle, Landed()))
    our_send(handle, iter(()))
    receiving.result(WAIT_S)
