#!/usr/bin/env python3
"""Draws the pictures of the documents, SVG files beside this script. Standard library only.

    docs/pictures/make_pictures.py            writes them
    docs/pictures/make_pictures.py --check    says which differ from what it would write; ends with 1 if one does
"""

import pathlib
import sys
from xml.sax.saxutils import escape

INK = "#1b1f24"
QUIET = "#57606a"
LINE = "#8c959f"
PAPER = "#ffffff"
BLUE = "#ddeeff"
GREEN = "#ddf4e0"
SAND = "#fff3d6"
GREY = "#f0f2f4"
ROSE = "#ffe3e3"
STRONG = {BLUE: "#2f6fb0", GREEN: "#2c8a46", SAND: "#a8761a", GREY: "#8c959f", ROSE: "#b23b3b"}


class Picture:
    """An SVG of a fixed size, built up shape by shape."""

    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(self, x, y, width, height, fill, radius=6, dashed=False):
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" '
            f'stroke="{STRONG.get(fill, LINE)}" stroke-width="1.2"{dash}/>'
        )

    def cell(self, x, y, width, height, fill):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{STRONG.get(fill, LINE)}" stroke-width="0.8"/>'
        )

    def text(self, x, y, words, size=13, bold=False, colour=INK, anchor="start"):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(words)}</text>')

    def lines(self, x, y, rows, size=12, colour=QUIET, anchor="start", step=16):
        for number, row in enumerate(rows):
            self.text(x, y + number * step, row, size, colour=colour, anchor=anchor)

    def arrow(self, x1, y1, x2, y2, both=False, dashed=False, colour=INK, width=1.4):
        start = ' marker-start="url(#tip)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}" marker-end="url(#tip)"{start}{dash}/>'
        )

    def rule(self, x1, y1, x2, y2, dashed=True, colour=LINE):
        dash = ' stroke-dasharray="3 4"' if dashed else ""
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1"{dash}/>')

    def svg(self):
        return "\n".join(self.parts + ["</svg>", ""])


def overview():
    """Who talks to whom: the door's picture."""
    p = Picture(920, 430, "Two trainers write new weights into the ranks of one inference engine")
    p.text(130, 34, "trainers", 15, bold=True, anchor="middle")
    p.text(700, 34, "one inference engine", 15, bold=True, anchor="middle")
    p.box(520, 48, 380, 366, GREY)
    for number, (top, lead) in enumerate(((70, True), (232, False))):
        p.box(20, top, 220, 130, BLUE)
        p.text(36, top + 24, f"trainer-{number}" + (" (lead)" if lead else ""), 14, bold=True)
        rows = ["experts below 192", "and all other tensors"] if lead else ["experts from 192 on"]
        p.lines(36, top + 44, rows)
        p.box(36, top + 80, 188, 36, PAPER)
        p.text(130, top + 103, "Sender: plan, pack, sum", 12, anchor="middle")
    for rank in range(4):
        top = 62 + rank * 68
        p.box(536, top, 348, 58, GREEN)
        p.text(550, top + 23, f"rank {rank}", 14, bold=True)
        p.text(550, top + 43, "Receiver", 12, colour=QUIET)
        p.box(640, top + 10, 232, 38, PAPER)
        p.text(756, top + 34, "live weights, same addresses", 12, anchor="middle")
    p.box(536, 340, 348, 62, SAND)
    p.text(550, 363, "guard page", 14, bold=True)
    p.text(550, 386, "open only when all ranks hold the same proven version", 11.5, colour=QUIET)
    for start in (160, 280):
        for rank in range(4):
            p.arrow(240, start, 532, 91 + rank * 68, width=1.1)
    p.lines(256, 76, ["messages: ZeroMQ + msgpack", "(what, where, fingerprints)"])
    p.lines(256, 374, ["bytes: shared memory, read", "in place by every rank"])
    return p.svg()


