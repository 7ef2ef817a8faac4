"""Sessions of the drafter through vLLM's own worker methods: EAGLE beside a target that is updated by another trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import headrace
import pytest
import torch
import vllm_models as models
from headrace.integration.vllm.binding import Binder, Brought, Member, bind_together, family_layouts
from headrace.integration.vllm.engine import drafter_part
from headrace.integration.vllm.gate import guard_of
from headrace.integration.vllm.parts import Part, table_of
from headrace.integration.vllm.shadow import random_tensor, same_bytes
from headrace.integration.vllm.trainer import HeadraceTrainerInitInfo
from test_vllm_engine import Client, ListedSource, addresses, worker_of
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.v1.worker.gpu_worker import Worker

_jobs = itertools.count()


class DraftingClient(Client):
    def start_draft_weight_update(self) -> None:
        self._call("start_draft_weight_update")


class Engine:
    """A worker with a target and a drafter, and a trainer for each that is asked for."""

    def __init__(self, *, share: bool = True) -> None:
        self.target, self.drafter = models.load_with_drafter(models.LLAMA, models.EAGLE, share=share)
        self.worker = worker_of(self.target)
        self.worker.speculative_config = self.target.vllm_config.speculative_config
        self.worker.model_runner.get_draft_model = lambda: self.drafter.model
        self.client = DraftingClient(self.worker)
        self.job = f"draft-{next(_jobs)}-{id(self)}"
        self.trainers: list[Any] = []

    def trainer(self, model: str, tensors: dict[str, torch.Tensor], **info: Any) -> Any:
        made = WeightTransferTrainerFactory.trainer_init(
            HeadraceTrainerInitInfo(job=self.job, rank=0, model=model, **info), client=self.client, source=ListedSource(dict(tensors))
        )
        self.trainers.append(made)
        return made

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.shutdown()
        self.worker._weight_update_active = False
        self.worker.shutdown_weight_transfer_engine()


def send(trainer: Any, tensors: dict[str, torch.Tensor]) -> None:
    trainer.source.tensors.update(tensors)
    trainer.send_weights()


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**kwargs: Any) -> Engine:
        made.append(Engine(**kwargs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def assert_equal(ours: Engine, stock: Engine) -> None:
    for mine, theirs in ((ours.target, stock.target), (ours.drafter, stock.drafter)):
        held, expected = models.state(mine.model), models.state(theirs.model)
        assert held.keys() == expected.keys()
        assert [name for name in expected if not same_bytes(held[name], expected[name])] == []


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_three_updates_of_either_model_leave_what_stock_loads_leave(share: bool, engines: Callable[..., Engine]) -> None:
    stock, ours = engines(share=share), engines(share=share)
    assert Worker.supports_draft_weight_updates(ours.worker)
    whole, drafted = models.checkpoint(models.LLAMA, 0), models.eagle_checkpoint(0)
    if share:
        assert ours.drafter.model.model.embed_tokens is ours.target.model.model.embed_tokens
        del drafted["embed_tokens.weight"]
    trainer, drafting = ours.trainer("target", whole), ours.trainer("draft", drafted)
    before = addresses(ours.target.model), addresses(ours.drafter.model)
    for step in (1, 2, 3):
        tensors = models.checkpoint(models.LLAMA, step)
        draft = {name: tensor for name, tensor in models.eagle_checkpoint(step).items() if name in drafted}
        models.stock_load(stock.target, tensors)
        models.stock_load(stock.drafter, draft)
        send(trainer, tensors)
        send(drafting, draft)
        assert_equal(ours, stock)
        assert trainer.report.proven and drafting.report.proven
        assert ours.worker.weight_transfer_engine.model is ours.target.model
    assert (addresses(ours.target.model), addresses(ours.drafter.model)) == before
    assert ours.worker.hr_receipt()["tensors"] == {"direct": len(whole), "leased": 0, "dropped": 0}
    receipt = ours.worker.hr_receipt("draft")
    assert receipt["tensors"] == {"direct": len(drafted), "leased": 0, "dropped": 0}
    assert (receipt["engine"], receipt["version"], receipt["updates"]) == ("vllm-draft", f"{drafting.run}/3", 3)
    assert set(ours.worker.hr_fingerprint("draft")) == set(drafted)
    assert ours.worker.lora_resets == 3, "vLLM resets adapters after updates of the target only"


def test_what_the_drafter_shares_with_the_target_is_the_targets_to_write(engines: Callable[..., Engine]) -> None:
    ours = engines()
    trainer, drafting = ours.trainer("target", models.checkpoint(models.LLAMA, 0)), ours.trainer("draft", models.eagle_checkpoint(0))
    tensors = models.checkpoint(models.LLAMA, 1)
    send(trainer, tensors)
    fingerprints = ours.worker.hr_fingerprint()
    send(drafting, models.eagle_checkpoint(1))
    assert drafting.report.ignored_names == ("embed_tokens.weight",)
    assert ours.worker.hr_bind("draft")["shared"] == ["embed_tokens.weight"]
    assert same_bytes(ours.target.model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    assert ours.worker.hr_fingerprint() == fingerprints
    changed = random_tensor(torch.bfloat16, tensors["model.embed_tokens.weight"].shape, 99)
    send(trainer, {"model.embed_tokens.weight": changed})
    assert same_bytes(ours.drafter.model.model.embed_tokens.weight, changed)


def test_a_loader_that_would_also_write_what_is_shared_is_refused_by_name(engines: Callable[..., Engine]) -> None:
    ours = engines()
    weight = ours.drafter.model.model.fc.weight
    shared = ours.target.model.model.embed_tokens.weight
    before = shared.detach().clone()

    def spreading(param: torch.Tensor, tensor: torch.Tensor) -> None:
        param.data.copy_(tensor.flip(0))
        shared.data[0].copy_(tensor[0, : shared.shape[1]])

    weight.weight_loader = weight._weight_loader = spreading
    drafting = ours.trainer("draft", models.eagle_checkpoint(0))
    with pytest.raises(headrace.Unsupported, match=r"model\.fc\.weight.*embed_tokens"):
        drafting.send_weights()
    assert same_bytes(shared, before)
    assert not ours.worker._weight_update_active


def test_a_failed_draft_session_is_followed_by_an_abort_and_both_models_go_on(engines: Callable[..., Engine]) -> None:
    ours = engines()
    trainer, drafting = ours.trainer("target", models.checkpoint(models.LLAMA, 0)), ours.trainer("draft", models.eagle_checkpoint(0))
    ours.client.before["finish_weight_update"] = lambda: setattr(ours.worker.weight_transfer_engine.draft, "_awaited", "other/9")
    with pytest.raises(headrace.FailedPrecondition, match="finish without a committed update"):
        drafting.send_weights()
    assert ours.client.calls[-2:] == ["finish_weight_update", "update_weights"]
    assert not ours.worker._weight_update_active
    ours.client.before.clear()
    trainer.send_weights()
    drafting.send_weights()
    assert (ours.worker.hr_status()["version"], ours.worker.hr_status("draft")["version"]) == (f"{trainer.run}/1", f"{drafting.run}/2")


def test_a_finish_of_the_draft_that_failed_may_be_called_again_and_a_start_beside_it_not(engines: Callable[..., Engine]) -> None:
    ours = engines()
    drafting = ours.trainer("draft", models.eagle_checkpoint(0))
    ours.worker.start_draft_weight_update()
    for _ in range(2):
        with pytest.raises(headrace.FailedPrecondition, match="finish without"):
            ours.worker.finish_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        ours.worker.start_weight_update()
    with pytest.raises(headrace.Cancelled, match="because"):
        ours.worker.update_weights({"kind": "abort", "reason": "because"})
    assert not ours.worker._weight_update_active
    drafting.send_weights()


def test_a_session_of_one_model_lets_no_update_of_the_other_in(engines: Callable[..., Engine]) -> None:
    ours = engines()
    trainer = ours.trainer("target", models.checkpoint(models.LLAMA, 0))
    ours.trainer("draft", models.eagle_checkpoint(0))
    ours.worker.start_draft_weight_update()
    with pytest.raises(headrace.Error, match="start_weight_update comes first"):
        headrace.Sender.connect(job=trainer.init_info.job).send("other/1", trainer.source.tensors)


def test_a_torn_drafter_shuts_its_own_guard_and_its_next_update_heals_it(engines: Callable[..., Engine]) -> None:
    ours = engines()
    weight = ours.drafter.model.model.fc.weight
    failing: list[bool] = []

    def picky(param: torch.Tensor, tensor: torch.Tensor) -> None:
        if failing:
            raise ValueError("the loader does not like it")
        param.data.copy_(tensor.flip(0))

    weight.weight_loader = weight._weight_loader = picky
    trainer, drafting = ours.trainer("target", models.checkpoint(models.LLAMA, 0)), ours.trainer("draft", models.eagle_checkpoint(0))
    trainer.send_weights()
    drafting.send_weights()
    assert list(ours.worker.hr_bind("draft")["leased"]) == ["model.fc.weight"]
    target, draft = guard_of(ours.job, "vllm"), guard_of(f"{ours.job}-draft", "vllm-draft")
    assert not target.shut() and not draft.shut()
    failing.append(True)
    with pytest.raises(headrace.Error, match="the loader does not like it"):
        drafting.send_weights()
    assert ours.worker.hr_status("draft")["state"] == "torn" and draft.shut()
    assert ours.worker.hr_status()["serving"] and not target.shut()
    info = drafting._worker_init_info()
    with pytest.raises(headrace.FailedPrecondition, match="this rank is torn"):
        ours.worker.init_weight_transfer_engine({**info, "threads": 2})
    failing.clear()
    drafting.send_weights()
    assert not draft.shut()


def test_a_drafter_that_moved_is_refused_by_name(engines: Callable[..., Engine]) -> None:
    ours = engines()
    drafting = ours.trainer("draft", models.eagle_checkpoint(0))
    drafting.send_weights()
    weight = ours.drafter.model.model.fc.weight
    weight.data = weight.data.clone()
    with pytest.raises(headrace.FailedPrecondition, match=r"model\.fc\.weight lies elsewhere"):
        drafting.send_weights()
    assert not ours.worker._weight_update_active


def test_a_trainer_of_the_drafter_that_comes_later_is_bound_when_its_first_session_begins(engines: Callable[..., Engine]) -> None:
    ours = engines()
    first = ours.trainer("draft", models.eagle_checkpoint(0))
    first.send_weights()
    less = {name: tensor for name, tensor in models.eagle_checkpoint(1).items() if name != "embed_tokens.weight"}
    second = ours.trainer("draft", less)
    assert ours.worker.hr_status("draft") == {"bound": False}
    second.send_weights()
    assert ours.worker.hr_status("draft")["version"] == f"{second.run}/1"
    assert ours.worker.hr_bind("draft")["shared"] == []
    assert second.report.proven and second.report.ignored_names == ()


def test_a_session_of_the_draft_before_its_trainer_came_is_refused(engines: Callable[..., Engine]) -> None:
    ours = engines()
    ours.trainer("target", models.checkpoint(models.LLAMA, 0))
    with pytest.raises(headrace.FailedPrecondition):
        ours.worker.start_draft_weight_update()
    assert not ours.worker._weight_update_active
    with pytest.raises(RuntimeError, match="no session of the drafter"):
        engines().worker.hr_status("draft")


def test_a_shutdown_lets_both_trainers_go_and_the_drafters_comes_anew(engines: Callable[..., Engine]) -> None:
    ours = engines()
    trainer, drafting = ours.trainer("target", models.checkpoint(models.LLAMA, 0)), ours.trainer("draft", models.eagle_checkpoint(0))
    trainer.send_weights()
    drafting.send_weights()
    trainer.shutdown()
    ours.worker.shutdown_weight_transfer_engine()
    with pytest.raises(headrace.FailedPrecondition, match="no trainer has come"):
        drafting.send_weights()
    assert not ours.worker._weight_update_active
    again = ours.trainer("draft", models.eagle_checkpoint(1))
    again.send_weights()
    assert again.report.proven and ours.worker.hr_status("draft")["version"] == f"{again.run}/1"


def test_a_client_that_cannot_aim_at_the_draft_is_refused_when_the_trainer_is_made(engines: Callable[..., Engine]) -> None:
    ours = engines()
    ours.client = Client(ours.worker)
    with pytest.raises(headrace.Unsupported, match="start_draft_weight_update"):
        ours.trainer("draft", models.eagle_checkpoint(0))
    with pytest.raises(headrace.InvalidArgument, match="no model 'vision'"):
        ours.trainer("vision", models.eagle_checkpoint(0))


def test_vllms_http_client_posts_to_the_route_that_its_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.integration.vllm.trainer import _start_draft_of
    from vllm.entrypoints.rl.online.api_router import router

    posted: list[str] = []
    monkeypatch.setattr(HTTPVLLMWeightSyncClient, "_post", lambda self, path, json=None: posted.append(path))
    _start_draft_of(HTTPVLLMWeightSyncClient("http://nowhere"))()
    assert f"/{posted[0]}" in {route.path for route in router.routes}


def test_experts_of_target_and_drafter_follow_a_map_of_each() -> None:
    config = models.DEEPSEEK_MOE_MTP
    stock, ours = (models.load_with_drafter(config, processed=False) for _ in range(2))
    tensors = models.mtp_checkpoint(1, config)
    brought = [Brought(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    target = Part(ours[0].model, ours[0].vllm_config.model_config, 1)
    parts = (target, drafter_part(ours[0].vllm_config, ours[1].model, ours[1].model_config))
    with set_current_vllm_config(ours[0].vllm_config):
        members = [
            Member(
                Binder(part.model, brought, processed=False),
                family_layouts(part.family_config(tensors, drafter=bool(part.prefix)), brought, dtype=torch.bfloat16),
                part.prefix,
            )
            for part in parts
        ]
        binding = bind_together(members)
    assert binding.refused == {} and binding.leased == []
    assert binding.counts() == {"direct": len(tensors) - 2, "leased": 0, "dropped": 2}
    table = table_of(parts, [spec.name for spec in binding.layout.storages])
    maps = [[0, 1, 2, 3], [0, 1, 2, 3]]
    hooks = headrace.Hooks(expert_map=lambda: maps)
    with headrace.Receiver(table, binding.layout, job=f"draft-experts-{next(_jobs)}", hooks=hooks) as receiver:
        with receiver.update("run/1") as update:
            update.load(tensors)
        for mine, theirs in zip(ours, stock, strict=True):
            models.stock_load(theirs, tensors, processed=False)
            held, expected = models.state(mine.model), models.state(theirs.model)
            assert [name for name in expected if not same_bytes(held[name], expected[name])] == []
        maps[:] = [[3, 2, 1, 0], [1, 0, 3, 2]]
        with receiver.update("run/2") as update:
            update.load(tensors)
    for part, layer, slots in zip(parts, (1, 2), maps, strict=True):
        down = next(t for name, t in part.tensors() if name.endswith("w2_weight"))
        for slot, expert in enumerate(slots):
            assert same_bytes(down[slot], tensors[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"])
