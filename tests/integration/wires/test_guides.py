"""The guides' code runs as it stands, and they name what exists."""

import importlib
import inspect
import re
import tempfile
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


def test_the_own_sender_guide_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (GUIDES / "own_sender.md").read_text(), re.S)
    assert len(blocks) == 3
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        names: dict = {}
        for block in blocks:
            exec(compile(block, "own_sender.md", "exec"), names)
    assert "run-1/3 True" in capsys.readouterr().out


@pytest.mark.parametrize("guide", ["verl_colocated.md", "verl_disaggregated.md", "checkpoint_engine.md", "own_sender.md"])
def test_what_a_guide_imports_exists(guide: str) -> None:
    text = (GUIDES / guide).read_text()
    for module, names in re.findall(r"from (headrace[\w.]*) import ([\w, ]+)", text):
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"{module}.{name}"
    for dotted in re.findall(r"(headrace\.integration\.[\w.]+)", text):
        package = Path(*dotted.split(".")[2:])
        folder = GUIDES.parents[1] / "integration"
        assert any((folder / p).with_suffix(".py").exists() or (folder / p).is_dir() for p in (package, package.parent)), dotted


def test_the_disaggregated_guide_shows_every_option_with_its_default() -> None:
    import verl_cpu_platform  # noqa: F401
    from headrace.integration.verl.backend import HeadraceCheckpointEngine

    text = (GUIDES / "verl_disaggregated.md").read_text()
    shown = dict(re.findall(r"(\w+):([\w.]+)", re.search(r"engine_kwargs\.headrace=\{(.*?)\}", text)[1]))
    parameters = inspect.signature(HeadraceCheckpointEngine.__init__).parameters
    options = {name: p.default for name, p in parameters.items() if name not in ("self", "bucket_size", "is_master")}
    assert {
        name: type(default)(value) if not isinstance(default, bool) else value == "true"
        for (name, default), value in zip(options.items(), (shown[name] for name in options), strict=True)
    } == options
    assert all(f"`{name}`" in text for name in options)
