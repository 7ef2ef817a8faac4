"""What the program draws, read as XML by somebody else."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import xml.etree.ElementTree as tree

import headrace
import numpy as np
import pytest
from headrace import _core

SVG = "{http://www.w3.org/2000/svg}"
W = {"w": np.arange(4, dtype=np.float32)}
PHASES = ("manifest", "transfer", "prepare", "commit")


def run_plot(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "headrace", "plot", *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )


def texts(picture: str) -> list[str]:
    return [element.text for element in tree.fromstring(picture).iter(SVG + "text")]


def lanes(picture: str) -> list[list[tuple[float, float, str]]]:
    """Of each line of a timeline, from above: where a box begins, how wide it is, what it says."""
    by_height: dict[float, list] = {}
    for box in tree.fromstring(picture).iter(SVG + "rect"):
        if (title := box.find(SVG + "title")) is not None:
            by_height.setdefault(float(box.get("y")), []).append((float(box.get("x")), float(box.get("width")), title.text))
    return [by_height[y] for y in sorted(by_height)]


@pytest.fixture
def report(job):
    with headrace.Receiver(headrace.StorageTable.from_tensors({"w": np.zeros(4, np.float32)}), job=job, engine="a-b"):
        with headrace.Sender.connect(job=job, bucket_bytes=1 << 16) as sender:
            return sender.send("run/1", W)


def plan(senders: dict[str, list[int]]) -> dict:
    read = [sum(shares) for shares in zip(*senders.values(), strict=True)]
    return {
        "schema": "headrace.plan/1",
        "family": "dense",
        "layout": "tp2",
        "tensors": 3,
        "wire_bytes": max(read),
        "senders": [{"name": name, "wire_bytes": shares} for name, shares in senders.items()],
        "ranks": [{"rank": rank, "wire_bytes": count, "tensors": 3} for rank, count in enumerate(read)],
    }


def test_reports_and_receipts_draw_their_phases_to_scale(report):
    assert {"run/1, shm", "sender", "a-b rank 0", *PHASES} <= set(texts(report._repr_svg_()))
    receipt = report.receipts[0]
    drawn = receipt._repr_svg_()
    assert "a-b rank 0" in texts(drawn)
    (lane,) = lanes(drawn)
    took = {name: getattr(receipt.phases_ms, name) for name in PHASES}
    assert [hint.split(":")[0] for _, _, hint in lane] == [name for name in PHASES if took[name] > 0]
    whole = sum(width for _, width, _ in lane)
    for (x, width, hint), (following, _, _) in zip(lane, [*lane[1:], (lane[0][0] + whole, 0, "")], strict=True):
        assert width / whole == pytest.approx(took[hint.split(":")[0]] / sum(took.values()), abs=0.001)
        assert x + width == pytest.approx(following, abs=0.002), "one phase begins where the other ends"


def test_the_verb_draws_what_the_program_and_the_package_write(report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(dataclasses.asdict(report)))
    ran = run_plot(str(tmp_path / "report.json"), str(tmp_path / "out.svg"))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert (tmp_path / "out.svg").read_text() == report._repr_svg_()
    ran = run_plot("-", input=json.dumps({"schema": "headrace.push/1", "report": dataclasses.asdict(report), "ok": True}))
    assert ran.stdout == report._repr_svg_()


def test_a_plans_bands_are_as_wide_as_their_bytes_at_both_ends():
    ran = run_plot("-", input=json.dumps(plan({"a": [600_000, 500_000], "b": [400_000, 0], "c": [0, 0]})))
    assert ran.returncode == 0, ran.stderr
    assert {"a", "b", "c", "rank 0: 1.00 MB, 3 tensors", "rank 1: 500 kB, 3 tensors"} <= set(texts(ran.stdout))
    root = tree.fromstring(ran.stdout)
    bands = {path.find(SVG + "title").text: float(path.get("stroke-width")) for path in root.iter(SVG + "path")}
    assert list(bands) == ["a to rank 0: 600 kB", "a to rank 1: 500 kB", "b to rank 0: 400 kB"]
    bars = [float(box.get("height")) for box in root.iter(SVG + "rect") if float(box.get("width")) == 12]
    a0, a1, b0 = bands.values()
    assert bars == pytest.approx([a0 + a1, b0, 0, a0 + b0, a1], abs=0.002)
    assert (a0 / a1, a0 / b0) == (pytest.approx(1.2, abs=0.01), pytest.approx(1.5, abs=0.01))


def test_a_plan_of_the_program_can_be_drawn(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    program = [sys.executable, "-m", "headrace"]
    planned = subprocess.run([*program, "plan", str(tmp_path), "--json", "-"], capture_output=True, text=True, timeout=60, check=True)
    ran = run_plot("-", input=planned.stdout)
    assert ran.returncode == 0, ran.stderr
    assert {"dense tp1: 1 tensors, 16 B on the wire", "sender", "rank 0: 16 B, 1 tensors"} <= set(texts(ran.stdout))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "not json",
        '{"report": 3}',
        '{"receipts": [{}], "phases_ms": {}}',
        "",
        "[" * 100_000,
        '{"a": "\\ud800"}',
        '"' + "x" * (65 << 20),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_document_is_refused_with_a_sentence(text):
    ran = run_plot("-", input=text)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith("headrace: invalid_argument: ") and len(ran.stderr) < 300


def test_what_cannot_be_read_or_written_is_refused(tmp_path, report):
    assert run_plot(str(tmp_path / "none.json")).returncode in (3, 4)
    ran = run_plot("-", str(tmp_path / "none" / "out.svg"), input=json.dumps(dataclasses.asdict(report)))
    assert ran.returncode in (3, 4) and "out.svg" in ran.stderr


def test_wrong_command_lines_show_the_usage():
    assert run_plot().returncode == 2
    assert run_plot("a", "b", "c").returncode == 2
    assert run_plot("--help").returncode == 0


def test_names_cannot_break_the_picture(report):
    evil = '</text><script>&"\x01\ufffe'
    shown = '</text><script>&"\ufffd\ufffd'
    renamed = dataclasses.replace(report.receipts[0], engine=evil, version=evil)
    assert f"{shown} rank 0" in texts(renamed._repr_svg_())
    names = {**plan({evil: [1]}), "family": evil}
    assert {shown, f"{shown} tp2: 3 tensors, 1 B on the wire"} <= set(texts(_core.draw(json.dumps(names))))
    with pytest.raises(headrace.InvalidArgument, match="senders: expected at least one"):
        _core.draw(json.dumps({**names, "senders": []}))
