"""Named tensors of many kinds, both ends of a wire in threads, and what must not stay behind."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

WAIT_S = 20.0


def mixed(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every dtype that is likely, odd sizes between them, empty and scalar tensors, one that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    named = {
        "u8.odd": random(7),
        "bf16": random(6, 10).view(torch.bfloat16),
        "bool": random(3) > 127,
        "f32": random(4, 12).view(torch.float32),
        "f64.scalar": random(8).view(torch.float64).squeeze(0),
        "i8.one": random(1).view(torch.int8),
        "f16": random(2, 3, 4).view(torch.float16),
        "empty": torch.empty(0, 5, dtype=torch.float32),
        "e4m3": random(33).view(torch.float8_e4m3fn),
        "e8m0": random(5).view(torch.float8_e8m0fnu),
        "f4": random(4, 4).view(torch.float4_e2m1fn_x2),
        "i64": random(3, 16).view(torch.int64),
        "parameter": torch.nn.Parameter(random(32).view(torch.float32)),
        "transposed": random(6, 8).t(),
        "strided": random(10, 8)[::2].view(torch.bfloat16),
    }
    for i in range(40):
        named[f"layers.{i}.weight"] = random(200 + 13 * i)
        named[f"layers.{i}.bias"] = random(2 * (i + 1)).view(torch.bfloat16)
    return named


def laughs() -> tuple:
    """A tuple of a few thousand bytes as a pickle, and of more characters than any memory has when it is written out."""
    value: tuple = ("ha",)
    for _ in range(10):
        value = (value,) * 200
    return value


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Landed(dict):
    """What a receiver's callback has seen: clones, by name."""

    def take(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            assert name not in self
            self[name] = tensor.clone()


def assert_same(landed: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert list(landed) == list(sent)
    for name, tensor in sent.items():
        got = landed[name]
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype), name
        assert bytes_of(got) == bytes_of(tensor), name


def start(work: Callable[[], object]) -> Future:
    """Runs `work` in a thread that no test can wait for longer than for its result."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the test looks at it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until(
    condition: Callable[[], bool], timeout_s: float = WAIT_S, *, else_say: Callable[[], str] = lambda: "it did not come true"
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, else_say()
        time.sleep(0.005)


def left_behind() -> set[str]:
    """Shared segments and socket files that this test or its peers could have made."""
    segments = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(("headrace_", "verl_weights_", "psm_"))}
    sockets = {f"/tmp/{name}" for name in os.listdir("/tmp") if name.startswith(SOCKETS)}
    return segments | sockets


# Other runs of these tests on the same machine have their own.
SOCKETS = f"headrace-test-{os.getpid()}-"


@contextmanager
def nothing_left_behind(look: Callable[[], set[str]] = left_behind) -> Iterator[None]:
    before = look()
    yield
    wait_until(lambda: look() <= before, else_say=lambda: f"left behind: {sorted(look() - before)}")


def new_handle(label: str) -> str:
    return f"ipc:///tmp/{SOCKETS}{label}-{time.monotonic_ns()}.sock"
