"""checkpoint-engine's own ParameterServer and worker function with our receiver and sender at the other end.

Its packages ask for a GPU; what is put in place of it is the device module, pinned memory, and the handle of the buffer.
"""

import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from importlib import metadata

import checkpoint_engine.ps
import checkpoint_engine.worker
import headrace
import pytest
import torch
import zmq
from headrace.integration.buckets import Bucket
from headrace.integration.checkpoint_engine import CheckpointEngineSender, receive_into, serve, update_weights_from_ipc
from headrace.integration.host_memory import Segment, tensor_handle
from headrace.integration.peer_socket import PeerFailed, PeerGone, PeerTimeout
from headrace.integration.unpickle import RefusedPickle
from weight_streams import WAIT_S, Landed, assert_same, bytes_of, laughs, mixed, new_handle, nothing_left_behind, start

CONTEXT = zmq.Context.instance()


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    worker = inspect.getfile(checkpoint_engine.worker.update_weights_from_ipc)
    server = inspect.getfile(checkpoint_engine.ps.ParameterServer)
    print(f"\n{worker}, {server} of checkpoint-engine {metadata.version('checkpoint-engine')}")
    with nothing_left_behind():
        yield


def nothing(*_: object, **__: object) -> int:
    return 0


HOST = types.SimpleNamespace(
    synchronize=nothing,
    ipc_collect=nothing,
    empty_cache=nothing,
    set_device=nothing,
    memory_allocated=nothing,
    memory_reserved=nothing,
    device_count=lambda: 1,
    mem_get_info=lambda: (1 << 30, 1 << 30),
    get_device_properties=lambda _: types.SimpleNamespace(uuid=f"headrace-test-{os.getpid()}"),
)


class HostDeviceManager:
    device_type = "cpu"
    backend = "gloo"
    device_module = HOST


@pytest.fixture
def host_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_engine.worker, "DeviceManager", HostDeviceManager)


SAME_PROCESS: dict[str, torch.Tensor] = {}


def same_process_buffer(key: str, *_: object) -> torch.Tensor:
    """What the server's handle names here: its buffer is in this process."""
    return SAME_PROCESS[key]


OPENERS = {f"{__name__}.same_process_buffer": lambda arguments: same_process_buffer(*arguments).numpy()}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict, Callable], None]]:
    """A real ParameterServer of world 1 over gloo: update(named tensors, function that gets the worker's socket)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PS_MAX_BUCKET_SIZE_GB", str(4_096 / (1 << 30)))
    monkeypatch.setattr(checkpoint_engine.ps, "DeviceManager", HostDeviceManager)
    empty = torch.empty

    def unpinned(*arguments: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", unpinned)

    def reduce_tensor(buffer: torch.Tensor) -> tuple:
        SAME_PROCESS["buffer"] = buffer
        return same_process_buffer, ("buffer", 0, 0, 0, 0, 0, 0)

    monkeypatch.setattr(checkpoint_engine.ps, "reduce_tensor", reduce_tensor)
    parameter_server = checkpoint_engine.ps.ParameterServer(rank=0, world_size=1, auto_pg=True)

    def update(named: dict[str, torch.Tensor], work: Callable[[str], None]) -> None:
        parameter_server.register_checkpoint("test", named_tensors=named, use_inplace_pin_memory=False)
        try:
            parameter_server.gather_metas("test")
            parameter_server.update("test", lambda paths: work(paths[0][1]))
        finally:
            parameter_server.unregister_checkpoint("test")

    yield update
    SAME_PROCESS.clear()


def serving(landed: Landed, failures: list, run: Callable | None = None, post_hook: Callable | None = None) -> Callable[[str], None]:
    """Our worker function, as the server's request starts it; its error goes to `failures`."""

    def work(path: str) -> None:
        try:
            update_weights_from_ipc(CONTEXT, path, 0, run=run or landed.take, post_hook=post_hook, wait_s=WAIT_S, openers=OPENERS)
        except BaseException as error:
            failures.append(error)

    return work


