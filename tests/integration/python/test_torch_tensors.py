"""The Python package with real torch tensors. Expected bytes come from torch itself."""

import gc
import shutil
import tempfile
import uuid

import headrace
import pytest
import torch
from headrace import _core

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@pytest.fixture
def job(monkeypatch):
    folder = tempfile.mkdtemp(prefix="hr-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield f"job-{uuid.uuid4().hex[:8]}"
    shutil.rmtree(folder)


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    *outer, last = shape
    size = torch.empty(0, dtype=torch.uint8).view(dtype).element_size() if dtype != torch.bool else 1
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*outer, last * size), dtype=torch.uint8)
    return raw.view(dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_by_every_way(job, dtype):
    name = DTYPES[dtype]
    live = torch.zeros(3 * 4 * 8, dtype=torch.uint8)[: 3 * 4 * random_tensor(dtype, 1).element_size()].view(dtype).view(3, 4)
    given = [random_tensor(dtype, 3, 4) for _ in range(3)]
    assert _core.describe(live, "w") == (name, (3, 4), live.nbytes)
    with headrace.Receiver(headrace.StorageTable.from_tensors({"w": live}), job=job) as receiver:
        with receiver.update("run/1") as update:
            update.load((name, tensor) for name, tensor in [("w", given[0])])
        assert raw_bytes(live) == raw_bytes(given[0])
        with receiver.update("run/2") as update:
            update.load(headrace.Bucket(given[1].view(torch.uint8).flatten(), [("w", 0, (3, 4), name)]))
        assert raw_bytes(live) == raw_bytes(given[1])
        with headrace.Sender.connect(job=job, bucket_bytes=1 << 16) as sender:
            assert sender.send("run/3", {"w": given[2]}).proven
        assert raw_bytes(live) == raw_bytes(given[2])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float4_e2m1fn_x2], ids=str)
def test_names_of_dtypes_are_understood(dtype):
    assert headrace.Layout.build(family="dense", tensors=[("w", dtype, (2,))]).tensors[0].dtype == DTYPES[dtype]


def test_parameters_with_gradients_and_views_with_steps(job):
    live = torch.nn.Parameter(torch.zeros(6, 4))
    turned = torch.zeros(4, 6).t()
    given = torch.nn.Parameter(torch.randn(4, 6))
    assert (live * 2).requires_grad
    with headrace.Receiver(headrace.StorageTable.from_tensors({"a": live, "b": turned}), job=job) as receiver:
        with receiver.update("run/1") as update:
            update.load([("a", given.t()), ("b", given.t() * 2)])
        assert torch.equal(live, given.t())
        assert torch.equal(turned, given.t() * 2)
        with headrace.Sender.connect(job=job, bucket_bytes=1 << 16) as sender:
            sender.send("run/2", lambda: iter([("a", (given * 3).t()), ("b", given.t())]))
        assert torch.equal(live, (given * 3).t())


def test_a_modules_storage_is_written_in_place_and_found_by_its_names(job):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    module.head = torch.nn.Linear(4, 4, bias=False)
    module.head.weight = module[0].weight
    module.register_buffer("empty", torch.empty(0))
    addresses = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    table = headrace.StorageTable.from_module(module)
    assert {spec.name: spec.alias_of for spec in table.storages if spec.alias_of} == {"head.weight": "0.weight"}
    assert "empty" not in table
    given = {
        name: torch.randn_like(tensor) for name, tensor in module.state_dict().items() if tensor.is_floating_point() and tensor.numel()
    }
    given["1.num_batches_tracked"] = torch.tensor(7)
    with headrace.Receiver(table, job=job) as receiver:
        with pytest.raises(headrace.InvalidArgument, match=r"head\.weight: not what 0\.weight holds"), receiver.update("run/1") as update:
            update.load(given)
        given["head.weight"] = given["0.weight"].clone()
        with receiver.update("run/1") as update:
            update.load(given)
        for name, tensor in module.state_dict().items():
            assert tensor.data_ptr() == addresses[name]
            if name != "empty":
                assert torch.equal(tensor, given[name])
        # The same place, another object: that is fine. Another place is not.
        module[1].weight.data = module[1].weight.data[:]
        with receiver.update("run/2") as update:
            update.load(given)
        module[1].weight = torch.nn.Parameter(module[1].weight.detach().clone())
        with pytest.raises(headrace.FailedPrecondition, match=r"1\.weight"):
            receiver.update("run/3").__enter__()


def test_what_is_not_in_host_memory_is_refused_by_its_device():
    for tensor, match in [(torch.zeros(2, device="meta"), "w: the tensor is on meta"), (torch.zeros(2).to_sparse(), "^w: ")]:
        with pytest.raises(headrace.Error, match=match):
            _core.describe(tensor, "w")


def test_a_torch_view_that_a_hook_kept_stays_readable(job):
    kept = []

    def hook(group, inputs, work, outputs):
        outputs[0].torch().copy_(inputs[0].torch().to(torch.float32))
        kept.append((inputs[0].torch(), torch.from_dlpack(outputs[0].torch())))

    live = torch.zeros(4)
    spec = headrace.StorageSpec("out", "F32", (4,))
    layout = headrace.Layout.build(family="dense", tensors=[("norm.weight", "F32", (4,))])
    layout = layout.with_groups([headrace.Group("g", entries=[("w", "BF16", (4,))], outputs=[spec])])
    given = torch.randn(4).bfloat16()
    norm = torch.zeros(4)
    table = headrace.StorageTable.from_tensors({layout.storages[0].name: norm, "out": live})
    hooks = headrace.Hooks(staged={"load_weights": hook})
    with headrace.Receiver(table, layout, job=job, hooks=hooks) as receiver, receiver.update("run/1") as update:
        update.load({"w": given, "norm.weight": torch.ones(4)})
    assert torch.equal(live, given.float())
    del table, live, receiver, update
    gc.collect()
    entered, left = kept[0]
    assert torch.equal(entered, given)
    assert torch.equal(left, given.float())


class Wrapper(torch.Tensor):
    """A tensor whose data is elsewhere, as a distributed one is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def emptied() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: torch._neg_view(torch.ones(4)), "resolve_neg"),
        (lambda: torch.ones(4, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.ones(4, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch._efficientzerotensor((4,)), "no memory"),
        (lambda: Wrapper(torch.ones(4)), "no memory"),
        (emptied, "no memory"),
    ],
)
def test_what_has_no_memory_or_other_values_than_its_memory_is_refused(make, why):
    tensor = make()
    live = torch.full((4,), 5, dtype=tensor.dtype)
    table = headrace.StorageTable.from_tensors({"w": live})
    with pytest.raises(headrace.InvalidArgument, match=f"^w: .*{why}"):
        headrace.Layout.identity(table).place(table, [("w", tensor)])
    with pytest.raises(headrace.InvalidArgument, match=f"^w: .*{why}"):
        headrace.StorageTable.from_tensors({"w": tensor})
    assert live.tolist() == [5] * 4


def test_a_shape_that_overflows_is_refused():
    with pytest.raises(headrace.InvalidArgument, match="^w: .*is no size of memory"):
        _core.describe(torch.zeros(1, dtype=torch.float64).expand(1 << 31, 1 << 31), "w")
