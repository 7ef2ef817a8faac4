"""The engine `headrace` through vLLM's own factories and worker methods, from a trainer's WeightSource to the parameters of a model."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import headrace
import pytest
import torch
import vllm_models as models
from headrace.integration import vllm as adapter
from headrace.integration.vllm.extension import HeadraceWorkerExtension
from headrace.integration.vllm.shadow import random_tensor, same_bytes
from headrace.integration.vllm.trainer import HeadraceTrainerInitInfo
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.v1.worker.gpu_worker import Worker

_jobs = itertools.count()


class ListedSource(WeightSource):
    """A checkpoint as a trainer's source. Tensors may change from step to step; names, dtypes and shapes do not."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class ExtendedWorker(Worker, HeadraceWorkerExtension):
    """As vLLM makes it: the extension's class appended to the worker's bases."""


def worker_of(loaded: models.Loaded) -> Worker:
    """vLLM's worker without its constructor, which wants a GPU: what its session methods use, and the engine from the factory."""
    adapter.register()
    worker = object.__new__(ExtendedWorker)
    worker.vllm_config = loaded.vllm_config
    worker.rank = 0
    worker.speculative_config = None
    worker.lora_resets = 0
    worker.model_runner = types.SimpleNamespace(reset_lora_state=lambda: setattr(worker, "lora_resets", worker.lora_resets + 1))
    worker._weight_update_active = False
    worker._weight_update_is_draft = False
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="headrace"), loaded.vllm_config, torch.device("cpu"), loaded.model
    )
    models.seen(type(loaded.model), Worker, WeightTransferEngineFactory)
    return worker


