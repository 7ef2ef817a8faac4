from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys

import headrace
import pytest


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def test_importing_brings_in_neither_torch_nor_numpy():
    loaded = run_python("import sys, headrace; print([m for m in ('torch', 'numpy', 'ml_dtypes', 'asyncio') if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_module_runs_the_program():
    ran = subprocess.run([sys.executable, "-m", "headrace", "--help"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    for verb in ("serve", "push", "status", "doctor"):
        assert verb in ran.stdout
    assert subprocess.run([sys.executable, "-m", "headrace", "nonsense"], capture_output=True, timeout=60).returncode == 2


def test_every_public_name_has_a_docstring_and_types_are_installed():
    for name in headrace.__all__:
        assert name.startswith("__") or inspect.getdoc(getattr(headrace, name)), name
    folder = os.path.dirname(headrace.__file__)
    assert os.path.exists(os.path.join(folder, "py.typed"))
    with open(os.path.join(folder, "_core.pyi")) as stub:
        text = stub.read()
    for method in ("def from_tensors(", "def from_module(", "def build(", "def identity(", "def place(", "def with_groups("):
        assert method in text


def test_each_code_has_a_class_and_survives_pickling():
    kinds = [kind for kind in vars(headrace.errors).values() if isinstance(kind, type) and issubclass(kind, headrace.Error)]
    assert len(kinds) == 11
    error = headrace.Corruption("text", rank=3, phase="transfer", bucket=7, name="w", expected="a", actual="b")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is headrace.Corruption
    assert (again.code, again.message, again.rank, again.phase, again.bucket, again.name) == ("corruption", "text", 3, "transfer", 7, "w")
    with pytest.raises(TimeoutError):
        raise headrace.DeadlineExceeded("late")


def test_names_that_come_when_they_are_asked_for_are_there_like_all_others():
    code = (
        "import headrace, pickle; from headrace import *; Hooks(), Part; headrace.Receipt is Receipt or 1 / 0;"
        "print(set(headrace.__all__) - set(dir(headrace)), pickle.loads(pickle.dumps(headrace.Phases(1, 2, 3, 4))).commit)"
    )
    assert run_python(code).strip() == "set() 4"
    assert (
        run_python("import headrace; print(set(headrace.__all__) <= set(dir(headrace)), headrace.records.Receipt is headrace.Receipt)")
        == "True True\n"
    )
    with pytest.raises(AttributeError, match="has no attribute 'Recipe'"):
        headrace.Recipe  # noqa: B018


def test_importing_brings_nothing_along_that_takes_its_time():
    code = (
        "import sys, headrace; print(sorted({'asyncio', 'dataclasses', 'json', 'logging', 'numpy', 'torch', 'typing'} & set(sys.modules)))"
    )
    assert run_python(code).strip() == "[]"
