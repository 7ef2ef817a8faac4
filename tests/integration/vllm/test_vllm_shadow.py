"""The shadow: what is done to watched tensors is done to a copy, and seen."""

from __future__ import annotations

import pytest
import torch
from headrace.integration.vllm.shadow import Shadow, Written, in_layers, random_tensor, same_bytes


@pytest.fixture
def watched() -> dict[str, torch.Tensor]:
    memory = torch.arange(32, dtype=torch.float32)
    return {"low": memory[:16].view(4, 4), "high": memory[16:].view(4, 4).t(), "other": torch.zeros(8)}


def test_live_memory_stays_and_the_copy_has_what_was_written(watched: dict[str, torch.Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in watched.items()}
    shadow = Shadow(watched)
    source = shadow.source("s", torch.full((2, 4), 7.0))
    with shadow:
        watched["low"].data[1:3].copy_(source)
        watched["other"].zero_().add_(1)
        assert bool((watched["low"][1:3] + 0 == 7).all()), "what is read inside is the copy"
    assert {name: same_bytes(tensor, before[name]) for name, tensor in watched.items()} == dict.fromkeys(watched, True)
    expected = before["low"].clone()
    expected[1:3] = 7
    assert same_bytes(shadow.shadow_of("low"), expected)
    assert shadow.shadow_of("high").stride() == watched["high"].stride()
    assert bool((shadow.shadow_of("other") == 1).all())
    assert shadow.written["low"] == Written(sources={"s": None})
    assert "high" not in shadow.written


@pytest.mark.parametrize(
    "way",
    [
        lambda low, s: low.copy_(s.t()),
        lambda low, s: low.copy_(s.to(torch.float64).contiguous()),
        lambda low, s: low.view(-1).index_copy_(0, torch.arange(16), s.reshape(-1)),
        lambda low, s: low[:].copy_(torch.cat([s[:2], s[2:]])),
        lambda low, s: low.add_(torch.empty(4, 4).copy_(s)),
        lambda low, s: torch.mul(s, 2, out=low),
    ],
)
def test_a_source_is_followed_through_views_copies_and_computations(way, watched: dict[str, torch.Tensor]) -> None:
    shadow = Shadow(watched)
    source = shadow.source("s", torch.rand(4, 4))
    with shadow:
        way(watched["low"], source)
    assert list(shadow.written) == ["low"]
    assert list(shadow.written["low"].sources) == ["s"]


def test_what_is_computed_from_watched_tensors_shows_as_derived(watched: dict[str, torch.Tensor]) -> None:
    shadow = Shadow(watched)
    with shadow:
        watched["other"].copy_(watched["low"].sum(0).repeat(2))
    assert shadow.written == {"other": Written(derived=True)}


def test_a_value_that_went_through_a_python_number_shows_as_unknown(watched: dict[str, torch.Tensor]) -> None:
    shadow = Shadow(watched)
    source = shadow.source("s", torch.ones(1))
    with shadow:
        watched["other"].fill_(float(source))
    assert shadow.written == {"other": Written(unknown=True)}


def test_names_come_layer_by_layer() -> None:
    names = ["embed.weight", "layers.0.a", "layers.1.a", "layers.0.experts.3.w1", "norm.weight", "mtp.0.a"]
    assert list(in_layers(names)) == [["embed.weight", "norm.weight"], ["layers.0.a", "layers.0.experts.3.w1"], ["layers.1.a"], ["mtp.0.a"]]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.bool]
)
def test_random_tensors_are_finite_and_alike_for_a_seed(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, (64, 32), 3)
    assert same_bytes(tensor, random_tensor(dtype, (64, 32), 3))
    assert not same_bytes(tensor, random_tensor(dtype, (64, 32), 4))
    assert bool(torch.isfinite(tensor.float()).all())