def update():
    """One update as a sequence of messages."""
    p = Picture(920, 660, "One update, message by message")
    left, right = 190, 560
    p.box(left - 90, 16, 180, 34, BLUE)
    p.text(left, 38, "every sender", 14, bold=True, anchor="middle")
    p.box(right - 90, 16, 180, 34, GREEN)
    p.text(right, 38, "every receiver", 14, bold=True, anchor="middle")
    p.text(690, 38, "live weights", 14, bold=True)
    rows = [
        (">", "HELLO", None),
        ("<", "WELCOME", "data paths, table and map digests"),
        (">", "OPEN (lead only)", None),
        ("<", "OPENED", "engine quiet, storages in place"),
        (">", "MANIFEST", "names, dtypes, shapes, boxes"),
        ("<", "ACCEPT: what is wanted", "all parts resolved together"),
        (">", "CONFIRM", "every byte has a taker"),
        ("<", "BEGIN: credits", None),
        (">", "BUCKET 0, 1, 2 ...", "extents in shared memory"),
        ("<", "CONSUMED 0, 1, 2 ...", "placed; the buffer is free"),
        (">", "END: fingerprints", None),
        ("<", "PREPARED", "covered, read back, equal"),
        (">", "COMMIT (lead only)", None),
        ("<", "COMMITTED: receipt", "guard page published"),
    ]
    bands = [(0, 8, "old", GREEN), (8, 11, "being written", ROSE), (11, 13, "written and proven", SAND), (13, 14, "new", GREEN)]
    top, step = 84, 40
    for first, last, words, fill in bands:
        y = top + first * step - 28
        p.box(690, y + 2, 190, (last - first) * step - 4, fill)
        p.text(785, y + (last - first) * step / 2 + 5, words, 13, bold=True, anchor="middle")
    p.rule(left, 50, left, 640)
    p.rule(right, 50, right, 640)
    for number, (way, message, note) in enumerate(rows):
        y = top + number * step
        if way == ">":
            p.arrow(left + 4, y, right - 4, y)
        else:
            p.arrow(right - 4, y, left + 4, y)
        p.text((left + right) / 2, y - 6, message, 13, bold=True, anchor="middle")
        if note:
            p.text((left + right) / 2, y + 13, note, 11, colour=QUIET, anchor="middle")
    barrier = top + 8 * step - 28
    p.text(24, barrier - 6, "barrier", 12, bold=True, colour=STRONG[ROSE])
    p.rule(24, barrier, 900, barrier, colour=STRONG[ROSE])
    p.lines(24, barrier + 18, ["a failure above", "leaves the old", "version; below,", "the rank is torn"], size=11)
    return p.svg()


def rooms():
    """Which folder may include which."""
    p = Picture(920, 470, "The rooms of the repository and what each may include")

    def room(x, y, width, name, rows, fill):
        p.box(x, y, width, 74, fill)
        p.text(x + 12, y + 22, name, 14, bold=True)
        p.lines(x + 12, y + 42, rows, size=11.5)

    room(20, 20, 280, "examples, benchmarks", ["an engine, senders, guard reader, demo;", "the rows of ./run bench"], BLUE)
    room(320, 20, 280, "cli", ["the program headrace, a file per verb"], BLUE)
    room(620, 20, 280, "tests", ["a folder per room; the oracle, faults"], BLUE)
    room(20, 138, 430, "sender_sdk", ["plans buckets, packs and sums, speaks to all receivers"], GREEN)
    room(470, 138, 430, "receiver", ["table, index, plan, session, proof, guard page;", "models/: one file per family of models"], GREEN)
    room(20, 256, 880, "kernels", ["work on bytes: strided copies and their executor, element casts, fingerprints"], SAND)
    p.box(20, 362, 880, 92, GREY)
    p.text(32, 382, "core", 14, bold=True)
    for number, (name, what) in enumerate(
        (
            ("transport", "sockets, data paths"),
            ("wire", "messages, limits"),
            ("device", "memory, streams"),
            ("checkpoint", "safetensors"),
            ("base", "status, shapes, ids"),
        )
    ):
        x = 32 + number * 172
        p.box(x, 392, 164, 52, PAPER)
        p.text(x + 10, 413, name, 13, bold=True)
        p.text(x + 10, 432, what, 11.5, colour=QUIET)
    for x in (160, 460):
        p.arrow(x, 94, min(x, 430), 136)
    p.arrow(540, 94, 560, 136)
    p.arrow(760, 94, 760, 136)
    p.arrow(235, 212, 235, 254)
    p.arrow(840, 212, 840, 254)
    p.arrow(460, 330, 460, 360)
    p.lines(538, 238, ["sender_sdk and receiver never include each other: they meet in core/wire"], size=11.5, anchor="middle")
    return p.svg()


