"""The Python package beside what does the same without it: `./run bench python`.

Rows, each with its reference measured in the same run, in turn:
  py/load    one call with a bucket of 1,002 expert tensors in the MegaMoE layout, less a plain copy of the same bytes
  py/load/new  the same where the update before brought other tensors, as the first update of a run does
  py/loader  vLLM's own weight_loader over the same tensors into its own layout, beside py/load
  py/iter    the same from an iterator of (name, torch tensor)
  py/send    a sender from an iterator of torch tensors, 4 GiB, beside e2e/shm of headrace-bench
  py/import  import headrace in a new interpreter
  verl/*     see verl_rows.py

Exit code 1 when a target is missed. The schema of --json is that of headrace-bench.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import headrace
import torch
from verl_rows import verl_rows

ROUNDS = 21
SEND_ROUNDS = 5
# One expert is 26 KiB: three weights of 8 KiB, their scales of 512 bytes.
HIDDEN = INTERMEDIATE = 128
CONFIG = os.path.join(os.path.dirname(__file__), "../../examples/deepseek_v41")


def layout_of(hidden: int, intermediate: int, experts: int) -> headrace.Layout:
    """The routed experts of one layer of DeepSeek-V4.1, with these sizes."""
    with open(os.path.join(CONFIG, "config.json")) as file:
        config = json.load(file)
    config["text_config"].update(hidden_size=hidden, moe_intermediate_size=intermediate, n_routed_experts=experts)
    layout = headrace.Layout.build(config=config)
    return layout.only(spec.name for spec in layout.storages if "layers.0.ffn.experts.w" in spec.name)


def storage_of(layout: headrace.Layout) -> dict[str, torch.Tensor]:
    dtypes = {"I8": torch.int8, "I32": torch.int32}
    return {
        spec.name: torch.zeros(spec.bytes, dtype=torch.uint8)
        .view(dtypes[spec.dtype])
        .as_strided(spec.shape, spec.strides or packed(spec.shape))
        for spec in layout.storages
    }


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    return tuple(steps)


def expert_tensors(layout: headrace.Layout, count: int) -> list[headrace.TensorInfo]:
    """As a trainer emits them: expert by expert, each weight with its scale."""
    order = {"w1": 0, "w3": 1, "w2": 2}

    def place(tensor):
        *_, expert, shard, leaf = tensor.name.split(".")
        return int(expert), order[shard], leaf != "weight"

    return sorted(layout.tensors, key=place)[:count]


def make_source(tensors: list[headrace.TensorInfo]) -> tuple[torch.Tensor, list, dict[str, torch.Tensor]]:
    """One piece of touched memory, the table of a bucket over it, and the tensors in it."""
    dtypes = {"I8": torch.int8, "F8_E8M0": torch.float8_e8m0fnu}
    sizes = [torch.Size(tensor.shape).numel() for tensor in tensors]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    pattern = (torch.arange(4093) % 251).to(torch.uint8)
    rows = memory.numel() // pattern.numel()
    memory[: rows * pattern.numel()].view(rows, -1).copy_(pattern)
    memory[rows * pattern.numel() :] = 0
    metas, views, offset = [], {}, 0
    for tensor, size in zip(tensors, sizes, strict=True):
        metas.append((tensor.name, offset, tensor.shape, tensor.dtype))
        views[tensor.name] = memory[offset : offset + size].view(dtypes[tensor.dtype]).view(tensor.shape)
        offset += size
    return memory, metas, views


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def vllm_loader(tensors: dict[str, torch.Tensor], experts: int) -> Callable[[], None] | None:
    """vLLM's loader of MegaMoE experts over the same tensors; None where vLLM is not installed."""
    try:
        from vllm.model_executor.layers.fused_moe import deep_gemm_mega_moe as mega
    except ImportError:
        return None
    # Its constructor asks for a GPU; weights and loader do not.
    layer = mega.DeepGemmMegaMoEExperts.__new__(mega.DeepGemmMegaMoEExperts)
    torch.nn.Module.__init__(layer)
    layer.num_experts = layer.num_local_experts = layer.num_logical_experts = experts
    layer.experts_start_idx, layer.experts_end_idx = 0, experts
    layer.hidden_size, layer.intermediate_size = HIDDEN, INTERMEDIATE
    layer.weight_format, layer.shared_spec = mega.MEGA_MOE_MXFP4, None
    layer._create_weights()
    calls = []
    for name, tensor in tensors.items():
        *_, expert, shard, leaf = name.split(".")
        param = f"{'w2' if shard == 'w2' else 'w13'}_weight{'_scale' if leaf == 'scale' else ''}"
        calls.append((getattr(layer, param), tensor, param, shard, int(expert)))

    def load() -> None:
        for call in calls:
            layer.weight_loader(*call)

    return load


def row(name: str, value: float, unit: str, reference: str | None, reference_value: float | None, target: str, ok: bool) -> dict:
    ratio = value / reference_value if reference_value else None
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "reference": reference,
        "reference_value": reference_value,
        "ratio": ratio,
        "target": target,
        "ok": ok,
    }


