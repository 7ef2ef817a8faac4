"""Pictures of updates: a receipt or a report as a timeline, a plan as who sends how much to whom. SVG, standard library only.

`python -m headrace plot FILE` draws what `headrace push --json`, `headrace plan --json` or record() wrote; a notebook shows records by
itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_INK, _QUIET, _PAPER = "#1b1f24", "#57606a", "#ffffff"
_PHASES = (
    ("manifest", "#fff3d6", "#a8761a"),
    ("transfer", "#ddeeff", "#2f6fb0"),
    ("prepare", "#ddf4e0", "#2c8a46"),
    ("commit", "#ffe3e3", "#b23b3b"),
)
_WIDTH, _LEFT, _RIGHT, _ROW = 860, 190, 150, 30


def human_bytes(count: float) -> str:
    """Three digits and a unit of powers of ten."""
    unit = "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


class _Picture:
    def __init__(self, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{_escape(title)}</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="{_PAPER}"/>',
        ]
        self.text(16, 26, title, 15, _INK)

    def text(self, x: float, y: float, words: str, size: int = 12, colour: str = _QUIET, anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{_escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str, hint: str = "") -> None:
        title = f"<title>{_escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{fill}" stroke="{edge}" '
            f'stroke-width="0.8">{title}</rect>'
        )

    def band(self, x1: float, y1: float, x2: float, y2: float, width: float, hint: str) -> None:
        middle = (x1 + x2) / 2
        self.parts.append(
            f'<path d="M{x1:.1f} {y1:.1f} C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}" fill="none" stroke="#2f6fb0" '
            f'stroke-opacity="0.45" stroke-width="{max(width, 1):.1f}"><title>{_escape(hint)}</title></path>'
        )

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"])


def timeline(lanes: list[tuple[str, dict[str, float], str]], title: str) -> str:
    """lanes: (name, milliseconds of each phase, what stands at the end). Phases follow one another; all lanes begin at OPEN."""
    picture = _Picture(70 + _ROW * len(lanes) + 24, title)
    longest = max((sum(phases.values()) for _, phases, _ in lanes), default=0) or 1
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    x = float(_LEFT)
    for name, fill, edge in _PHASES:
        picture.box(x, 40, 12, 12, fill, edge)
        picture.text(x + 17, 50, name)
        x += 90
    for number, (lane, phases, end) in enumerate(lanes):
        y = 66 + _ROW * number
        picture.text(_LEFT - 12, y + 15, lane, colour=_INK, anchor="end")
        x = float(_LEFT)
        for name, fill, edge in _PHASES:
            width = phases[name] * scale
            if phases[name] > 0:
                picture.box(x, y, width, _ROW - 8, fill, edge, f"{name}: {phases[name]:.3g} ms")
            x += width
        picture.text(x + 8, y + 15, f"{sum(phases.values()):.3g} ms{', ' if end else ''}{end}")
    picture.text(_LEFT, 66 + _ROW * len(lanes) + 14, "0")
    picture.text(_WIDTH - _RIGHT, 66 + _ROW * len(lanes) + 14, f"{longest:.3g} ms", anchor="end")
    return picture.done()


def flows(senders: list[str], receivers: list[tuple[str, int, str]], title: str) -> str:
    """receivers: (name, bytes that it reads, what stands beside it). Bands are as wide as the bytes, divided over the senders."""
    rows = max(len(senders), len(receivers), 1)
    picture = _Picture(60 + 48 * rows, title)
    most = max((count for _, count, _ in receivers), default=0) or 1
    left, right = _LEFT + 20, _WIDTH - 330
    for s, sender in enumerate(senders):
        y = 48 + 48 * rows * (s + 0.5) / len(senders)
        picture.box(left - 150, y - 15, 150, 30, "#fff3d6", "#a8761a")
        picture.text(left - 75, y + 4, sender, colour=_INK, anchor="middle")
        for r, (receiver, count, _) in enumerate(receivers):
            to = 48 + 48 * rows * (r + 0.5) / len(receivers)
            picture.band(left, y, right, to, 22 * count / most / len(senders), f"to {receiver}: {human_bytes(count)}")
    for r, (receiver, count, beside) in enumerate(receivers):
        y = 48 + 48 * rows * (r + 0.5) / len(receivers)
        picture.box(right, y - 15, 150, 30, "#ddf4e0", "#2c8a46")
        picture.text(right + 75, y + 4, receiver, colour=_INK, anchor="middle")
        picture.text(right + 160, y + 4, f"{human_bytes(count)}{', ' if beside else ''}{beside}")
    return picture.done()


def record(value: Any) -> dict:
    """A Receipt or a Report as what json.dump() takes, under the names of its fields."""
    from dataclasses import asdict

    return asdict(value)


def _lane(receipt: dict) -> tuple[str, dict[str, float], str]:
    return f"{receipt['engine']} rank {receipt['rank']}", receipt["phases_ms"], f"{human_bytes(receipt['applied_bytes'])}"


def draw(document: dict) -> str:
    """The picture of a document: of `headrace push` or `headrace plan`, or a record."""
    if "report" in document:
        document = document["report"]
    if "ranks" in document and "wire_bytes" in document:
        receivers = [(f"rank {rank['rank']}", rank["wire_bytes"], f"{rank['tensors']} tensors") for rank in document["ranks"]]
        amount = f"{document['tensors']} tensors, {human_bytes(document['wire_bytes'])} on the wire"
        return flows(["sender"], receivers, f"{document['family']} {document['layout']}: {amount}")
    if "receipts" in document:
        lanes = [("sender", document["phases_ms"], f"{human_bytes(document['wire_bytes'])} on the wire"), *map(_lane, document["receipts"])]
        return timeline(lanes, f"{document['version']}, {document['data_path']}")
    if "phases_ms" in document:
        return timeline([_lane(document)], f"{document['version']}, {document['data_path']}")
    raise ValueError("expected the JSON of a push, a plan, a report or a receipt")


def main(arguments: list[str]) -> int:
    """plot FILE [OUT]: reads JSON (- is standard input), writes SVG. 2 for a wrong command line, 3 for an input that is none of ours."""
    if not 1 <= len(arguments) <= 2 or arguments[0] in ("-h", "--help"):
        print("usage: python -m headrace plot FILE|- [OUT.svg]", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        if arguments[0] == "-":
            document = json.load(sys.stdin)
        else:
            with open(arguments[0]) as file:
                document = json.load(file)
        picture = draw(document)
        if len(arguments) == 1:
            print(picture)
        else:
            with open(arguments[1], "w") as file:
                file.write(picture + "\n")
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"headrace: plot {arguments[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 3
    return 0