def placement():
    """One strided copy, drawn: rows of w1 and w3 interleaved by eight."""
    p = Picture(920, 392, "A placement is a strided copy: w1 and w3 of one expert alternate by eight rows")
    p.text(120, 32, "checkpoint tensors", 14, bold=True, anchor="middle")
    p.text(470, 32, "live storage, one slot", 14, bold=True, anchor="middle")
    block = 28
    for tensor, (top, name, fill) in enumerate(((48, "w1", BLUE), (212, "w3", GREEN))):
        p.text(24, top + 62, name, 14, bold=True)
        for row in range(4):
            y = top + row * (block + 4)
            p.cell(56, y, 150, block, fill)
            p.text(131, y + 19, f"rows {8 * row} to {8 * row + 7}", 12, anchor="middle")
            target = 48 + (2 * row + tensor) * (block + 6)
            p.arrow(208, y + block / 2, 392, target + block / 2, colour=STRONG[fill], width=1.1)
    for row in range(8):
        fill = BLUE if row % 2 == 0 else GREEN
        y = 48 + row * (block + 6)
        p.cell(396, y, 150, block, fill)
        p.text(471, y + 19, f"{'w1' if row % 2 == 0 else 'w3'} {8 * (row // 2)} to {8 * (row // 2) + 7}", 12, anchor="middle")
    p.cell(396, 48 + 8 * 34, 150, block, GREY)
    p.text(471, 48 + 8 * 34 + 19, "zeros (padding)", 12, anchor="middle")
    p.text(590, 62, "One nest for w1, with R bytes a row:", 13, bold=True)
    rows = [("run", "8 * R bytes"), ("count", "I / 8, for I rows"), ("from", "steps of 8 * R"), ("to", "steps of 16 * R, from 0 on")]
    for number, (word, value) in enumerate(rows):
        p.text(590, 90 + number * 21, word, 12.5, colour=QUIET)
        p.text(650, 90 + number * 21, value, 12.5)
    p.lines(
        590,
        195,
        [
            "w3: the same, to 8 * R on.",
            "The experts of a run: one more dimension.",
            "A repeat: a source step of 0.",
            "Padding: a constant source.",
            "Reading back: the two sides exchanged.",
        ],
        size=12.5,
        colour=INK,
        step=21,
    )
    return p.svg()


def states():
    """States of a receiver between and within updates."""
    p = Picture(920, 340, "States of a receiver")

    def state(x, y, name, what, fill):
        p.box(x, y, 150, 58, fill, radius=14)
        p.text(x + 75, y + 25, name, 14, bold=True, anchor="middle")
        p.text(x + 75, y + 44, what, 11, colour=QUIET, anchor="middle")

    state(30, 70, "idle", "serves, or has nothing", GREEN)
    state(265, 70, "open", "nothing written yet", GREEN)
    state(500, 70, "applying", "guard closed", ROSE)
    state(735, 70, "prepared", "written and proven", SAND)
    state(500, 230, "torn", "guard closed", ROSE)
    state(735, 230, "in doubt", "lead lost; guard closed", SAND)
    p.arrow(180, 90, 263, 90)
    p.text(222, 82, "OPEN", 11.5, anchor="middle")
    p.arrow(265, 116, 182, 116)
    p.text(222, 138, "any failure", 11.5, anchor="middle")
    p.arrow(415, 99, 498, 99)
    p.text(457, 91, "first byte", 11.5, anchor="middle")
    p.arrow(650, 99, 733, 99)
    p.text(692, 91, "all proven", 11.5, anchor="middle")
    p.arrow(575, 128, 575, 228)
    p.text(583, 182, "any failure", 11.5)
    p.arrow(810, 128, 810, 228)
    p.text(818, 182, "lead lost", 11.5)
    p.parts.append(
        f'<path d="M810 70 L810 34 L105 34 L105 68" fill="none" stroke="{INK}" stroke-width="1.4" marker-end="url(#tip)"/>'
    )
    p.text(457, 26, "COMMIT: the new version is served", 11.5, anchor="middle")
    p.arrow(748, 128, 648, 228)
    p.text(692, 200, "ABORT", 11.5)
    for path in ("M500 259 L340 259 L340 130", "M810 288 L810 316 L340 316 L340 130"):
        p.parts.append(f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.4" marker-end="url(#tip)"/>')
    p.text(330, 200, "OPEN of a full update", 11.5, anchor="end")
    p.lines(30, 252, ["In doubt, a lead that finds every rank", "prepared or committed may still COMMIT.", "All states and events: docs/protocol.md"], size=11.5)
    return p.svg()


PICTURES = {
    "overview.svg": overview,
    "update.svg": update,
    "rooms.svg": rooms,
    "placement.svg": placement,
    "states.svg": states,
}


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    folder = pathlib.Path(__file__).parent
    stale = []
    for name, draw in PICTURES.items():
        file = folder / name
        if sys.argv[1:] == ["--check"]:
            if not file.exists() or file.read_text(encoding="utf-8") != draw():
                stale.append(name)
        else:
            file.write_text(draw(), encoding="utf-8")
    if stale:
        sys.exit(f"not what {pathlib.Path(__file__).name} draws: {', '.join(stale)}")


main()