class Client:
    """vLLM's control plane with one worker behind it, as its collective_rpc calls it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.version: str | None = None

    def _call(self, method: str, *args: Any) -> None:
        self.calls.append(method)
        self.before.get(method, lambda: None)()
        getattr(self.worker, method)(*args)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")
        self.version = weight_version

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")


class Pair:
    """A worker and a trainer of one job."""

    def __init__(self, loaded: models.Loaded, tensors: dict[str, torch.Tensor], **info: Any) -> None:
        self.loaded = loaded
        self.worker = worker_of(loaded)
        self.client = Client(self.worker)
        self.tensors = dict(tensors)
        self.trainer = WeightTransferTrainerFactory.trainer_init(
            HeadraceTrainerInitInfo(job=f"vllm-{next(_jobs)}-{id(self)}", rank=0, **info),
            client=self.client,
            source=ListedSource(self.tensors),
        )

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors.update(tensors)
        self.trainer.send_weights()

    def close(self) -> None:
        self.trainer.shutdown()
        self.worker.shutdown_weight_transfer_engine()


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*args: Any, **kwargs: Any) -> Pair:
        made.append(Pair(*args, **kwargs))
        return made[-1]

    yield make
    for pair in made:
        pair.worker._weight_update_active = False
        pair.close()


def addresses(model: torch.nn.Module) -> dict[str, tuple]:
    """Of all parameters and buffers."""
    return {name: (t.data_ptr(), t.stride()) for name, t in itertools.chain(model.named_parameters(), model.named_buffers())}


NAMED = {"llama": (models.LLAMA, True), "deepseek_dense": (models.DEEPSEEK_DENSE, True), "qwen3_moe": (models.QWEN3_MOE, False)}


@pytest.mark.parametrize("name", NAMED)
def test_three_updates_leave_what_a_stock_load_leaves(name: str, pairs: Callable[..., Pair]) -> None:
    config, processed = NAMED[name]
    stock, ours = models.load(config, processed=processed), models.load(config, processed=processed)
    pair = pairs(ours, models.checkpoint(config, seed=0), processed=processed)
    before = addresses(ours.model)
    for step in (1, 2, 3):
        tensors = models.checkpoint(config, seed=step)
        models.stock_load(stock, tensors, processed=processed)
        pair.send(tensors)
        theirs, mine = models.state(stock.model), models.state(ours.model)
        assert theirs.keys() == mine.keys()
        assert [key for key in theirs if not same_bytes(theirs[key], mine[key])] == []
        assert pair.trainer.report.proven
        assert pair.client.version == f"{pair.trainer.run}/{step}"
    assert addresses(ours.model) == before
    receipt = pair.worker.hr_receipt()
    assert receipt["tensors"] == {"direct": len(models.entries_of(config)), "leased": 0, "dropped": 0}
    assert receipt["version"] == f"{pair.trainer.run}/3"
    assert pair.worker.lora_resets == 3


def test_a_loader_of_its_own_gets_leased_views_and_the_rest_goes_in_place(pairs: Callable[..., Pair]) -> None:
    stock, ours = models.load(models.LLAMA), models.load(models.LLAMA)
    for loaded in (stock, ours):
        projection = loaded.model.model.layers[0].mlp.down_proj.weight
        original = projection.weight_loader
        projection._weight_loader = lambda param, tensor, *args, original=original: original(param, tensor.flip(0), *args)
    pair = pairs(ours, models.checkpoint(models.LLAMA, seed=0))
    before = addresses(ours.model)
    for step in (1, 2, 3):
        tensors = models.checkpoint(models.LLAMA, seed=step)
        models.stock_load(stock, tensors)
        pair.send(tensors)
        theirs, mine = models.state(stock.model), models.state(ours.model)
        assert [key for key in theirs if not same_bytes(theirs[key], mine[key])] == []
    assert addresses(ours.model) == before
    assert pair.worker.hr_receipt()["tensors"] == {"direct": len(models.entries_of(models.LLAMA)) - 1, "leased": 1, "dropped": 0}
    assert list(pair.worker.hr_bind()["leased"]) == ["model.layers.0.mlp.down_proj.weight"]


def test_names_that_vllm_drops_may_be_brought(pairs: Callable[..., Pair]) -> None:
    ours = models.load(models.QWEN3)
    pair = pairs(ours, models.checkpoint(models.QWEN3, seed=0))
    pair.send(models.checkpoint(models.QWEN3, seed=1))
    assert pair.trainer.report.ignored_names == ("lm_head.weight",)
    assert pair.worker.hr_bind()["dropped"] == ["lm_head.weight"]


def test_vllms_source_over_a_module_is_taken(pairs: Callable[..., Pair]) -> None:
    import transformers

    models.load(models.LLAMA)
    ours = models.load(models.LLAMA)
    trained = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(ours.vllm_config.model_config.model), dtype=torch.bfloat16
    )
    worker = worker_of(ours)
    client = Client(worker)
    source = ModuleSource(trained)
    models.seen(type(trained), ModuleSource)
    trainer = WeightTransferTrainerFactory.trainer_init(
        HeadraceTrainerInitInfo(job=f"vllm-module-{next(_jobs)}", rank=0), client=client, source=source
    )
    try:
        trainer.send_weights()
        state = trained.state_dict()
        held = dict(ours.model.named_parameters())
        assert same_bytes(held["model.embed_tokens.weight"], state["model.embed_tokens.weight"])
        stacked = torch.cat([state[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"])
        assert same_bytes(held["model.layers.1.self_attn.qkv_proj.weight"], stacked)
    finally:
        trainer.shutdown()
        worker.shutdown_weight_transfer_engine()


def test_caches_are_reset_after_the_commit(pairs: Callable[..., Pair]) -> None:
    pair = pairs(models.load(models.LLAMA), models.checkpoint(models.LLAMA, seed=0))
    pair.send({})
    assert pair.client.calls == [
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
    ]


def test_a_start_while_a_session_is_open_is_refused(pairs: Callable[..., Pair]) -> None:
    pair = pairs(models.load(models.LLAMA), models.checkpoint(models.LLAMA, seed=0))
    pair.worker.start_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        pair.worker.start_weight_update()


def test_an_update_without_a_start_is_refused(pairs: Callable[..., Pair]) -> None:
    pair = pairs(models.load(models.LLAMA), models.checkpoint(models.LLAMA, seed=0))
    with pytest.raises(RuntimeError, match="start_weight_update must be called"):
        pair.worker.update_weights({"kind": "receive", "version": "run/1"})
    with pytest.raises(headrace.Error, match="start_weight_update comes first"):
        headrace.Sender.connect(job=pair.trainer.init_info.job).send("other/1", pair.tensors)


def test_a_failed_finish_is_followed_by_an_abort_and_the_worker_goes_on(pairs: Callable[..., Pair]) -> None:
    pair = pairs(models.load(models.LLAMA), models.checkpoint(models.LLAMA, seed=0))
    # What the worker is told to finish never came: its engine refuses, and vLLM keeps the session open.
    pair.client.before["finish_weight_update"] = lambda: setattr(pair.worker.weight_transfer_engine, "_awaited", "other/9")
    with pytest.raises(headrace.FailedPrecondition, match="finish without a committed update"):
        pair.trainer.send_weights()
    assert pair.client.calls[-2:] == ["finish_weight_update", "update_weights"]
    assert not pair.worker._weight_update_active
    pair.client.before.clear()
    pair.trainer.send_weights()
    assert pair.client.version == f"{pair.trainer.run}/2"


def test_a_finish_that_failed_may_be_called_again(pairs: Callable[..., Pair]) -> None:
    pair = pairs(models.load(models.LLAMA), models.checkpoint(models.LLAMA, seed=0))
    pair.worker.start_weight_update()
    with pytest.raises(headrace.FailedPrecondition):
        pair.worker.finish_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        pair.worker.start_weight_update()
    with pytest.raises(headrace.Cancelled, match="because"):
        pair.worker.update_weights({"kind": "abort", "reason": "because"})
    assert not pair.worker._weight_update_active
    pair.trainer.send_weights()


def test_a_source_that_raises_leaves_a_worker_that_takes_the_next_update(pairs: Callable[..., Pair]) -> None:
    stock, ours = models.load(models.LLAMA), models.load(models.LLAMA)
    pair = pairs(ours, models.checkpoint(models.LLAMA, seed=0), deadline_ms=5000)
    original = pair.trainer.source.iter_full

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(original(), 3)
        raise OSError("the trainer lost its shard")

    pair.trainer.source.iter_full = broken
    with pytest.raises(OSError, match="lost its shard"):
        pair.trainer.send_weights()
    assert not pair.worker._weight_update_active
    pair.trainer.source.iter_full = original
    tensors = models.checkpoint(models.LLAMA, seed=2)
    pair.send(tensors)
    models.stock_load(stock, tensors)
    theirs, mine = models.state(stock.model), models.state(ours.model)
    assert [key for key in theirs if not same_bytes(theirs[key], mine[key])] == []


def test_a_loader_that_raises_leaves_the_rank_torn_and_the_next_update_heals_it(pairs: Callable[..., Pair]) -> None:
    ours = models.load(models.LLAMA)
    projection = ours.model.model.layers[0].mlp.down_proj.weight
    original = projection.weight_loader
    failing: list[bool] = []

    def picky(param: torch.Tensor, tensor: torch.Tensor, *args: Any) -> None:
        if failing:
            raise ValueError("the loader does not like it")
        original(param, tensor.flip(0), *args)

    projection._weight_loader = picky
    pair = pairs(ours, models.checkpoint(models.LLAMA, seed=0))
    failing.append(True)
    with pytest.raises(headrace.Error, match="the loader does not like it"):
        pair.trainer.send_weights()
    status = pair.worker.hr_status()
    assert (status["state"], status["serving"]) == ("torn", False)
    assert not pair.worker._weight_update_active
    pair.worker.shutdown_weight_transfer_engine()
    assert pair.worker.hr_status()["state"] == "torn", "a torn rank gave its guard away"
    failing.clear()
    info = pair.trainer._worker_init_info()
    with pytest.raises(headrace.FailedPrecondition, match="this rank is torn"):
        pair.worker.init_weight_transfer_engine({**info, "threads": 2})
    pair.worker.init_weight_transfer_engine(info)
    assert pair.worker.hr_status()["state"] == "torn", "the next trainer opened the guard of a torn rank"
    pair.trainer.send_weights()
    assert pair.worker.hr_status()["serving"]


def test_a_tensor_that_moved_is_refused_by_name_before_the_first_byte(pairs: Callable[..., Pair]) -> None:
    ours = models.load(models.LLAMA)
    pair = pairs(ours, models.checkpoint(models.LLAMA, seed=0))
    norm = ours.model.model.norm.weight
    norm.data = norm.data.clone()
    with pytest.raises(headrace.FailedPrecondition, match="model.norm.weight lies elsewhere"):
        pair.trainer.send_weights()
    assert not pair.worker._weight_update_active


def test_vllms_layerwise_reload_may_run_between_updates_but_not_in_one(pairs: Callable[..., Pair]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    stock, ours = models.load(models.LLAMA), models.load(models.LLAMA)
    pair = pairs(ours, models.checkpoint(models.LLAMA, seed=0))
    pair.send(models.checkpoint(models.LLAMA, seed=1))
    before = addresses(ours.model)
    with set_current_vllm_config(ours.vllm_config), torch.no_grad():
        initialize_layerwise_reload(ours.model)
        with pytest.raises(headrace.FailedPrecondition, match="lies elsewhere"):
            pair.trainer.send_weights()
        ours.model.load_weights(iter(models.checkpoint(models.LLAMA, seed=2).items()))
        finalize_layerwise_reload(ours.model, ours.vllm_config.model_config)
    assert addresses(ours.model) == before
    tensors = models.checkpoint(models.LLAMA, seed=3)
    models.stock_load(stock, tensors)
    pair.send(tensors)
    theirs, mine = models.state(stock.model), models.state(ours.model)
    assert [key for key in theirs if not same_bytes(theirs[key], mine[key])] == []


def test_a_trainer_may_leave_and_another_one_come(pairs: Callable[..., Pair]) -> None:
    ours = models.load(models.LLAMA)
    first = pairs(ours, models.checkpoint(models.LLAMA, seed=0))
    first.send({})
    first.trainer.shutdown()
    first.worker.shutdown_weight_transfer_engine()
    assert first.worker.hr_status() == {"bound": False}
    second = WeightTransferTrainerFactory.trainer_init(
        HeadraceTrainerInitInfo(job=f"vllm-second-{next(_jobs)}", rank=0), client=first.client, source=ListedSource(first.tensors)
    )
    second.send_weights()
    assert first.worker.hr_receipt()["version"] == f"{second.run}/1"
    second.shutdown()


def test_a_model_with_a_parameter_that_cannot_be_written_is_refused_by_name() -> None:
    loaded = models.load(models.LLAMA)
    entries = models.checkpoint(models.LLAMA, seed=0) | {"model.layers.0.odd.weight": torch.zeros(3)}
    with pytest.raises(headrace.Unsupported, match="model.layers.0.odd.weight"):
        Pair(loaded, entries)


def test_a_dtype_that_torch_has_not_is_refused_by_name() -> None:
    loaded = models.load(models.LLAMA)
    worker = worker_of(loaded)
    info = {"job": "dtype", "names": ["a.weight"], "dtypes": ["nn"], "shapes": [[2]]}
    with pytest.raises(headrace.InvalidArgument, match="a.weight: 'nn'"):
        worker.init_weight_transfer_engine(info)


def test_a_worker_whose_trainer_never_sends_is_let_go_after_the_deadline(pairs: Callable[..., Pair]) -> None:
    pair = pairs(models.load(models.LLAMA), models.checkpoint(models.LLAMA, seed=0), deadline_ms=200)
    pair.worker.start_weight_update()
    with pytest.raises(headrace.DeadlineExceeded, match="within 200 ms"):
        pair.worker.update_weights({"kind": "receive", "version": "run/1"})
    assert not pair.worker._weight_update_active


def test_derived_tensors_follow_the_weights(pairs: Callable[..., Pair]) -> None:
    """A model-level hook as vLLM's DeepSeek-V4 has one: a sum that it refreshes in place."""
    stock, ours = models.load(models.LLAMA), models.load(models.LLAMA)
    for loaded in (stock, ours):
        add_derived(loaded.model)
    pair = pairs(ours, models.checkpoint(models.LLAMA, seed=0))
    at = ours.model.norm_sum.data_ptr()
    for step in (1, 2):
        tensors = models.checkpoint(models.LLAMA, seed=step)
        models.stock_load(stock, tensors)
        pair.send(tensors)
        assert same_bytes(stock.model.norm_sum, ours.model.norm_sum)
        assert bool(ours.model.norm_sum == ours.model.model.norm.weight.float().sum())
    assert ours.model.norm_sum.data_ptr() == at