# gloo cannot broadcast every dtype, but the server sends its buffer as bytes: all of them may be in it. Empty tensors have no place there.
def sendable(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in mixed(seed).items() if tensor.numel()}


def by_name(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(named.items()))


def test_the_real_server_with_our_worker_three_updates_in_a_row(server: Callable) -> None:
    for seed in range(3):
        landed, failures, hooks, sent = Landed(), [], [], sendable(seed)
        server(sent, serving(landed, failures, post_hook=lambda hooks=hooks: hooks.append(1)))
        assert failures == [] and hooks == [1]
        assert_same(by_name(landed), by_name(sent))


def test_an_error_of_our_worker_stops_the_real_server(server: Callable) -> None:
    failures, calls, hooks = [], [], []

    def fail(named: list) -> None:
        calls.append(named)
        raise ValueError("no room here")

    with pytest.raises(RuntimeError, match="remote errors"):
        server(sendable(), serving(Landed(), failures, run=fail, post_hook=lambda: hooks.append(1)))
    (error,) = failures
    assert isinstance(error, PeerFailed) and "Some workers failed" in str(error)
    assert isinstance(error.__cause__, ValueError) and len(calls) == 1 and hooks == []


def test_an_error_in_the_last_bucket_is_raised_although_the_real_server_does_not_read_it(server: Callable) -> None:
    failures, hooks = [], []

    def fail_last(named: list) -> None:
        if "last" in dict(named):
            raise ValueError("the last one is bad")

    server({"last": torch.ones(4)}, serving(Landed(), failures, run=fail_last, post_hook=lambda: hooks.append(1)))
    assert [str(error) for error in failures] == ["the last one is bad"] and hooks == []


def test_a_post_hook_that_raises_is_answered_and_raised(server: Callable) -> None:
    failures = []

    def fail() -> None:
        raise ValueError("no post-processing today")

    server({"a": torch.ones(4)}, serving(Landed(), failures, post_hook=fail))
    assert [str(error) for error in failures] == ["no post-processing today"]


def test_a_buffer_that_cannot_be_opened_stops_the_real_server(server: Callable) -> None:
    failures = []

    def work(path: str) -> None:
        try:
            update_weights_from_ipc(CONTEXT, path, 0, run=lambda _: None, wait_s=WAIT_S)
        except BaseException as error:
            failures.append(error)

    with pytest.raises(RuntimeError, match="remote errors"):
        server({"a": torch.ones(4)}, work)
    (error,) = failures
    assert isinstance(error, PeerFailed) and "same_process_buffer' is not in the list" in str(error.__cause__)


@pytest.mark.parametrize("bucket_bytes", [256, 5_000, 1 << 20])
@pytest.mark.parametrize("receiver", ["stock", "ours"])
def test_our_sender_drives_the_worker(receiver: str, bucket_bytes: int, host_worker: None) -> None:
    work = checkpoint_engine.worker.update_weights_from_ipc if receiver == "stock" else update_weights_from_ipc
    for seed in range(2):
        handle, landed, hooks = new_handle("ce"), Landed(), []
        sent = mixed(seed) if bucket_bytes > 256 else {n: t for n, t in mixed(seed).items() if t.nbytes <= 512}
        receiving = start(
            lambda landed=landed, hooks=hooks, handle=handle: work(
                CONTEXT, handle, None, run=landed.take, post_hook=lambda: hooks.append(len(landed))
            )
        )
        CheckpointEngineSender(handle, bucket_bytes, WAIT_S).send(iter(sent.items()))
        receiving.result(WAIT_S)
        assert_same(landed, sent)
        assert hooks == [len(sent)]


def test_our_sender_on_an_abstract_address(host_worker: None) -> None:
    handle, landed, sent = f"ipc://@headrace-test-{os.getpid()}.sock", Landed(), mixed()
    receiving = start(lambda: checkpoint_engine.worker.update_weights_from_ipc(CONTEXT, handle, None, run=landed.take))
    CheckpointEngineSender(handle, 5_000, WAIT_S).send(sent.items())
    receiving.result(WAIT_S)
    assert_same(landed, sent)