def load_rows(wanted: Callable[[str], bool]) -> list[dict]:
    names = ("py/load", "py/load/new", "py/loader", "py/iter")
    if not any(map(wanted, names)):
        return []
    experts, count = 384, 1_002
    layout = layout_of(HIDDEN, INTERMEDIATE, experts)
    live = storage_of(layout)
    tensors = expert_tensors(layout, 2 * count)
    memory, metas, views = make_source(tensors[:count])
    other_memory, other_metas, _ = make_source(tensors[count:])
    target = torch.empty_like(memory)
    loader = vllm_loader(views, experts)
    receiver = headrace.Receiver(headrace.StorageTable.from_tensors(live), layout, job=f"bench-{uuid.uuid4().hex[:8]}")
    steps = itertools.count(1)

    def load(bring: Callable[[], Any]) -> float:
        """Seconds of one call in an update of its own, which is given up: the other experts do not come."""
        try:
            with receiver.update(f"bench/{next(steps)}") as update:
                taken = seconds(lambda: update.load(bring()))
                raise StopIteration
        except StopIteration:
            return taken

    works = {
        "copy": lambda: seconds(lambda: target.copy_(memory)),
        "py/load/new": lambda: load(lambda: headrace.Bucket(memory, metas)),
        "py/load": lambda: load(lambda: headrace.Bucket(memory, metas)),
        "py/iter": lambda: load(lambda: iter(views.items())),
        "other": lambda: load(lambda: headrace.Bucket(other_memory, other_metas)),
    }
    if loader is not None:
        works["py/loader"] = lambda: seconds(loader)
    times: dict[str, list[float]] = {name: [] for name in works}
    with receiver:
        for _ in range(ROUNDS):
            for name, work in works.items():
                times[name].append(work())
    each = {name: statistics.median(values[1:]) * 1e6 / count for name, values in times.items()}
    net = {name: value - each["copy"] for name, value in each.items()}

    def beside_copy(name: str, most: float) -> dict:
        target = f"<= {most:g} us" if most < math.inf else ""
        return row(name, net[name], "us a tensor", "a plain copy, taken off", each["copy"], target, net[name] <= most)

    rows = [beside_copy("py/load", 1.5), beside_copy("py/load/new", math.inf), beside_copy("py/iter", 6)]
    if loader is not None:
        ours, stock = each["py/load"], each["py/loader"]
        rows.insert(1, row("py/loader", ours, "us a tensor", "vLLM's weight_loader", stock, "10 times less", stock / ours >= 10))
    return [each_row for each_row in rows if wanted(each_row["name"])]


def receive(job: str, shape: tuple[int, int, int], ready, end) -> None:
    layout = layout_of(*shape)
    with headrace.Receiver(headrace.StorageTable.from_tensors(storage_of(layout)), layout, job=job):
        ready.set()
        end.wait()


def cpp_rate(cpp: str | None) -> float | None:
    """e2e/shm in GB/s."""
    if not cpp:
        return None
    ran = subprocess.run([cpp, "e2e/shm", "--json", "-"], capture_output=True, text=True, check=False)
    return next((row["value"] for row in json.loads(ran.stdout)["rows"] if row["name"] == "e2e/shm"), None)


def send_rows(wanted: Callable[[str], bool], cpp: str | None) -> list[dict]:
    if not wanted("py/send"):
        return []
    hidden, intermediate = 5120, 2304
    expert_bytes = 3 * hidden * intermediate // 2 + 3 * hidden * intermediate // 32
    shape = (hidden, intermediate, (4 << 30) // expert_bytes)
    layout = layout_of(*shape)
    # Of a program of its own, which cannot be run in turn with the rounds here: before them and after them.
    before = cpp_rate(cpp)
    memory, _, views = make_source(expert_tensors(layout, len(layout.tensors)))
    job = f"bench-{uuid.uuid4().hex[:8]}"
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    receiver = context.Process(target=receive, args=(job, shape, ready, end))
    receiver.start()
    try:
        assert ready.wait(120)
        rates = []
        with headrace.Sender.connect(job=job) as sender:
            for step in range(SEND_ROUNDS + 1):
                source = ((name, tensor) for name, tensor in views.items())
                taken = seconds(lambda: sender.send(f"bench/{step + 1}", source, progress=False))  # noqa: B023
                rates.append(memory.nbytes / taken / 1e9)
    finally:
        end.set()
        receiver.join()
    del memory, views
    rate = statistics.median(rates[1:])
    after = cpp_rate(cpp)
    reference = (before + after) / 2 if before and after else None
    ok = reference is not None and rate >= 0.9 * reference
    return [row("py/send", rate, "GB/s", "e2e/shm of headrace-bench", reference, "ratio >= 0.90", ok)]


def import_rows(wanted: Callable[[str], bool]) -> list[dict]:
    if not wanted("py/import"):
        return []
    code = "import time; begin = time.perf_counter(); import headrace; print(time.perf_counter() - begin)"
    times = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(7)]
    value = statistics.median(times[1:]) * 1e3
    return [row("py/import", value, "ms", None, None, "<= 50 ms", value <= 50)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows whose names begin with one of these")
    parser.add_argument("--json", help="a file, or - for standard output")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cpp", help="the program headrace-bench, for the reference of py/send")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def wanted(name: str) -> bool:
        return not options.names or any(name.startswith(begin) for begin in options.names)

    rows = import_rows(wanted) + load_rows(wanted) + send_rows(wanted, options.cpp) + verl_rows(wanted, row)
    if options.json:
        text = json.dumps({"schema": "headrace.bench/1", "machine": {"commit": options.commit}, "rows": rows}, indent=1)
        if options.json == "-":
            print(text)
        else:
            with open(options.json, "w") as file:
                file.write(text + "\n")
    if options.json != "-":
        for r in rows:
            reference = f"{r['reference_value']:.3g} ({r['reference']})" if r["reference_value"] else ""
            print(f"{r['name']:20}  {r['value']:8.3g} {r['unit']:12} {reference:40} {r['target']:14} {'yes' if r['ok'] else 'MISSED'}")
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
