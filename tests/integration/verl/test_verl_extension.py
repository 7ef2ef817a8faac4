"""The worker extension as verl and vLLM make and call it, with vLLM's own models on the CPU and verl's own sender."""

import asyncio
import inspect
import logging
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import headrace
import pytest
import torch
import verl_cpu_platform  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
import vllm_models as models
from headrace.integration.verl.backend import HeadraceCheckpointEngine
from headrace.integration.verl.extension import HeadraceWorkerExtension
from headrace.integration.vllm.shadow import same_bytes
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.v1.worker.gpu_worker import Worker
from weight_streams import WAIT_S, nothing_left_behind, start


@pytest.fixture(autouse=True)
def tidy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    models.seen(vLLMColocateWorkerExtension, Worker)
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, nothing_left_behind():
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("VERL_RAY_JOB_ID", f"test{os.getpid()}")
        monkeypatch.setenv("VERL_REPLICA_RANK", "3")
        yield


class StockWorker(Worker, vLLMColocateWorkerExtension):
    """As vLLM makes it with verl's own extension: appended to the worker's bases."""


class OurWorker(Worker, HeadraceWorkerExtension):
    """The same with ours."""


class Engine:
    """A worker without its constructor, which wants a GPU, and verl's sender in front of it."""

    def __init__(self, kind: type, config: dict[str, Any], **options: Any) -> None:
        self.loaded = models.load(config)
        self.loaded.vllm_config.additional_config = {"headrace": {"wait_s": WAIT_S, **options}}
        self.loaded.vllm_config.model_config.enable_sleep_mode = True  # verl's default
        self.make_worker(kind)

    def make_worker(self, kind: type) -> None:
        self.worker = object.__new__(kind)
        self.worker.vllm_config = self.loaded.vllm_config
        self.worker.rank = self.worker.local_rank = 0
        self.worker.device = torch.device("cpu")
        self.worker._is_qat_model = self.worker._is_modelopt_qat = False
        self.worker.model_runner = types.SimpleNamespace(model=self.loaded.model, vllm_config=self.loaded.vllm_config, drafter=None)

    def call(self, **kwargs: Any) -> None:
        """As collective_rpc calls it, in vLLM's own context."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.loaded.vllm_config), torch.no_grad():
            self.worker.update_weights_from_ipc(use_shm=True, **kwargs)

    def send(self, weights: Any) -> None:
        sender = BucketedWeightSender(self.worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True)
        asyncio.run(sender.async_send_weights(weights))

    def update(self, weights: Any, **kwargs: Any) -> None:
        sending = start(lambda: self.send(weights))
        try:
            self.call(**kwargs)
        finally:
            sending.result(WAIT_S)

    def places(self) -> dict[str, tuple]:
        model = self.loaded.model
        return {name: (t.data_ptr(), t.stride()) for name, t in (*model.named_parameters(), *model.named_buffers())}

    def close(self) -> None:
        if isinstance(self.worker, HeadraceWorkerExtension):
            self.worker.hr_engine_side().forget()


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(kind: type, config: dict[str, Any] = models.LLAMA, **options: Any) -> Engine:
        made.append(Engine(kind, config, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def assert_equal(ours: Engine, stock: Engine) -> None:
    mine, theirs = models.state(ours.loaded.model), models.state(stock.loaded.model)
    assert theirs.keys() == mine.keys()
    assert [key for key in theirs if not same_bytes(theirs[key], mine[key])] == []


def test_vllm_may_add_it_to_its_worker() -> None:
    ours = {name for name in dir(HeadraceWorkerExtension) if not name.startswith("__")}
    assert not ours & set(dir(Worker))
    added = ours - set(dir(vLLMColocateWorkerExtension))
    assert added and all(name.startswith("hr_") for name in added)


def test_it_is_made_as_verl_makes_its_own() -> None:
    ours, theirs = (
        inspect.signature(kind.update_weights_from_ipc).parameters for kind in (HeadraceWorkerExtension, vLLMColocateWorkerExtension)
    )
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]
    made = HeadraceWorkerExtension.__new__(HeadraceWorkerExtension, vllm_config=types.SimpleNamespace(quant_config=None))
    assert made._is_qat_model is False and made._is_modelopt_qat is False


@pytest.mark.parametrize("config", [models.LLAMA, models.QWEN2], ids=["llama", "qwen2"])
def test_colocated_updates_leave_what_verls_own_extension_leaves(config: dict, engines: Any) -> None:
    stock, ours = engines(StockWorker, config), engines(OurWorker, config)
    before = ours.places()
    for step in range(4):
        tensors = models.checkpoint(config, seed=step)
        stock.update(iter(tensors.items()))
        ours.update(iter(tensors.items()))
        assert_equal(ours, stock)
        if step == 0:
            assert ours.worker.hr_receipt() is None, "the first one takes the stock path and teaches the names"
        else:
            receipt = ours.worker.hr_receipt()
            assert receipt["proven"] and receipt["tensors"] == len(tensors)
            assert receipt["version"].endswith(f"/{step}")
    assert ours.worker.hr_engine_side().model.discards(), "verl has it give its weights up before every update"
    ways = ours.worker.hr_status()["ways"]
    assert ways == {"direct": len(models.entries_of(config)), "leased": 0, "dropped": 0}
    assert ours.places() == before
    assert len(ours.worker.hr_fingerprint()) == len(models.entries_of(config))


class Trainer:
    """Our checkpoint engine on both of verl's sides, in front of an engine's worker."""

    def __init__(self) -> None:
        self.actor = HeadraceCheckpointEngine(bucket_size=1 << 20, is_master=True, wait_s=WAIT_S)
        self.rollout = HeadraceCheckpointEngine(bucket_size=1 << 20, wait_s=WAIT_S)

    def update(self, engine: Engine, tensors: dict[str, torch.Tensor]) -> dict:
        topology = HeadraceCheckpointEngine.build_topology(1, 1, [self.actor.prepare(), self.rollout.prepare()])
        for side, kwargs in zip((self.actor, self.rollout), topology, strict=True):
            side.init_process_group(**{name: values[0] for name, values in kwargs.items()})
        sending = start(lambda: asyncio.run(self.actor.send_weights(iter(tensors.items()))))
        engine.update(self.rollout.receive_weights(global_steps=1))
        return sending.result(WAIT_S)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.actor._drop_sender()


def test_disaggregated_updates_go_straight_into_the_engine(engines: Any, trainer: Trainer) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    before = ours.places()
    for step in range(3):
        tensors = models.checkpoint(models.LLAMA, seed=step)
        stock.update(iter(tensors.items()))
        metrics = trainer.update(ours, tensors)
        assert metrics["headrace/direct"] == 1 and metrics["headrace/applied_bytes"] > 0
        assert_equal(ours, stock)
        status = ours.worker.hr_status()
        assert status["engine"] == "replica-3" and status["updates"] == step + 1 and status["serving"]
        assert status["ways"] == {"direct": len(tensors), "leased": 0, "dropped": 0}
    assert ours.places() == before


@pytest.mark.parametrize("why", ["the model is quantised", "host memory only"])
def test_disaggregated_updates_of_an_engine_on_the_stock_path_go_through_verls_wire(
    why: str, engines: Any, trainer: Trainer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    monkeypatch.setattr(HeadraceWorkerExtension, "hr_stock_reason", lambda *_: why)
    with caplog.at_level(logging.WARNING, logger="headrace.integration.verl.backend"):
        for step in range(2):
            tensors = models.checkpoint(models.LLAMA, seed=step)
            stock.update(iter(tensors.items()))
            assert trainer.update(ours, tensors)["headrace/direct"] == 0
            assert_equal(ours, stock)
    said = [record.getMessage() for record in caplog.records if record.name == "headrace.integration.verl.backend"]
    assert len(said) == 1 and why in said[0]


def test_the_switch_takes_one_disaggregated_update_through_verls_wire(engines: Any, trainer: Trainer) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    ways = []
    for step in range(3):
        if step == 1:
            ours.worker.hr_use_stock()
        tensors = models.checkpoint(models.LLAMA, seed=step)
        stock.update(iter(tensors.items()))
        ways.append(trainer.update(ours, tensors)["headrace/direct"])
        assert_equal(ours, stock)
    assert ways == [1, 0, 1]


def test_what_only_vllms_loader_can_make_goes_through_it_in_the_same_update(engines: Any, trainer: Trainer) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    for engine in (stock, ours):
        projection = engine.loaded.model.model.layers[0].mlp.down_proj.weight
        original = projection.weight_loader
        projection._weight_loader = lambda param, tensor, *args, original=original: original(param, tensor.flip(0), *args)
    for step in range(2):
        tensors = models.checkpoint(models.LLAMA, seed=step)
        stock.update(iter(tensors.items()))
        assert trainer.update(ours, tensors)["headrace/direct"] == 1
        assert_equal(ours, stock)
    assert ours.worker.hr_status()["ways"] == {"direct": len(tensors) - 1, "leased": 1, "dropped": 0}


@pytest.mark.parametrize("way", ["colocated", "disaggregated"])
def test_a_model_that_cannot_be_bound_takes_the_stock_path_by_name(way: str, engines: Any, trainer: Trainer) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    for engine in (stock, ours):
        # Post-processing that must not run twice: what it leaves after an update cannot be made again.
        engine.loaded.model.turned = torch.zeros(1)
        engine.loaded.model.process_weights_after_loading = lambda model=engine.loaded.model: model.turned.add_(1)
    for step in range(3):
        tensors = models.checkpoint(models.LLAMA, seed=step)
        stock.update(iter(tensors.items()))
        if way == "colocated":
            ours.update(iter(tensors.items()))
        else:
            assert trainer.update(ours, tensors)["headrace/direct"] == 0
        mine, theirs = dict(ours.loaded.model.named_parameters()), dict(stock.loaded.model.named_parameters())
        assert [name for name in theirs if not same_bytes(theirs[name], mine[name])] == []
    assert "turned" in ours.worker.hr_unbound and ours.worker.hr_status() is None


REASONS = {
    "asked for in additional_config": ({"stock": True}, {}, "additional_config asks for it"),
    "LoRA": ({}, {"peft_config": {"r": 8}, "base_sync_done": False}, "LoRA"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_is_not_ours_takes_verls_stock_path_and_the_log_says_so_once(
    case: str, engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options, kwargs, words = REASONS[case]
    stock, ours = engines(StockWorker), engines(OurWorker, **options)
    with caplog.at_level(logging.WARNING, logger="headrace.integration.verl.extension"):
        for step in range(2):
            tensors = models.checkpoint(models.LLAMA, seed=step)
            stock.update(iter(tensors.items()), **kwargs)
            ours.update(iter(tensors.items()), **kwargs)
            assert_equal(ours, stock)
    said = [record.getMessage() for record in caplog.records if "stock path" in record.getMessage()]
    assert len(said) == 1 and words in said[0]
    assert ours.worker.hr_receipt() is None


def test_a_switch_takes_the_stock_path_for_one_update(engines: Any) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    for step in range(4):
        tensors = models.checkpoint(models.LLAMA, seed=step)
        if step == 2:
            ours.worker.hr_use_stock()
        stock.update(iter(tensors.items()))
        ours.update(iter(tensors.items()))
        assert_equal(ours, stock)
    assert ours.worker.hr_receipt()["version"].endswith("/2"), "updates 1 and 3 were ours"


@pytest.mark.parametrize("flag", ["_is_qat_model", "_is_modelopt_qat"])
def test_quantised_models_and_other_devices_are_left_to_verl(flag: str, engines: Any) -> None:
    ours = engines(OurWorker)
    setattr(ours.worker, flag, True)
    assert ours.worker.hr_stock_reason(None, True) == "the model is quantised"
    setattr(ours.worker, flag, False)
    assert ours.worker.hr_stock_reason(None, True) == ""
    assert "host memory only" in ours.worker.hr_stock_reason(None, False)
    ours.worker.device = torch.device("cuda:0")
    assert "weights are on cuda:0" in ours.worker.hr_stock_reason(None, True)
    ours.worker.device = torch.device("cpu")


def test_a_failed_update_is_healed_by_the_next(engines: Any) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    first = models.checkpoint(models.LLAMA, seed=0)
    ours.update(iter(first.items()))
    short = models.checkpoint(models.LLAMA, seed=1)
    del short["model.norm.weight"]
    with pytest.raises(headrace.Error, match=r"model\.norm\.weight"):
        ours.update(iter(short.items()))
    assert not ours.worker.hr_status()["serving"]
    tensors = models.checkpoint(models.LLAMA, seed=2)
    stock.update(iter(tensors.items()))
    ours.update(iter(tensors.items()))
    assert_equal(ours, stock)
    assert ours.worker.hr_status()["serving"]


def test_the_versions_are_those_that_it_was_written_for() -> None:
    assert (metadata.version("verl"), metadata.version("vllm")) == ("0.9.1", "0.33.0")