@pytest.mark.parametrize("receiver", ["stock", "ours"])
def test_an_error_of_the_worker_stops_our_sender_with_the_workers_words(receiver: str, host_worker: None) -> None:
    work = checkpoint_engine.worker.update_weights_from_ipc if receiver == "stock" else update_weights_from_ipc
    handle, calls, hooks = new_handle("ce"), [], []

    def fail(named: list) -> None:
        calls.append(named)
        raise ValueError("no room here")

    receiving = start(lambda: work(CONTEXT, handle, None, run=fail, post_hook=lambda: hooks.append(1)))
    with pytest.raises(PeerFailed, match="ValueError: no room here"):
        CheckpointEngineSender(handle, 2_000, WAIT_S).send(mixed().items())
    with pytest.raises(RuntimeError, match="the update has failed"):
        receiving.result(WAIT_S)
    assert len(calls) == 1 and hooks == []


def test_a_post_hook_of_the_stock_worker_that_raises_ends_our_senders_wait(host_worker: None) -> None:
    handle = new_handle("ce")

    def fail() -> None:
        raise ValueError("no post-processing today")

    receiving = start(lambda: checkpoint_engine.worker.update_weights_from_ipc(CONTEXT, handle, None, run=lambda _: None, post_hook=fail))
    with pytest.raises(PeerGone, match="an answer"):
        CheckpointEngineSender(handle, 1 << 20, 600).send(mixed().items())
    with pytest.raises(ValueError, match="no post-processing today"):
        receiving.result(WAIT_S)


def test_a_post_hook_of_our_worker_that_raises_is_told_to_our_sender() -> None:
    handle = new_handle("ce")

    def fail() -> None:
        raise ValueError("no post-processing today")

    receiving = start(lambda: update_weights_from_ipc(CONTEXT, handle, 0, run=lambda _: None, post_hook=fail, wait_s=WAIT_S))
    with pytest.raises(PeerFailed, match="no post-processing today"):
        CheckpointEngineSender(handle, 1 << 20, WAIT_S).send(mixed().items())
    with pytest.raises(ValueError, match="no post-processing today"):
        receiving.result(WAIT_S)


@pytest.mark.parametrize("receiver", ["stock", "ours"])
def test_a_source_that_raises_is_told_to_the_worker(receiver: str, host_worker: None) -> None:
    work = checkpoint_engine.worker.update_weights_from_ipc if receiver == "stock" else update_weights_from_ipc
    handle = new_handle("ce")

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(mixed().items())[:30]
        raise ValueError("lost a shard")

    receiving = start(lambda: work(CONTEXT, handle, None, run=lambda _: None))
    with pytest.raises(ValueError, match="lost a shard"):
        CheckpointEngineSender(handle, 1_000, WAIT_S).send(source())
    with pytest.raises(RuntimeError, match="the sender failed: lost a shard"):
        receiving.result(WAIT_S)


def test_a_tensor_that_two_buckets_do_not_hold_is_refused_and_the_worker_ends() -> None:
    handle = new_handle("ce")
    receiving = start(lambda: update_weights_from_ipc(CONTEXT, handle, 0, run=lambda _: None, wait_s=WAIT_S))
    with pytest.raises(ValueError, match="large has 4000 bytes, a bucket holds 2048"):
        CheckpointEngineSender(handle, 1_024, WAIT_S).send([("large", torch.zeros(1_000))])
    with pytest.raises(PeerFailed, match="large has 4000 bytes"):
        receiving.result(WAIT_S)


def test_waits_for_nobody_end() -> None:
    with pytest.raises(PeerTimeout):
        CheckpointEngineSender(new_handle("ce"), 1_024, 0.1).send([])
    with pytest.raises(PeerTimeout, match="no the handle of the buffer within 0.1 s"):
        update_weights_from_ipc(CONTEXT, new_handle("ce"), 0, run=lambda _: None, wait_s=0.1)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict, headrace.Receiver]]:
    """Live tensors and a receiver of which every storage is a tensor of its own name."""
    storages = {name: torch.zeros_like(tensor) for name, tensor in sendable().items()}
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        with headrace.Receiver(headrace.StorageTable.from_tensors(storages), job="ce") as receiver:
            yield storages, receiver


