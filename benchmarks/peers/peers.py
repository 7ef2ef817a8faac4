"""Weight transfer of other projects' released packages on the CPU, with the tensors of `headrace-bench peers`.

Each peer's own code moves the tensors from a sender process into live tensors of a receiver process; what an engine would
do with a named tensor is one copy_ into its parameter, the least that any loader does. Nothing is verified by the peers.
Prints one JSON document: seconds per update (median and best of the rounds) and microseconds per tensor.
"""

import argparse
import asyncio
import gc
import importlib.util
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
import types
import uuid
from multiprocessing import shared_memory

import torch
import zmq

# The sizes of one expert of DeepSeek-V4.1: three weights of 4-bit pairs with their block scales.
HIDDEN, INTERMEDIATE = 5120, 2304
EXPERT = [
    ("w1.weight", (INTERMEDIATE, HIDDEN // 2)),
    ("w1.scale", (INTERMEDIATE, HIDDEN // 32)),
    ("w3.weight", (INTERMEDIATE, HIDDEN // 2)),
    ("w3.scale", (INTERMEDIATE, HIDDEN // 32)),
    ("w2.weight", (HIDDEN, INTERMEDIATE // 2)),
    ("w2.scale", (HIDDEN, INTERMEDIATE // 32)),
]
LARGE_EXPERTS = 64
TINY_TENSORS = 20_000


def workload(name):
    """Names and shapes, all of them bytes."""
    if name == "large":
        return [(f"layers.0.ffn.experts.{e}.{leaf}", shape) for e in range(LARGE_EXPERTS) for leaf, shape in EXPERT]
    return [(f"tiny.{i}.weight", (4096,)) for i in range(TINY_TENSORS)]


def make(name, fill):
    """One piece of touched memory, and the tensors in it."""
    tensors = workload(name)
    total = sum(torch.Size(shape).numel() for _, shape in tensors)
    memory = torch.full((total,), fill, dtype=torch.uint8)
    views, offset = {}, 0
    for tensor, shape in tensors:
        size = torch.Size(shape).numel()
        views[tensor] = memory[offset : offset + size].view(shape)
        offset += size
    return memory, views


def module_of(package, path):
    """A module of an installed package by its file, without running the package's own __init__ (which asks for a GPU stack)."""
    root = importlib.util.find_spec(package).submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(f"{package}_{os.path.basename(path)[:-3]}", os.path.join(root, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def host_device_module():
    """What the packages ask of a device module, for host memory: nothing to wait for, nothing cached."""
    nothing = lambda *_, **__: None  # noqa: E731
    return types.SimpleNamespace(synchronize=nothing, ipc_collect=nothing, empty_cache=nothing)


def land(live, weights):
    for name, tensor in weights:
        live[name].copy_(tensor)


# --- verl: BucketedWeightSender and BucketedWeightReceiver over POSIX shared memory ---


def verl_module():
    module = module_of("verl", "workers/rollout/vllm_rollout/bucketed_weight_transfer.py")
    module.get_torch_device = host_device_module
    return module


def verl_receiver(work, handle, rounds, pipe):
    verl = verl_module()
    memory, live = make(work, 0)
    for _ in range(rounds):
        pipe.recv()
        receiver = verl.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(lambda weights, is_last: land(live, weights))
        pipe.send(int(memory[-1]))
        gc.collect()


def verl_update(source, handle, pipe, bucket_mb):
    verl = verl_module()
    sender = verl.BucketedWeightSender(handle, bucket_size_mb=bucket_mb, use_shm=True)
    pipe.send("go")
    start = time.perf_counter()
    asyncio.run(sender.async_send_weights(iter(source.items())))
    return time.perf_counter() - start


# --- checkpoint-engine: its worker loop, fed as its parameter server feeds it, from shared memory in two halves ---


def rebuild_shared(name, size, *_):
    segment = shared_memory.SharedMemory(name=name)
    tensor = torch.frombuffer(segment.buf, dtype=torch.uint8)[:size]
    rebuild_shared.held.append(segment)
    return tensor


rebuild_shared.held = []


def checkpoint_engine_receiver(work, handle, rounds, pipe):
    import checkpoint_engine.worker as worker

    worker.DeviceManager = lambda: types.SimpleNamespace(device_module=host_device_module())
    memory, live = make(work, 0)
    context = zmq.Context()
    for _ in range(rounds):
        pipe.recv()
        worker.update_weights_from_ipc(context, handle, 0, run=lambda weights: land(live, weights))
        pipe.send(int(memory[-1]))


def aligned(offset):
    return (offset + 255) // 256 * 256


def checkpoint_engine_buckets(source, bucket):
    """Tensors at multiples of 256 bytes, as many as fit."""
    metas, offset = [], 0
    for name, tensor in source.items():
        if metas and offset + tensor.nbytes > bucket:
            yield metas
            metas, offset = [], 0
        metas.append((name, tensor, offset))
        offset = aligned(offset + tensor.nbytes)
    if metas:
        yield metas


def checkpoint_engine_update(source, handle, pipe, bucket_mb, buffer):
    segment, halves = buffer
    bucket = bucket_mb << 20
    context = zmq.Context.instance()
    socket = context.socket(zmq.REQ)
    socket.bind(handle)
    pipe.send("go")
    start = time.perf_counter()
    # The seventh argument is where the loop puts its device index.
    socket.send_pyobj((rebuild_shared, (segment.name, 2 * bucket, 0, 0, 0, 0, 0)))
    assert socket.recv() == b""
    waiting = False
    for index, metas in enumerate(checkpoint_engine_buckets(source, bucket)):
        base = (index % 2) * bucket
        for _, tensor, offset in metas:
            halves[base + offset : base + offset + tensor.nbytes].view(tensor.shape).copy_(tensor)
        if waiting:
            assert socket.recv() == b""
        socket.send_pyobj(
            [{"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": base + offset} for name, tensor, offset in metas]
        )
        waiting = True
    assert socket.recv() == b""
    for _ in range(2):
        socket.send_pyobj(None)
        assert socket.recv() == b""
    seconds = time.perf_counter() - start
    socket.close()
    return seconds


# --- SGLang: FlattenedTensorBucket, its tensor shared between the processes as torch shares host tensors ---


def sglang_receiver(work, handle, rounds, pipe):
    bucket_type = module_of("sglang", "srt/weight_sync/tensor_bucket.py")
    memory, live = make(work, 0)
    context = zmq.Context()
    for _ in range(rounds):
        pipe.recv()
        socket = context.socket(zmq.REP)
        socket.connect(handle)
        while (message := socket.recv()) != b"":
            name, size, metadata = pickle.loads(message)
            segment = shared_memory.SharedMemory(name=name)
            flat = torch.frombuffer(segment.buf, dtype=torch.uint8)[:size]
            metas = [bucket_type.FlattenedTensorMetadata(*fields) for fields in metadata]
            bucket = bucket_type.FlattenedTensorBucket(flattened_tensor=flat, metadata=metas)
            land(live, bucket.reconstruct_tensors())
            del flat, bucket
            segment.close()
            socket.send(b"")
        socket.send(b"")
        socket.close()
        pipe.send(int(memory[-1]))


def sglang_update(source, handle, pipe, bucket_mb, buffer):
    bucket_type = module_of("sglang", "srt/weight_sync/tensor_bucket.py")
    segment, shared = buffer
    limit = bucket_mb << 20
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.bind(handle)
    pipe.send("go")
    start = time.perf_counter()

    def flush(tensors):
        bucket = bucket_type.FlattenedTensorBucket(named_tensors=tensors)
        flat = bucket.get_flattened_tensor()
        # A host tensor goes to the other process through shared memory; on a GPU this copy is a handle.
        shared[: flat.numel()].copy_(flat)
        fields = [(m.name, m.shape, m.dtype, m.start_idx, m.end_idx, m.numel) for m in bucket.get_metadata()]
        socket.send(pickle.dumps((segment.name, flat.numel(), fields)))
        assert socket.recv() == b""

    tensors, size = [], 0
    for name, tensor in source.items():
        if tensors and size + tensor.nbytes > limit:
            flush(tensors)
            tensors, size = [], 0
        tensors.append((name, tensor))
        size += tensor.nbytes
    flush(tensors)
    socket.send(b"")
    assert socket.recv() == b""
    seconds = time.perf_counter() - start
    socket.close()
    return seconds


PEERS = {
    "verl": (verl_receiver, verl_update, False, (64, 512, 2048)),
    "checkpoint-engine": (checkpoint_engine_receiver, checkpoint_engine_update, True, (64, 512)),
    "sglang": (sglang_receiver, sglang_update, True, (64, 512)),
}


def measure(peer, work, bucket_mb, rounds):
    receive, update, shared_buffer, _ = PEERS[peer]
    handle = f"ipc://{tempfile.gettempdir()}/headrace-peers-{uuid.uuid4().hex}.sock"
    memory, source = make(work, 7)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(work, handle, rounds + 1, there), daemon=True)
    process.start()
    buffer = None
    extra = ()
    if shared_buffer:
        segment = shared_memory.SharedMemory(create=True, size=2 * (bucket_mb << 20))
        buffer = torch.frombuffer(segment.buf, dtype=torch.uint8)
        buffer.fill_(0)
        extra = ((segment, buffer),)
    seconds = []
    try:
        for round_ in range(rounds + 1):
            memory.fill_(round_ + 1)
            elapsed = update(source, handle, here, bucket_mb, *extra)
            if not here.poll(120) or here.recv() != round_ + 1:
                raise RuntimeError(f"{peer}: the receiver has not got the new bytes")
            if round_ > 0:  # the first one touches the memory
                seconds.append(elapsed)
        process.join(60)
    finally:
        process.kill()
        if shared_buffer:
            del buffer, extra
            gc.collect()
            segment.close()
            segment.unlink()
        path = handle[len("ipc://") :]
        if os.path.exists(path):
            os.remove(path)
    return {
        "peer": peer,
        "work": work,
        "bucket_mib": bucket_mb,
        "tensors": len(source),
        "bytes": memory.numel(),
        "seconds": statistics.median(seconds),
        "seconds_best": min(seconds),
        "us_per_tensor": statistics.median(seconds) / len(source) * 1e6,
        "gbps": memory.numel() / statistics.median(seconds) / 1e9,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True, help="where the figures go")
    parser.add_argument("--rounds", type=int, default=5, help="updates that count, after one that does not")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for peer in PEERS:
        for work in ("large", "tiny"):
            for bucket_mb in PEERS[peer][3]:
                row = measure(peer, work, bucket_mb, arguments.rounds)
                results.append(row)
                print(
                    f"{peer:18} {work:6} bucket {bucket_mb:5} MiB  {row['seconds']:8.3f} s  {row['us_per_tensor']:9.2f} us a tensor"
                    f"  {row['gbps']:6.2f} GB/s",
                    flush=True,
                )
    with open(arguments.json, "w") as file:
        json.dump({"schema": "headrace.bench.peers/1", "rows": results}, file, indent=1)


if __name__ == "__main__":
    main()
