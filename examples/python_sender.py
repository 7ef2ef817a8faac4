#!/usr/bin/env python3
"""A small sender: puts safetensors files into the running ranks of a job.

Written from docs/protocol.md alone, with pyzmq, msgpack and the standard library. One sender brings all tensors as one version; what ranks
want in parts is cut into their boxes. Tensors go in the order of the files, but those that a rank computes something of together (its groups)
go one after the other, where the first of them stands. Exit code 0: every rank has committed and proven it. 3: refused, with the reasons
on standard error. 4: a rank was lost or too slow.
"""

import argparse
import array
import fcntl
import hashlib
import json
import math
import mmap
import operator
import os
import re
import secrets
import socket
import struct
import sys
import time

import msgpack
import zmq

PROTOCOL = 1
HELLO, WELCOME, OPEN, OPENED, MANIFEST, ACCEPT, REJECT, CONFIRM, BEGIN, BUCKET, CONSUMED, END = range(1, 13)
PREPARED, COMMIT, COMMITTED, ABORT, ERROR, PING, PONG = range(13, 20)
NAMES = {HELLO: "HELLO", WELCOME: "WELCOME", OPENED: "OPENED", ACCEPT: "ACCEPT", BEGIN: "BEGIN", CONSUMED: "CONSUMED", PREPARED: "PREPARED",
         COMMITTED: "COMMITTED"}
DTYPES = {"BOOL": (1, 1), "U8": (2, 1), "I8": (3, 1), "F8_E5M2": (4, 1), "F8_E4M3": (5, 1), "F8_E8M0": (6, 1), "F8_E4M3FNUZ": (7, 1),
          "F8_E5M2FNUZ": (8, 1), "I16": (9, 2), "U16": (10, 2), "F16": (11, 2), "BF16": (12, 2), "I32": (13, 4), "U32": (14, 4),
          "F32": (15, 4), "C64": (16, 8), "F64": (17, 8), "I64": (18, 8), "U64": (19, 8)}
PING_INTERVAL_S = 0.25
BUCKET_BYTES = 64 << 20
VALUE_BYTES_MAX = 16
REFUSED, LOST = 3, 4
PEER_CODES = (4, 5, 7, 9)  # deadline exceeded, unavailable, cancelled, device lost


