"""vLLM's scheduler behind the guard of its engine: nothing is scheduled while a rank is being written, torn or at another version."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headrace
import pytest
import torch
import vllm_models as models
from headrace.integration.vllm.gate import HeadraceAsyncScheduler, HeadraceScheduler, guard_of
from vllm.config import CacheConfig, SchedulerConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_jobs = itertools.count()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return f"gate-{next(_jobs)}"


@pytest.fixture
def receiver(job: str) -> Iterator[headrace.Receiver]:
    table = headrace.StorageTable.from_tensors({"a": torch.zeros(4), "b": torch.zeros(4)})
    with headrace.Receiver(table, job=job, engine="vllm") as receiver:
        yield receiver


BOTH = {"a": torch.ones(4), "b": torch.ones(4)}


def scheduler_of(job: str, cls: type, **where: Any) -> Scheduler:
    """vLLM's scheduler with a cache of 64 blocks, as its engine core makes it."""
    vllm_config = models.vllm_config_of(models.LLAMA)
    vllm_config.scheduler_config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        is_encoder_decoder=False,
        scheduler_cls=f"{cls.__module__}.{cls.__qualname__}",
    )
    vllm_config.cache_config = CacheConfig(block_size=16)
    vllm_config.cache_config.num_gpu_blocks = 64
    vllm_config.additional_config = {"headrace": {"job": job, **where}}
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    with set_current_vllm_config(vllm_config):
        found = vllm_config.scheduler_config.get_scheduler_cls()
        models.seen(Scheduler, found)
        assert found is cls
        return found(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=16,
            log_stats=False,
        )


def add_request(scheduler: Scheduler) -> None:
    parameters = SamplingParams(max_tokens=4)
    parameters.update_from_generation_config({}, 2)
    scheduler.add_request(
        Request(request_id=f"request-{next(_jobs)}", prompt_token_ids=list(range(8)), sampling_params=parameters, pooling_params=None)
    )


@pytest.mark.parametrize("cls", [HeadraceScheduler, HeadraceAsyncScheduler])
def test_nothing_is_scheduled_while_a_rank_is_written(cls: type, job: str, receiver: headrace.Receiver) -> None:
    scheduler = scheduler_of(job, cls)
    add_request(scheduler)
    with receiver.update("run/1") as update:
        update.load({"a": BOTH["a"]})
        assert scheduler.pause_state == PauseState.PAUSED_ALL
        assert scheduler.schedule().total_num_scheduled_tokens == 0
        assert not scheduler.has_unfinished_requests(), "the engine core would go on stepping"
        update.load({"b": BOTH["b"]})
    assert scheduler.pause_state == PauseState.UNPAUSED
    assert scheduler.has_unfinished_requests(), "a paused request was lost"
    assert scheduler.schedule().total_num_scheduled_tokens == 8


def test_a_torn_rank_keeps_the_scheduler_stopped_until_an_update_heals_it(job: str, receiver: headrace.Receiver) -> None:
    scheduler = scheduler_of(job, HeadraceScheduler)
    add_request(scheduler)
    with pytest.raises(ZeroDivisionError), receiver.update("run/1") as update:
        update.load({"a": BOTH["a"]})
        raise ZeroDivisionError
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    with receiver.update("run/2") as update:
        update.load(BOTH)
    assert scheduler.schedule().total_num_scheduled_tokens == 8


def test_before_the_first_update_vllm_serves_what_it_loaded(job: str) -> None:
    scheduler = scheduler_of(job, HeadraceScheduler)
    add_request(scheduler)
    assert scheduler.schedule().total_num_scheduled_tokens == 8


def test_a_receiver_that_waits_for_its_first_update_does_not_stop_it(job: str, receiver: headrace.Receiver) -> None:
    scheduler = scheduler_of(job, HeadraceScheduler)
    add_request(scheduler)
    assert scheduler.schedule().total_num_scheduled_tokens == 8


def test_what_vllm_itself_pauses_stays_paused(job: str, receiver: headrace.Receiver) -> None:
    scheduler = scheduler_of(job, HeadraceScheduler)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    with receiver.update("run/1") as update:
        update.load(BOTH)
    assert scheduler.pause_state == PauseState.PAUSED_NEW
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.pause_state == PauseState.UNPAUSED


def test_ranks_with_different_versions_are_shut(job: str) -> None:
    def rank(number: int) -> headrace.Receiver:
        table = headrace.StorageTable.from_tensors({"a": torch.zeros(4), "b": torch.zeros(4)})
        return headrace.Receiver(table, job=job, engine="vllm", rank=number, ranks=2)

    guard = guard_of(job, "vllm")
    with rank(0) as first, rank(1) as second:
        assert not guard.shut()
        with first.update("run/1") as update:
            update.load(BOTH)
        assert guard.shut()
        with second.update("run/1") as update:
            update.load(BOTH)
        assert not guard.shut()
        with second.update("run/2") as update:
            update.load(BOTH)
        assert guard.shut()


def test_what_an_engine_that_died_left_on_the_page_stops_nobody(job: str) -> None:
    table = headrace.StorageTable.from_tensors({"a": torch.zeros(4), "b": torch.zeros(4)})
    with headrace.Receiver(table, job=job, engine="vllm") as receiver:
        guard = guard_of(job, "vllm")
        page = guard.path.read_bytes()
        with pytest.raises(ZeroDivisionError), receiver.update("run/1") as update:
            update.load({"a": BOTH["a"]})
            raise ZeroDivisionError
        torn = guard.path.read_bytes()
        assert torn != page
    guard.path.parent.mkdir(mode=0o700, exist_ok=True)
    guard.path.write_bytes(torn)
    assert not guard_of(job, "vllm").shut()


def test_the_page_of_a_receiver_that_came_later_is_found(job: str) -> None:
    guard = guard_of(job, "vllm")
    for run in ("first", "second"):
        table = headrace.StorageTable.from_tensors({"a": torch.zeros(4), "b": torch.zeros(4)})
        with headrace.Receiver(table, job=job, engine="vllm") as receiver, receiver.update(f"{run}/1") as update:
            update.load({"a": BOTH["a"]})
            assert guard.shut()
            update.load({"b": BOTH["b"]})
        assert not guard.shut()
        guard.path.unlink(missing_ok=True)


@pytest.mark.parametrize("counts", [True, False])
def test_a_drafter_that_is_updated_alone_has_a_guard_that_may_count_too(counts: bool, job: str, receiver: headrace.Receiver) -> None:
    scheduler = scheduler_of(job, HeadraceScheduler, draft=counts)
    add_request(scheduler)
    table = headrace.StorageTable.from_tensors({"a": torch.zeros(4), "b": torch.zeros(4)})
    with headrace.Receiver(table, job=f"{job}-draft", engine="vllm-draft") as drafter:
        with drafter.update("draft/1") as update:
            update.load({"a": BOTH["a"]})
            assert scheduler.pause_state == (PauseState.PAUSED_ALL if counts else PauseState.UNPAUSED)
            update.load({"b": BOTH["b"]})
        assert scheduler.schedule().total_num_scheduled_tokens == 8


def test_the_job_must_be_named(job: str) -> None:
    with pytest.raises(ValueError, match="additional-config"):
        HeadraceScheduler(models.vllm_config_of(models.LLAMA))