def test_a_derived_tensor_that_moves_when_it_is_computed_again_is_refused_by_name() -> None:
    loaded = models.load(models.LLAMA)
    add_derived(loaded.model, in_place=False)
    with pytest.raises(headrace.Unsupported, match="norm_sum: lies elsewhere"):
        Pair(loaded, models.checkpoint(models.LLAMA, seed=0))


def add_derived(model: torch.nn.Module, *, in_place: bool = True) -> None:
    def refresh() -> None:
        value = model.model.norm.weight.float().sum()
        if in_place:
            model.norm_sum.copy_(value)
        else:
            model.norm_sum = value

    model.register_buffer("norm_sum", torch.zeros(()))
    model.process_weights_after_loading = refresh
    refresh()


def test_registering_twice_is_harmless_and_vllm_finds_the_entry_point() -> None:
    from importlib.metadata import entry_points

    adapter.register()
    adapter.register()
    found = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "headrace"]
    assert [entry.load() for entry in found] == [adapter.register]


def test_the_extension_has_no_name_that_vllms_worker_has() -> None:
    ours = {name for name in dir(HeadraceWorkerExtension) if not name.startswith("__")}
    models.seen(Worker, HeadraceWorkerExtension)
    assert ours == {"hr_bind", "hr_fingerprint", "hr_receipt", "hr_status"}
    assert [name for name in ours if hasattr(Worker, name)] == []


def test_fingerprints_are_the_senders(pairs: Callable[..., Pair]) -> None:
    pair = pairs(models.load(models.LLAMA), models.checkpoint(models.LLAMA, seed=0))
    pair.send(models.checkpoint(models.LLAMA, seed=1))
    first = pair.worker.hr_fingerprint()
    assert set(first) == {name for name, _, _ in models.entries_of(models.LLAMA)}
    pair.send({"model.norm.weight": random_tensor(torch.bfloat16, (64,), 77)})
    second = pair.worker.hr_fingerprint()
    assert [name for name in first if first[name] != second[name]] == ["model.norm.weight"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a model on it")
def test_a_model_on_a_gpu_is_refused_by_name() -> None:
    adapter.register()
    loaded = models.load(models.LLAMA)
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="headrace"), loaded.vllm_config, torch.device("cuda:0"), loaded.model.to("cuda")
    )
    with pytest.raises(headrace.Unsupported, match="cuda:0"):
        engine.init_transfer_engine(engine.parse_init_info({"job": "gpu", "names": [], "dtypes": [], "shapes": []}))
