"""What the peers' tables need is read, and every other pickle is refused by name before it has an effect."""

import copyreg
import os
import pickle
import struct
import subprocess
import sys

import pytest
import torch
from headrace.integration.unpickle import Constructor, Dtype, Limits, Reference, RefusedPickle, loads

HEAD = b"\x80\x04"


def table(entries: int) -> dict:
    return {
        "bucket_meta": {
            f"layers.{i}.weight": {
                "name": f"layers.{i}.weight",
                "shape": torch.Size([i, 3]),
                "dtype": torch.bfloat16,
                "offset": i * 70_000,
                "handle": None,
            }
            for i in range(entries)
        },
        "is_last": True,
    }


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: object, *arguments: object):
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


class Plain:
    """An instance of a class that no table names."""


@pytest.mark.parametrize("entries", [0, 1, 3, 1_500])
def test_a_table_of_a_peer_is_read_as_the_peer_wrote_it(entries: int) -> None:
    read = loads(pickle.dumps(table(entries)))
    assert list(read) == ["bucket_meta", "is_last"] and read["is_last"] is True
    assert list(read["bucket_meta"]) == [f"layers.{i}.weight" for i in range(entries)]
    for i, entry in enumerate(read["bucket_meta"].values()):
        assert entry == {"name": f"layers.{i}.weight", "shape": (i, 3), "dtype": Dtype("bfloat16", 2), "offset": i * 70_000, "handle": None}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        255,
        256,
        65_536,
        -1,
        2**31,
        2**40,
        -(2**62),
        "",
        "é" * 300,
        b"",
        b"x" * 1_000,
        (),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
    ]
    + [[], [1], [[1], [2, 3]], {}, {"a": {"b": [()]}}, ("same", "same")],
)
def test_plain_values_come_back(value: object) -> None:
    assert loads(pickle.dumps(value, 4)) == value
    assert loads(pickle.dumps(value, 5)) == value


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    ],
    ids=str,
)  # fmt: skip
def test_a_dtype_has_torchs_name_and_size(dtype: torch.dtype) -> None:
    read = loads(pickle.dumps(dtype))
    assert f"torch.{read.name}" == str(dtype) and read.itemsize == dtype.itemsize
    assert str(read) == str(dtype if dtype != torch.float4_e2m1fn_x2 else torch.uint8)


def test_a_named_function_is_a_reference_and_is_not_called() -> None:
    assert loads(pickle.dumps((os.getpid, (1,))), {"posix.getpid": Reference("posix.getpid")}) == (Reference("posix.getpid"), (1,))
    with pytest.raises(RefusedPickle, match=r"a call of posix\.getpid"):
        loads(pickle.dumps(Calls(os.getpid)), {"posix.getpid": Reference("posix.getpid")})


def test_an_allowed_constructor_gets_the_arguments() -> None:
    allowed = {"builtins.RuntimeError": Constructor("builtins.RuntimeError", lambda arguments: ("said", *arguments))}
    assert loads(pickle.dumps(RuntimeError("no")), allowed) == ("said", "no")