class Failed(Exception):
    """What ends the program: its exit code and why."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


# Fingerprint

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def sm(x):
    """One step of SplitMix64."""
    z = (x + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def random_words():
    words, state = [], 0x4865616472616365
    while len(words) < 1040:
        word = sm(state) >> 32
        if word:
            words.append(word)
        state = (state + GOLDEN) & MASK
    return words


K = random_words()
LANES = (K[:1024], K[16:])
ZERO_BLOCK = bytes(4096)


def tensor_key(name, dtype, shape):
    raw = name.encode()
    h = sm(len(raw))
    for value in struct.unpack(f"<{(len(raw) + 7) // 8}Q", raw.ljust((len(raw) + 7) // 8 * 8, b"\0")):
        h = sm(h ^ value)
    for value in (dtype, len(shape), *shape):
        h = sm(h ^ value)
    return h


def fingerprint(key, offset, data):
    """Both lanes of `data`, which stands at byte `offset` of its tensor."""
    sums = [0, 0]
    start = offset - offset % 4096
    padded = bytes(offset - start) + bytes(data)
    padded += bytes(-len(padded) % 4)
    for at in range(0, len(padded), 4096):
        piece = padded[at:at + 4096]
        if piece == ZERO_BLOCK:
            continue
        words = array.array("I", piece)
        if sys.byteorder == "big":
            words.byteswap()
        block = (start + at) // 4096
        for lane in (0, 1):
            kappa = sm(sm(sm(key) ^ block) ^ lane) | 1
            sums[lane] += kappa * sum(map(operator.mul, words, LANES[lane]))
    return [sums[0] & MASK, sums[1] & MASK]


# The file


class Tensor:
    def __init__(self, name, dtype, shape, data):
        self.name = name
        self.dtype, self.elem_bytes = DTYPES[dtype]
        self.shape = shape
        self.data = data  # packed row-major

    def whole(self):
        return [0] * len(self.shape), list(self.shape)

    def runs_of(self, lo, hi):
        """(offset, bytes) of each contiguous piece of a box, in row-major order."""
        rank = len(self.shape)
        strides = [math.prod(self.shape[d + 1:]) * self.elem_bytes for d in range(rank)]
        inner = rank  # dimensions from here on are whole, so the one before them is contiguous too
        while inner > 0 and lo[inner - 1] == 0 and hi[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        split = max(inner - 1, 0)
        run = (hi[split] - lo[split]) * strides[split] if rank else self.elem_bytes
        index = list(lo[:split])
        while True:
            yield sum(i * s for i, s in zip(index, strides)) + (lo[split] * strides[split] if rank else 0), run
            for d in range(split - 1, -1, -1):
                index[d] += 1
                if index[d] < hi[d]:
                    break
                index[d] = lo[d]
            else:
                return


def read_checkpoint(path):
    """All tensors of one file, or of every safetensors file of a folder."""
    if not os.path.isdir(path):
        return read_safetensors(path)
    files = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    return [tensor for name in files for tensor in read_safetensors(os.path.join(path, name))]


def read_safetensors(path):
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    tensors = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if info["dtype"] not in DTYPES:
            raise Failed(REFUSED, f"{path}: tensor {name}: dtype {info['dtype']} is not sent by this example")
        begin, end = info["data_offsets"]
        tensors.append(Tensor(name, info["dtype"], info["shape"], memoryview(data)[8 + length + begin:8 + length + end]))
    return tensors


# Receivers


def run_directory(job):
    base = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(base, "headrace", job) if base else f"/tmp/headrace-{os.getuid()}/{job}"


def failure_text(failure):
    text = failure.get("message", "")
    where = [f"{key} {failure[key]}" for key in ("engine", "rank", "phase", "bucket") if failure.get(key) not in (None, "", -1)]
    if failure.get("expected") or failure.get("actual"):
        text += f" (expected {failure.get('expected')}, actual {failure.get('actual')})"
    return f"{', '.join(where)}: {text}" if where else text


class Receiver:
    """The connection to one rank."""

    def __init__(self, context, path, job, sender, paths):
        self.name = os.path.basename(path)[:-len(".ipc")]
        self.incarnation = 0
        self.descriptors = None
        self.wanted = self.credits = None
        self.sums = {}
        self.sequence = self.unanswered = 0
        self.routing_id = bytes([1 + secrets.randbelow(255)]) + secrets.token_bytes(15)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.ROUTING_ID, self.routing_id)
        self.socket.connect("ipc://" + path)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        self.send(HELLO, 0, {"protocol_min": PROTOCOL, "protocol_max": PROTOCOL, "job": job, "sender": sender, "boot_id": boot_id,
                             "devices": ["host"], "data_paths": paths})

    def send(self, kind, session, fields, attachment=None):
        frames = [msgpack.packb(["HR", PROTOCOL, kind, session, self.incarnation, fields])]
        self.socket.send_multipart(frames if attachment is None else frames + [attachment])

    def open_descriptor_socket(self, path, timeout_s):
        self.descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptors.settimeout(timeout_s)
        self.descriptors.connect(path)
        self.descriptors.send(struct.pack("<II", 0x31445248, 1) + self.routing_id)

    def attach(self, memory, size, descriptor):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        self.descriptors.sendmsg([struct.pack("<IIQQ", 0x31445248, 2, memory, size)], rights)
        answer = self.descriptors.recv(65536)
        magic, kind, answered, code = struct.unpack_from("<IIQI", answer)
        if (magic, kind, answered, code) != (0x31445248, 4, memory, 0):
            raise Failed(REFUSED, f"{self.name}: memory not taken: code {code}, {answer[28:].decode(errors='replace')}")


class Update:
    """One update of all ranks of a job."""

    def __init__(self, options, tensors):
        self.options = options
        self.tensors = tensors
        self.session = secrets.randbits(64) or 1
        self.receivers = []
        self.order = []  # of entries, as they are sent
        self.values = []  # [entry, bytes] that ranks must know before they accept
        self.open = False
        self.progress = 0
        self.pinged = 0.0
        self.memory = None  # staging: what ranks read buckets from with shm
        self.bucket_bytes = options.bucket_bytes
        self.wire_bytes = 0

    def run(self):
        self.connect()
        welcomes = self.expect_all(WELCOME, session=0)
        self.choose_path(welcomes)
        self.values = self.asked_values(welcomes)
        fields = {"version": self.options.version, "scopes": self.options.scope, "senders": [self.options.sender], "overlap": 0,
                  "ranks": []}
        self.open = True
        self.send_all(OPEN, fields)
        self.expect_all(OPENED)
        self.agree()
        self.send_all(CONFIRM, {})
        for receiver, begin in zip(self.receivers, self.expect_all(BEGIN)):
            receiver.credits = begin["credits"]
        self.transfer()
        for receiver in self.receivers:
            sums = [[entry, *lanes] for entry, lanes in sorted(receiver.sums.items())]
            receiver.send(END, self.session, {"buckets": receiver.sequence, "fingerprints": sums})
        self.expect_all(PREPARED)
        self.send_all(COMMIT, {})
        receipts = [message["receipt"] for message in self.expect_all(COMMITTED)]
        self.open = False
        return receipts

    # Agreement

    def connect(self):
        folder = run_directory(self.options.job)
        paths = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".ipc")) if os.path.isdir(folder) else []
        if not paths:
            raise Failed(LOST, f"no rank of job {self.options.job} in {folder}")
        context = zmq.Context.instance()
        wanted = [self.options.data_path]
        self.receivers = [Receiver(context, path, self.options.job, self.options.sender, wanted) for path in paths]

    def choose_path(self, welcomes):
        for receiver, welcome in zip(self.receivers, welcomes):
            receiver.incarnation = welcome["incarnation"]
            if welcome["ranks"] != len({other["rank"] for other in welcomes if other["engine"] == welcome["engine"]}):
                raise Failed(REFUSED, f"engine {welcome['engine']} has {welcome['ranks']} ranks, some are missing")
            if self.options.data_path not in welcome["data_paths"]:
                raise Failed(REFUSED, f"{receiver.name}: has the data paths {welcome['data_paths']}, not {self.options.data_path}")
            if welcome["bucket_bytes_max"]:
                self.bucket_bytes = min(self.bucket_bytes, welcome["bucket_bytes_max"])
            if self.options.data_path == "shm":
                receiver.open_descriptor_socket(welcome["descriptor_path"], self.options.timeout)

    def asked_values(self, welcomes):
        rules = {}
        for rule in (rule for welcome in welcomes for rule in welcome["values"]):
            key = rule["prefix"], rule["suffix"]
            rules[key] = max(rule["experts"], rules.get(key, 0))
        asked = [entry for entry, tensor in enumerate(self.tensors) if value_asked(rules, tensor.name)]
        for tensor in (self.tensors[entry] for entry in asked):
            if len(tensor.data) > VALUE_BYTES_MAX:
                raise Failed(REFUSED, f"{tensor.name}: {len(tensor.data)} bytes of it are asked for, at most {VALUE_BYTES_MAX} are told")
        return [[entry, bytes(self.tensors[entry].data)] for entry in asked]

    def agree(self):
        entries = msgpack.packb([[tensor.name, tensor.dtype, tensor.shape] for tensor in self.tensors])
        digest = hashlib.blake2b(entries, digest_size=16).digest()
        self.send_all(MANIFEST, {"digest": digest, "known": False, "entries": entries, "values": self.values})
        accepts = self.expect_all(ACCEPT)
        for receiver, accept in zip(self.receivers, accepts):
            receiver.wanted = [self.parse_wanted(item, tensor) for item, tensor in zip(accept["wanted"], self.tensors)]
            if len(accept["wanted"]) != len(self.tensors):
                raise Failed(REFUSED, f"{receiver.name}: ACCEPT for {len(accept['wanted'])} entries, the manifest has {len(self.tensors)}")
            if accept["bucket_bytes_max"]:
                self.bucket_bytes = min(self.bucket_bytes, accept["bucket_bytes_max"])
        self.order = self.in_groups([group["entries"] for accept in accepts for group in accept["groups"]])
        defects = [text for entry in range(len(self.tensors)) if (text := self.unwanted(entry))]
        if defects:
            raise Failed(REFUSED, "\n".join(defects))

    def in_groups(self, groups):
        """All entries, each group from where its first stands."""
        place = list(range(len(self.tensors)))
        for group in groups:
            first = min(place[entry] for entry in group)
            for entry in group:
                place[entry] = first
        return sorted(range(len(self.tensors)), key=lambda entry: (place[entry], entry))

    @staticmethod
    def parse_wanted(item, tensor):
        if item is None or item is False:
            return {"ignored": item is False, "granule": [], "boxes": []}
        granule, boxes = item[0], item[1:]
        fits = len(granule) == len(tensor.shape) and all(g > 0 for g in granule) and all(
            len(lo) == len(hi) == len(tensor.shape) and all(0 <= l < h <= size for l, h, size in zip(lo, hi, tensor.shape))
            for lo, hi in boxes)
        if not fits:
            raise Failed(REFUSED, f"{tensor.name}: boxes {boxes} at multiples of {granule} are wanted of shape {tensor.shape}")
        return {"ignored": False, "granule": granule, "boxes": boxes}

    def unwanted(self, entry):
        """Why an entry may not be sent; None when the ranks want all of it, or all drop it."""
        tensor = self.tensors[entry]
        asked = [receiver.wanted[entry] for receiver in self.receivers]
        if all(each["ignored"] for each in asked) or math.prod(tensor.shape) == 0:
            return None
        boxes = {(tuple(lo), tuple(hi)) for each in asked for lo, hi in each["boxes"]}
        if covers([(list(lo), list(hi)) for lo, hi in boxes], *tensor.whole()):
            return None
        return f"{tensor.name}: no rank wants all of it"

    # Transfer

    def transfer(self):
        if self.options.data_path == "shm":
            self.share_memory()
        bucket, filled = [], 0  # [(receivers, entry, (lo, hi), bytes)]
        for entry in self.order:
            tensor = self.tensors[entry]
            for box, receivers in self.boxes_of(entry):
                for lo, hi in self.cut(tensor, box, receivers[0].wanted[entry]["granule"]):
                    data = self.pack(entry, tensor, lo, hi, receivers)
                    if filled + len(data) + 64 > self.bucket_bytes and bucket:
                        self.send_bucket(bucket)
                        bucket, filled = [], 0
                    bucket.append((receivers, entry, (lo, hi), data))
                    filled += -(-len(data) // 64) * 64
        if bucket:
            self.send_bucket(bucket)

    def boxes_of(self, entry):
        """Each distinct wanted box with the receivers that want it."""
        groups = {}
        for receiver in self.receivers:
            for lo, hi in receiver.wanted[entry]["boxes"]:
                groups.setdefault((tuple(lo), tuple(hi)), []).append(receiver)
        return groups.items()

    def cut(self, tensor, box, granule):
        """The box in pieces that fit into a bucket, cut along its first dimensions."""
        stack = [(list(box[0]), list(box[1]), 0)]
        while stack:
            lo, hi, dim = stack.pop()
            size = math.prod(h - l for l, h in zip(lo, hi)) * tensor.elem_bytes
            if size <= self.bucket_bytes:
                yield lo, hi
                continue
            if dim == len(lo):
                raise Failed(REFUSED, f"{tensor.name}: {size} bytes cannot be cut to fit a bucket of {self.bucket_bytes}")
            steps = max(self.bucket_bytes * (hi[dim] - lo[dim]) // size // granule[dim], 1) * granule[dim]
            parts, at = [], lo[dim]
            while at < hi[dim]:
                end = min((at // granule[dim]) * granule[dim] + steps, hi[dim])
                parts.append((lo[:dim] + [at] + lo[dim + 1:], hi[:dim] + [end] + hi[dim + 1:], dim + 1))
                at = end
            stack.extend(reversed(parts))

    def pack(self, entry, tensor, lo, hi, receivers):
        key = tensor_key(tensor.name, tensor.dtype, tensor.shape)
        data, sums = bytearray(), [0, 0]
        for offset, size in tensor.runs_of(lo, hi):
            piece = tensor.data[offset:offset + size]
            data += piece
            for lane, value in enumerate(fingerprint(key, offset, piece)):
                sums[lane] = (sums[lane] + value) & MASK
            self.heartbeat()
        for receiver in receivers:
            before = receiver.sums.get(entry, [0, 0])
            receiver.sums[entry] = [(a + b) & MASK for a, b in zip(before, sums)]
        self.progress += 1
        return data

    def share_memory(self):
        descriptor = os.memfd_create("python-sender", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, self.bucket_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        for receiver in self.receivers:
            receiver.attach(1, self.bucket_bytes, descriptor)
        self.memory = mmap.mmap(descriptor, self.bucket_bytes)
        os.close(descriptor)

    def send_bucket(self, bucket):
        """Announces packed boxes to whoever wants them, and waits until their bytes are in place: then the staging memory is free again."""
        offset, extents, attachments = 0, {}, {}
        for receivers, entry, (lo, hi), data in bucket:
            self.wire_bytes += len(data)
            if self.memory is not None:
                self.memory[offset:offset + len(data)] = data
            for receiver in receivers:
                inline = attachments.setdefault(receiver, bytearray())
                extents.setdefault(receiver, []).append([entry, 1, offset if self.memory is not None else len(inline), [lo, hi]])
                if self.memory is None:
                    inline += data
            offset += -(-len(data) // 64) * 64
        for receiver, mine in extents.items():
            attachment = None if self.memory is not None else bytes(attachments[receiver])
            receiver.send(BUCKET, self.session, {"sequence": receiver.sequence, "extents": mine}, attachment)
            receiver.sequence += 1
        self.expect(list(extents), CONSUMED)

    # Messages

    def send_all(self, kind, fields):
        for receiver in self.receivers:
            receiver.send(kind, self.session, fields)

    def expect_all(self, kind, session=None):
        return self.expect(self.receivers, kind, session)

    def expect(self, receivers, kind, session=None):
        """One message of this kind from each, in their order. Time runs while no rank makes progress."""
        session = self.session if session is None else session
        found, seen = {}, {}
        poller = zmq.Poller()
        for receiver in self.receivers:
            poller.register(receiver.socket, zmq.POLLIN)
        deadline = time.monotonic() + self.options.timeout
        while any(receiver not in found for receiver in receivers):
            self.heartbeat()
            ready = dict(poller.poll(PING_INTERVAL_S * 1000))
            for receiver in self.receivers:
                while receiver.socket in ready and receiver.socket.poll(0):
                    got, fields = self.take(receiver, session)
                    if got == kind:
                        found[receiver] = fields
                    if got != PONG or seen.get(receiver) != fields["progress"]:
                        deadline = time.monotonic() + self.options.timeout
                    if got == PONG:
                        seen[receiver] = fields["progress"]
            if time.monotonic() > deadline:
                missing = ", ".join(receiver.name for receiver in receivers if receiver not in found)
                raise Failed(LOST, f"no {NAMES[kind]} from {missing} within {self.options.timeout:g} s")
        return [found[receiver] for receiver in receivers]

    def take(self, receiver, session):
        frames = receiver.socket.recv_multipart()
        magic, _, kind, its_session, incarnation, fields = msgpack.unpackb(frames[0], strict_map_key=False)[:6]
        if magic != "HR":
            raise Failed(REFUSED, f"{receiver.name}: not a message of this protocol")
        if kind == ERROR:
            self.open = self.open and its_session == 0
            failure = fields["failure"]
            raise Failed(LOST if failure["code"] in PEER_CODES else REFUSED, failure_text(failure))
        if its_session != session:
            return None, fields
        if kind == REJECT:
            self.open = False
            raise Failed(REFUSED, f"{fields['defects_total']} defects, nothing was written:\n" +
                         "\n".join("  " + failure_text(defect) for defect in fields["defects"]))
        fields["incarnation"] = incarnation
        return kind, fields

    def heartbeat(self):
        if self.open and time.monotonic() - self.pinged >= PING_INTERVAL_S:
            self.pinged = time.monotonic()
            self.send_all(PING, {"progress": self.progress})

    def abort(self, text):
        failure = {"code": 7, "message": text, "engine": "", "rank": -1, "sender": self.options.sender, "phase": "transfer", "bucket": -1,
                   "name": "", "expected": "", "actual": ""}
        if self.open:
            self.send_all(ABORT, {"failure": failure})


def value_asked(rules, name):
    """Whether a name is PREFIX E.SUFFIX of a rule, with E below its number of experts."""
    for found in re.finditer(r"([0-9]+)\.", name):
        expert = int(found[1])
        if expert < rules.get((name[:found.start()], name[found.end():]), 0) and str(expert) == found[1]:
            return True
    return False


def covers(boxes, lo, hi):
    """Whether the boxes together hold all of [lo, hi)."""
    if any(all(l <= a and b <= h for l, a, b, h in zip(blo, lo, hi, bhi)) for blo, bhi in boxes):
        return True
    for dim in range(len(lo)):
        for edge in {edge for box in boxes for edge in (box[0][dim], box[1][dim]) if lo[dim] < edge < hi[dim]}:
            return (covers(boxes, lo, hi[:dim] + [edge] + hi[dim + 1:]) and covers(boxes, lo[:dim] + [edge] + lo[dim + 1:], hi))
    return False


def main():
    parser = argparse.ArgumentParser(description="Send a checkpoint to every rank of a job on this host.")
    parser.add_argument("checkpoint", help="safetensors file, or a folder of them")
    parser.add_argument("--job", required=True)
    parser.add_argument("--version", default="python/1", help="RUN/STEP")
    parser.add_argument("--data-path", choices=("shm", "inline"), default="shm")
    parser.add_argument("--sender", default="python-0")
    parser.add_argument("--scope", nargs="+", default=["target"])
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds without progress")
    options = parser.parse_args()
    update = None
    try:
        tensors = read_checkpoint(options.checkpoint)
        update = Update(options, tensors)
        began = time.monotonic()
        receipts = update.run()
    except Failed as failed:
        if update is not None:
            update.abort(str(failed))
        print(f"python_sender: {failed}", file=sys.stderr)
        return failed.code
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, struct.error) as error:
        # A file or a message that is not what it should be. Ranks hear of it now, not when the connection ends.
        if update is not None:
            update.abort(str(error))
        print(f"python_sender: {options.checkpoint}: {error}", file=sys.stderr)
        return REFUSED
    proven = all(receipt["proven"] for receipt in receipts)
    applied = sum(receipt["applied_bytes"] for receipt in receipts)
    print(f"{options.version} is served by {len(receipts)} rank{'s' if len(receipts) > 1 else ''}: {update.wire_bytes} bytes on the wire "
          f"({options.data_path}), {applied} applied, {time.monotonic() - began:.1f} s, "
          f"{'every fingerprint equal' if proven else 'not proven'}")
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
