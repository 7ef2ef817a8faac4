"""A drafter that verl keeps in step, written by the update that writes its target: vLLM's own DeepSeekMTP on the CPU."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import pytest
import test_verl_extension as base
import torch
import vllm_models as models
from headrace.integration.vllm.shadow import same_bytes
from test_verl_extension import OurWorker, StockWorker, Trainer, tidy, trainer  # noqa: F401
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP

LAYER = f"model.layers.{models.DEEPSEEK_MTP['num_hidden_layers']}."


class Engine(base.Engine):
    """With a drafter beside the model, as vLLM's runner holds it."""

    def __init__(self, kind: type, share: bool) -> None:
        self.loaded, self.drafter = models.load_with_drafter(models.DEEPSEEK_MTP, share=share)
        assert isinstance(self.drafter.model, DeepSeekMTP)
        self.loaded.vllm_config.additional_config = {"headrace": {"wait_s": base.WAIT_S}}
        self.loaded.vllm_config.model_config.enable_sleep_mode = True  # verl's default
        self.make_worker(kind)
        self.worker.model_runner.drafter = types.SimpleNamespace(model=self.drafter.model)
        assert self.worker._use_mtp_drafter_weight_sync()

    def places(self) -> dict[str, tuple]:
        return {
            f"{prefix}{name}": (tensor.data_ptr(), tensor.stride())
            for prefix, model in (("", self.loaded.model), ("draft.", self.drafter.model))
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(kind: type, share: bool = True) -> Engine:
        made.append(Engine(kind, share))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def assert_equal(ours: Engine, stock: Engine) -> None:
    for mine, theirs in ((ours.loaded, stock.loaded), (ours.drafter, stock.drafter)):
        held, expected = models.state(mine.model), models.state(theirs.model)
        assert held.keys() == expected.keys()
        assert [name for name in expected if not same_bytes(held[name], expected[name])] == []


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_colocated_updates_leave_both_models_as_verls_own_extension_leaves_them(share: bool, engines: Callable[..., Engine]) -> None:
    stock, ours = engines(StockWorker, share), engines(OurWorker, share)
    before = ours.places()
    for step in range(4):
        tensors = models.mtp_checkpoint(step)
        stock.update(iter(tensors.items()))
        ours.update(iter(tensors.items()))
        assert_equal(ours, stock)
    assert ours.places() == before
    assert not ours.worker.hr_engine_side().model.discards(), "verl keeps weights in its sleep where there is such a drafter"
    status, receipt = ours.worker.hr_status(), ours.worker.hr_receipt()
    aside = 2 if share else 0  # what would only be written to memory that the target's own tensors fill
    assert status["ways"] == {"direct": len(tensors) - aside, "leased": 0, "dropped": aside}
    assert receipt["proven"] and receipt["version"].endswith("/3") and receipt["tensors"] == len(tensors) - aside
    assert set(ours.worker.hr_fingerprint()) == set(tensors) - (
        {f"{LAYER}embed_tokens.weight", f"{LAYER}shared_head.head.weight"} if share else set()
    )


def test_a_tensor_that_both_models_take_is_written_to_both(engines: Callable[..., Engine]) -> None:
    ours = engines(OurWorker, False)
    tensors = models.mtp_checkpoint(0)
    ours.update(iter(tensors.items()))
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    del tensors[f"{LAYER}embed_tokens.weight"]
    ours.worker.hr_engine_side().learn(tuple((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()))
    ours.update(iter(tensors.items()))
    for loaded in (ours.loaded, ours.drafter):
        assert same_bytes(loaded.model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    layout = ours.worker.hr_engine_side().model._engine.binding.layout
    taken = next(tensor for tensor in layout.tensors if tensor.name == "model.embed_tokens.weight")
    assert taken.storages == ("model.embed_tokens.weight", "draft.model.embed_tokens.weight")


def test_disaggregated_updates_go_straight_into_both_models(engines: Callable[..., Engine], trainer: Trainer) -> None:  # noqa: F811
    stock, ours = engines(StockWorker), engines(OurWorker)
    before = ours.places()
    for step in range(3):
        tensors = models.mtp_checkpoint(step)
        stock.update(iter(tensors.items()))
        assert trainer.update(ours, tensors)["headrace/direct"] == 1
        assert_equal(ours, stock)
        status = ours.worker.hr_status()
        assert status["updates"] == step + 1 and status["serving"]
        assert status["ways"] == {"direct": len(tensors) - 2, "leased": 0, "dropped": 2}
    assert ours.places() == before


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_tensor_that_one_model_takes_in_its_own_way_goes_through_the_loaders_of_both(
    which: str,
    engines: Callable[..., Engine],
    trainer: Trainer,  # noqa: F811
) -> None:
    stock, ours = engines(StockWorker, False), engines(OurWorker, False)
    for engine in (stock, ours):
        weight = getattr(engine, "loaded" if which == "target" else "drafter").model.model.embed_tokens.weight
        original = weight.weight_loader
        weight.weight_loader = lambda param, tensor, original=original: original(param, tensor.flip(0))
    for step in range(3):
        tensors = models.mtp_checkpoint(step)
        del tensors[f"{LAYER}embed_tokens.weight"]
        stock.update(iter(tensors.items()))
        assert trainer.update(ours, tensors)["headrace/direct"] == 1
        assert_equal(ours, stock)
    assert ours.worker.hr_status()["ways"] == {"direct": len(tensors) - 1, "leased": 1, "dropped": 0}
    leased = ours.worker.hr_engine_side().model._engine.status()["leased"]
    assert set(leased) == {"model.embed_tokens.weight", "draft.model.embed_tokens.weight"}
    other = "draft.model.embed_tokens.weight" if which == "target" else "model.embed_tokens.weight"
    assert leased[other] == "another model leases a tensor that makes it"


def test_a_drafter_that_cannot_be_bound_leaves_both_models_to_the_stock_path_by_name(engines: Callable[..., Engine]) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    for engine in (stock, ours):
        engine.drafter.model.turned = torch.zeros(1)
        engine.drafter.model.process_weights_after_loading = lambda model=engine.drafter.model: model.turned.add_(1)
    for step in range(2):
        tensors = models.mtp_checkpoint(step)
        stock.update(iter(tensors.items()))
        ours.update(iter(tensors.items()))
        held, expected = (dict(engine.drafter.model.named_parameters()) for engine in (ours, stock))
        assert [name for name in expected if not same_bytes(held[name], expected[name])] == []
    assert "draft.turned" in ours.worker.hr_unbound and ours.worker.hr_status() is None


def test_a_failed_update_is_one_of_both_models_and_the_next_heals_them(engines: Callable[..., Engine]) -> None:
    stock, ours = engines(StockWorker), engines(OurWorker)
    ours.update(iter(models.mtp_checkpoint(0).items()))
    short = models.mtp_checkpoint(1)
    del short[f"{LAYER}eh_proj.weight"]
    with pytest.raises(Exception, match="eh_proj"):
        ours.update(iter(short.items()))
    assert not ours.worker.hr_status()["serving"]
    tensors = models.mtp_checkpoint(2)
    stock.update(iter(tensors.items()))
    ours.update(iter(tensors.items()))
    assert_equal(ours, stock)
    assert ours.worker.hr_status()["serving"]