HOSTILE = {
    "posix.system": pickle.dumps(Calls(os.system, "touch /tmp/headrace-unpickled")),
    "subprocess.call": pickle.dumps({"bucket_meta": {"w": {"name": "w", "shape": [Calls(subprocess.call, ["true"])]}}, "is_last": True}),
    "subprocess.Popen": pickle.dumps(Calls(subprocess.Popen, ["true"])),
    "builtins.eval": pickle.dumps(Calls(eval, "1")),
    "builtins.exec": pickle.dumps(Calls(exec, "1")),
    "builtins.getattr": pickle.dumps(Calls(getattr, "", "join")),
    "builtins.__import__": pickle.dumps(Calls(__import__, "os")),
    "builtins.bytearray": pickle.dumps(bytearray(b"1"), 4),
    "copyreg._reconstructor": pickle.dumps(Calls(copyreg._reconstructor, Plain, object, None)),
    "torch.storage._load_from_bytes": pickle.dumps(torch.zeros(2).untyped_storage()),
    "torch._utils._rebuild_tensor_v2": pickle.dumps(Calls(torch._utils._rebuild_tensor_v2, 1)),
    "torch.serialization.load": pickle.dumps(Calls(torch.load, "x")),
    f"{__name__}.Plain": pickle.dumps(Plain()),
    "torch.float32.__class__": HEAD + b"\x8c\x05torch\x8c\x11float32.__class__\x93.",
    "torch.Size.__new__": HEAD + b"\x8c\x05torch\x8c\x0cSize.__new__\x93.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_no_table_needs_is_refused_by_name(name: str) -> None:
    with pytest.raises(RefusedPickle, match=r"is not in the list") as refused:
        loads(HOSTILE[name])
    assert repr(name) in str(refused.value)
    assert not os.path.exists("/tmp/headrace-unpickled")


def opcodes(*parts: bytes) -> bytes:
    return HEAD + b"".join(parts) + b"."


SIZE = b"\x8c\x05torch\x8c\x04Size\x93"
MALFORMED = {
    "an old protocol": (pickle.dumps({"a": 1}, 2), "protocol 4 or 5"),
    "no pickle": (b"hello", "protocol 4 or 5"),
    "nothing": (b"", "protocol 4 or 5"),
    "half a header": (b"\x80", "truncated"),
    "GLOBAL": (HEAD + b"cos\nsystem\n.", "GLOBAL"),
    "INST": (HEAD + b"(ios\nsystem\n.", "INST"),
    "OBJ": (HEAD + b"(" + SIZE + b"o.", "OBJ"),
    "NEWOBJ": (HEAD + SIZE + b")\x81.", "NEWOBJ"),
    "NEWOBJ_EX": (HEAD + SIZE + b")}\x92.", "NEWOBJ_EX"),
    "BUILD": (HEAD + SIZE + b"}b.", "BUILD"),
    "EXT1": (HEAD + b"\x82\x01.", "EXT1"),
    "PERSID": (HEAD + b"Px\n.", "PERSID"),
    "BINPERSID": (HEAD + b"NQ.", "BINPERSID"),
    "NEXT_BUFFER": (b"\x80\x05\x97.", "NEXT_BUFFER"),
    "DUP": (HEAD + b"]2.", "DUP"),
    "an opcode that does not exist": (HEAD + b"\xff.", "0xff"),
    "a memo entry far away": (HEAD + b"Nr" + struct.pack("<I", 2**31 - 1) + b".", "LONG_BINPUT"),
    "a memo entry that is not there": (opcodes(b"h\x05"), "memo entry 5 of 0"),
    "a far memo entry that is not there": (opcodes(b"j", struct.pack("<I", 2**32 - 1)), "memo entry"),
    "8 GiB in one bytearray": (b"\x80\x05\x96" + struct.pack("<Q", 8 << 30) + b".", "BYTEARRAY8"),
    "a string of 4 GiB": (opcodes(b"X", struct.pack("<I", 2**32 - 1)), "a string of 4294967295 bytes"),
    "bytes of 4 GiB": (opcodes(b"B", struct.pack("<I", 2**32 - 1)), "4294967295 bytes in one value"),
    "a huge integer": (opcodes(b"\x8a\xff" + b"\x01" * 255), "an integer of 255 bytes"),
    "LONG4": (opcodes(b"\x8b", struct.pack("<I", 2**31 - 1)), "LONG4"),
    "a frame beyond the end": (opcodes(b"\x95", struct.pack("<Q", 2**60)), "a frame of"),
    "no UTF-8": (opcodes(b"\x8c\x01\xff"), "UTF-8"),
    "a list in itself": (opcodes(b"]\x94h\x00a"), "a list that is used twice"),
    "a dict that is used twice": (opcodes(b"}\x94h\x00\x86"), "a dict that is used twice"),
    "a key that is a tuple": (opcodes(b"}", b")N", b"s"), "a key that is a tuple"),
    "a key that comes twice": (opcodes(b"}(\x8c\x01aN\x8c\x01aNu"), "a key that comes twice"),
    "a key without a value": (opcodes(b"}(\x8c\x01au"), "entries for what is no dict"),
    "items for a tuple": (opcodes(b")Na"), "items for what is no list"),
    "entries for a size": (opcodes(SIZE, b"\x8c\x01aNs"), "entries for what is no dict"),
    "a size of a size": (opcodes(SIZE, SIZE, b"\x85R"), "torch.Size takes one tuple"),
    "a size with a string": (opcodes(SIZE, b"\x8c\x01a\x85\x85R"), "torch.Size with a dimension of 'a'"),
    "a size with a bool": (opcodes(SIZE, b"\x88\x85\x85R"), "torch.Size with a dimension of True"),
    "a negative size": (pickle.dumps(Calls(torch.Size, (-1,)), 4), "torch.Size with a dimension of -1"),
    "a size of 100 dimensions": (pickle.dumps(torch.Size([1] * 100)), "torch.Size takes one tuple"),
    "a call of a dtype": (opcodes(b"\x8c\x05torch\x8c\x04int8\x93)R"), "a call of Dtype"),
    "a call without a tuple": (opcodes(SIZE, b"]R"), "with no tuple"),
    "a name of numbers": (opcodes(b"K\x01K\x02\x93"), "a name that is no string"),
    "a pop across a mark": (opcodes(SIZE, b"(R"), "a value is missing"),
    "an end of a mark that is not there": (opcodes(b"Nt"), "missing"),
    "two values": (opcodes(b"NN"), "2 values at the end"),
    "no value": (opcodes(), "0 values at the end"),
    "a second pickle behind": (pickle.dumps(1) + pickle.dumps(2), "bytes after the end"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_no_table_is_refused(case: str) -> None:
    data, words = MALFORMED[case]
    with pytest.raises(RefusedPickle) as refused:
        loads(data)
    assert words in str(refused.value)


def test_nesting_has_a_limit_however_it_is_made() -> None:
    deep: object = 1
    for _ in range(17):
        deep = (deep,)
    bombs = [pickle.dumps(deep), opcodes(b")", b"\x85" * 1_000_000), opcodes(b"]" * 100_000, b"a" * 99_999)]
    # Every tuple is fetched again from the memo and put twice into the next: 2**200 leaves, a few hundred bytes.
    bombs.append(opcodes(b")\x94", *(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(200)), b"N\x86"))
    for bomb in bombs:
        with pytest.raises(RefusedPickle, match="nest deeper than 16"):
            loads(bomb)


def test_the_size_of_a_message_and_its_opcodes_have_limits() -> None:
    with pytest.raises(RefusedPickle, match="a message of 101 bytes, at most 100"):
        loads(b"\x80\x04" + b"N" * 99, limits=Limits(message_bytes_max=100))
    with pytest.raises(RefusedPickle, match="more than 1000 opcodes"):
        loads(opcodes(b"]" * 2_000), limits=Limits(opcodes_max=1_000))


def test_a_message_cut_anywhere_is_refused() -> None:
    whole = pickle.dumps(table(3))
    for end in range(len(whole)):
        with pytest.raises(RefusedPickle):
            loads(whole[:end])


def test_any_changed_byte_gives_plain_values_or_a_refusal() -> None:
    whole = pickle.dumps(table(2))
    for at in range(len(whole)):
        for value in (0x00, 0x28, 0x52, 0x75, 0x81, 0x85, 0x93, 0x94, 0xFF, whole[at] ^ 1):
            changed = whole[:at] + bytes([value]) + whole[at + 1 :]
            try:
                loads(changed)
            except RefusedPickle:
                pass


def test_reading_needs_no_torch() -> None:
    code = "import sys; import headrace.integration.unpickle as u; u.loads(bytes.fromhex(sys.argv[1])); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, pickle.dumps(table(2)).hex()], check=True, timeout=60)