def test_the_real_server_writes_into_a_receiver_and_the_post_hook_runs_after_the_commit(server: Callable, live: tuple) -> None:
    storages, receiver = live
    for step in (1, 2, 3):
        sent, seen = sendable(step), []
        outcome: list = []

        def work(path: str, step: int = step, seen: list = seen, outcome: list = outcome) -> None:
            def hook() -> None:
                seen.append(receiver.serving_version())

            outcome.append(receive_into(receiver, f"run/{step}", CONTEXT, path, post_hook=hook, wait_s=WAIT_S, openers=OPENERS))

        server(sent, work)
        assert seen == [f"run/{step}"] and outcome[0].proven and outcome[0].tensors == len(sent)
        assert {name: bytes_of(tensor) for name, tensor in storages.items()} == {name: bytes_of(tensor) for name, tensor in sent.items()}


def test_a_receiver_that_refuses_a_tensor_stops_our_sender_by_name_and_is_healed_by_the_next(live: tuple) -> None:
    storages, receiver = live
    handle = new_handle("ce")
    receiving = start(lambda: receive_into(receiver, "run/1", CONTEXT, handle, wait_s=WAIT_S))
    with pytest.raises(PeerFailed, match="visitor"):
        CheckpointEngineSender(handle, 4_096, WAIT_S).send({"visitor": torch.ones(3), **sendable(1)}.items())
    with pytest.raises(PeerFailed) as failed:
        receiving.result(WAIT_S)
    assert "visitor" in str(failed.value.__cause__) and receiver.serving_version() is None
    again, sent = new_handle("ce"), sendable(2)
    receiving = start(lambda: receive_into(receiver, "run/2", CONTEXT, again, wait_s=WAIT_S))
    CheckpointEngineSender(again, 4_096, WAIT_S).send(sent.items())
    assert receiving.result(WAIT_S).version == "run/2" and receiver.serving_version() == "run/2"
    assert {name: bytes_of(tensor) for name, tensor in storages.items()} == {name: bytes_of(tensor) for name, tensor in sent.items()}


def test_an_update_that_lacks_a_tensor_is_not_committed_and_the_sender_is_told(live: tuple) -> None:
    _, receiver = live
    handle, sent = new_handle("ce"), sendable(1)
    del sent["layers.7.bias"]
    receiving = start(lambda: receive_into(receiver, "run/1", CONTEXT, handle, wait_s=WAIT_S))
    with pytest.raises(PeerFailed, match=r"layers\.7\.bias"):
        CheckpointEngineSender(handle, 4_096, WAIT_S).send(sent.items())
    with pytest.raises(headrace.Error, match=r"layers\.7\.bias"):
        receiving.result(WAIT_S)
    assert receiver.serving_version() is None


class RawServer:
    def __init__(self) -> None:
        self.handle = new_handle("ce")
        self.socket = CONTEXT.socket(zmq.REQ)
        self.socket.rcvtimeo = self.socket.sndtimeo = int(WAIT_S * 1_000)
        self.socket.bind(self.handle)
        self.segment = Segment(4_096)

    def say(self, message: object) -> str:
        self.socket.send(message if isinstance(message, bytes) else pickle.dumps(message, 4))
        return self.socket.recv().decode()

    def begin(self) -> None:
        assert self.say(tensor_handle(self.segment, 4_096, "uint8", (4_096,))) == ""
        self.segment.unlink()

    def end(self) -> list[str]:
        return [self.say(None), self.say(None)]

    def close(self) -> None:
        self.segment.unlink()
        self.socket.close(linger=0)
        os.remove(self.handle.removeprefix("ipc://"))


@pytest.fixture
def raw() -> Iterator[RawServer]:
    server = RawServer()
    yield server
    server.close()


class Call:
    def __reduce__(self) -> tuple:
        return os.system, ("touch /tmp/headrace-ran",)


