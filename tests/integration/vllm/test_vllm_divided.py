"""Models that are divided over two ranks by tensor and expert parallelism: column, row, merged, qkv and vocabulary layers, fused experts,
with vLLM's loaders under its real process groups."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 2
SCRIPT = Path(__file__).with_name("vllm_rank.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(RANKS), str(meeting)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    answers = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, err[-4000:]
            answers.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return answers


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_parameter_of_a_rank_is_written_in_place_as_vllm_writes_it(ranks: list[dict[str, dict]], rank: int) -> None:
    assert len(ranks[rank]) == 11
    for case, found in ranks[rank].items():
        assert found["refused"] == {}, case
        assert found["not_direct"] == {}, case
        assert found["direct"] == found["parameters"] > 0, case
        assert found["different"] == [], case
