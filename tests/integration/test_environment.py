"""The packages that the adapters are tested with are the released ones, in the versions that the adapters know."""

from importlib import metadata
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "integration" / "requirements.txt"
PINNED = dict(line.split(" ")[0].split("==") for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#"))


def test_every_package_is_installed_in_its_pinned_version() -> None:
    installed = {name: metadata.version(name) for name in PINNED}
    assert installed == PINNED


@pytest.mark.parametrize(
    ("package", "version"),
    [("vllm", "0.33.0"), ("verl", "0.9.1"), ("checkpoint-engine", "0.4.2"), ("sglang", "0.5.23"), ("torch", "2.14.0")],
)
def test_the_adapters_know_these_releases(package: str, version: str) -> None:
    assert PINNED[package] == version


def test_every_package_comes_with_its_hash() -> None:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if "--hash=sha256:" not in line] == []