def entry(**changes: object) -> dict:
    return {"name": "w", "shape": torch.Size([2]), "dtype": torch.float32, "offset": 0, **changes}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ([Call()], "posix.system"),
        (Call(), "posix.system"),
        ([entry(shape=Call())], "posix.system"),
        (ValueError("x"), "builtins.ValueError"),
        ([entry(offset=4_092)], "bytes 4092 to 4100 of a buffer of 4096"),
        ([entry(offset=-8)], "bytes -8 to 0"),
        ([entry(name=None)], "name, offset, shape and dtype are expected"),
        (["w"], "an entry that is a str"),
        ([entry(name=laughs())], "name, offset, shape and dtype are expected"),
        ([entry(shape=(2**62,) * 5_000)], "5000 dimensions, at most 64"),
        ("w", "a str where a table or None is expected"),
        (("a", 1), "a tuple where a table or None is expected"),
        ({"w": 1}, "a dict where a table or None is expected"),
        (b"\x80\x04]", "truncated"),
        (b"", "protocol 4 or 5"),
    ],
)
def test_a_hostile_message_is_refused_by_name_and_answered(message: object, words: str, raw: RawServer) -> None:
    taken: list[Bucket] = []
    receiving = start(lambda: serve(CONTEXT, raw.handle, on_bucket=taken.append, wait_s=WAIT_S))
    raw.begin()
    assert words in raw.say(message)
    # The first error sticks: every later answer repeats it.
    assert words in raw.say([entry()])
    assert all(words in answer for answer in raw.end())
    with pytest.raises(RefusedPickle, match="."):
        receiving.result(WAIT_S)
    assert taken == [] and not os.path.exists("/tmp/headrace-ran")


def test_the_last_words_of_a_server_may_be_endless(raw: RawServer) -> None:
    receiving = start(lambda: serve(CONTEXT, raw.handle, on_bucket=lambda _: None, wait_s=WAIT_S))
    raw.begin()
    raw.socket.send(pickle.dumps(RuntimeError(laughs(), "in the end"), 4))
    with pytest.raises(PeerFailed, match="gave up.*in the end"):
        receiving.result(WAIT_S)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Call(), "posix.system"),
        ((os.system, ("true",)), "posix.system"),
        ((torch.multiprocessing.reductions.rebuild_cuda_tensor, (1, 2)), "CUDA memory"),
        ((torch.Tensor, (3,)), "cannot be opened with torch.Tensor"),
        (None, "no handle"),
        ([1], "no handle"),
        ((1, 2), "no handle"),
    ],
)
def test_a_hostile_handle_is_refused_by_name_and_answered(message: object, words: str, raw: RawServer) -> None:
    receiving = start(lambda: serve(CONTEXT, raw.handle, on_bucket=lambda _: None, wait_s=WAIT_S))
    assert words in raw.say(message)
    raw.socket.send(pickle.dumps(RuntimeError("then not")))
    with pytest.raises(PeerFailed, match="then not"):
        receiving.result(WAIT_S)


def test_a_table_in_the_place_of_the_second_none_is_refused(raw: RawServer) -> None:
    hooks = []
    receiving = start(lambda: serve(CONTEXT, raw.handle, on_bucket=lambda _: None, post_hook=lambda: hooks.append(1), wait_s=WAIT_S))
    raw.begin()
    assert raw.say(None) == ""
    assert "where a table or None is expected" in raw.say([entry()])
    with pytest.raises(RefusedPickle):
        receiving.result(WAIT_S)
    assert hooks == []


CHILD = """
import sys, time, zmq
from headrace.integration.checkpoint_engine import serve
def sleep(*_):
    print("here", flush=True)
    time.sleep(600)
serve(zmq.Context.instance(), sys.argv[1], on_bucket=sleep)
"""


def test_a_worker_that_is_killed_ends_our_senders_wait_at_once() -> None:
    handle = new_handle("ce")
    process = subprocess.Popen([sys.executable, "-c", CHILD, handle], stdout=subprocess.PIPE, text=True)
    sending = start(lambda: CheckpointEngineSender(handle, 1_000, 600).send(mixed().items()))
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerGone, match="an answer"):
        sending.result(WAIT_S)
    process.wait(WAIT_S)
