from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as tree

import headrace
import numpy as np
import pytest
from headrace import plot

SVG = "{http://www.w3.org/2000/svg}"
W = {"w": np.arange(4, dtype=np.float32)}


def run_plot(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "headrace", "plot", *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )


def texts(picture: str) -> list[str]:
    return [element.text for element in tree.fromstring(picture).iter(SVG + "text")]


@pytest.fixture
def report(job):
    with headrace.Receiver(headrace.StorageTable.from_tensors({"w": np.zeros(4, np.float32)}), job=job, engine="a-b"):
        with headrace.Sender.connect(job=job, bucket_bytes=1 << 16) as sender:
            return sender.send("run/1", W)


def test_reports_and_receipts_draw_their_phases_to_scale(report):
    drawn = texts(report._repr_svg_())
    assert {"run/1, shm", "sender", "a-b rank 0", "manifest", "transfer", "prepare", "commit"} <= set(drawn)
    assert "a-b rank 0" in texts(report.receipts[0]._repr_svg_())
    phases = {"manifest": 1.0, "transfer": 2.0, "prepare": 0.0, "commit": 1.0}
    picture = plot.timeline([("one", phases, "")], "t")
    bars = [float(box.get("width")) for box in tree.fromstring(picture).iter(SVG + "rect") if box.find(SVG + "title") is not None]
    assert bars == [bars[0], 2 * bars[0], bars[0]]


def test_the_verb_draws_reports_and_plans(report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(plot.record(report)))
    assert run_plot(str(tmp_path / "report.json"), str(tmp_path / "out.svg")).returncode == 0
    assert "a-b rank 0" in texts((tmp_path / "out.svg").read_text())
    plan = {
        "schema": "headrace.plan/1",
        "family": "dense",
        "layout": "tp2",
        "tensors": 3,
        "wire_bytes": 1_500_000,
        "ranks": [{"rank": 0, "wire_bytes": 1_000_000, "tensors": 3}, {"rank": 1, "wire_bytes": 500_000, "tensors": 2}],
    }
    ran = run_plot("-", input=json.dumps(plan))
    assert ran.returncode == 0
    assert {"rank 0", "rank 1", "1 MB, 3 tensors", "500 kB, 2 tensors"} <= set(texts(ran.stdout))
    bands = [float(path.get("stroke-width")) for path in tree.fromstring(ran.stdout).iter(SVG + "path")]
    assert bands == [22, 11]


@pytest.mark.parametrize(("text", "code"), [("{}", 3), ("not json", 3), ('{"report": 3}', 3), ('{"receipts": [{}], "phases_ms": {}}', 3)])
def test_what_is_no_document_is_refused(text, code):
    ran = run_plot("-", input=text)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr.startswith("headrace: plot -: ")


def test_wrong_command_lines_show_the_usage():
    assert run_plot().returncode == 2
    assert run_plot("a", "b", "c").returncode == 2
    assert run_plot("--help").returncode == 0


def test_names_cannot_break_the_picture():
    phases = {"manifest": 1.0, "transfer": 0.0, "prepare": 0.0, "commit": 0.0}
    assert '<&"' in texts(plot.timeline([('<&"', phases, "")], '<&"'))
