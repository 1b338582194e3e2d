"""Draw the pictures of README and pages with fxpart's own report functions.

    python tests/support/document_pictures.py             (writes fxpart/docs/images/*.svg)

The plan is tests/repository/data/llama_8xa100.plan.json: Llama 7B on 8 A100, four stages of two
ranks, as ``fxpart.compile`` planned it from data sheets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path

from fxpart.plan.model import Plan
from fxpart.planner.prediction.plan_timeline import plan_timeline
from fxpart.report.explanation_builder import explanation
from fxpart.report.html import CSS
from fxpart.report.stage_tables import stage_table
from fxpart.report.svg import WIDTH, memory_svg, opening, timeline_svg
from fxpart.schedule.dependence import chain
from fxpart.schedule.make import make
from fxpart.schedule.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "fxpart" / "docs" / "images"
PLAN = ROOT / "tests" / "repository" / "data" / "llama_8xa100.plan.json"
RANKS, MICROBATCHES = 4, 8
FORWARD, BACKWARD = 0.02, 0.04  # seconds of one rank's share of a microbatch
# Name, title, rank of each stage.
COMPARED = (
    ("gpipe", "GPipe", (0, 1, 2, 3)),
    ("1f1b", "1F1B", (0, 1, 2, 3)),
    ("interleaved", "Interleaved 1F1B, two virtual stages per rank", (0, 1, 2, 3, 0, 1, 2, 3)),
    ("zb-h1", "ZB-H1, split backward passes", (0, 1, 2, 3)),
)
_LINE, _MARGIN, _LETTER = 20, 14, 8.43  # pixels
_TEXT = 'style="font-family: monospace" font-size="14"'


def standalone(picture: str) -> str:
    """Return a picture of the report as a file of its own: its rules of style in light colors."""
    light = dict(re.findall(r"(--\w+): (#\w+)", CSS.partition("@media")[0]))
    used = set(" ".join(re.findall(r'class="([^"]+)"', picture)).split())
    rules = re.findall(r"(?m)(?:^| )\.(\w+) (\{[^}]*\})", CSS)
    style = "\n".join(f".{name} {rule}" for name, rule in rules if name in used)
    head, _, body = picture.partition(">")
    background = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    text = f"{head}>\n<style>\ntext {{ font-family: sans-serif }}\n{style}\n</style>\n"
    return re.sub(r"var\((--\w+)\)", lambda found: light[found[1]], f"{text}{background}{body}\n")


def timeline() -> str:
    """Draw the schedule of the plan in time."""
    return standalone(timeline_svg(plan_timeline(Plan.load(PLAN))))


def memory() -> str:
    """Draw the peak memory of the plan."""
    return standalone(memory_svg(Plan.load(PLAN)))


def plan() -> str:
    """Draw the table of stages that ``fxpart explain`` prints."""
    lines = stage_table(explanation(Plan.load(PLAN)))
    width = 2 * _MARGIN + _LETTER * max(map(len, lines))
    height = 2 * _MARGIN + _LINE * len(lines)
    label = escape("The stages of a plan")
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{label}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for number, line in enumerate(lines):
        y = _MARGIN + _LINE * number + 14
        weight = ' font-weight="bold"' if number == 0 else ""
        parts.append(
            f'<text x="{_MARGIN}" y="{y}" fill="var(--ink)" xml:space="preserve" {_TEXT}{weight}>'
            f"{escape(line)}</text>"
        )
    return standalone("\n".join([*parts, "</svg>"]))


def schedules() -> str:
    """Draw several schedules of the same work, one below the other."""
    parts, top = [], 0
    for name, title, ranks in COMPARED:
        pieces = len(ranks) // RANKS
        edges = chain(len(ranks))
        found = simulate(
            make(name, ranks, MICROBATCHES, edges), edges,
            [FORWARD / pieces] * len(ranks), [BACKWARD / pieces] * len(ranks),
        )  # fmt: skip
        drawn = timeline_svg(found)
        viewed = re.search(r'viewBox="0 0 \d+ (\d+)"', drawn)
        assert viewed is not None
        height = int(viewed[1])
        step = f"{title}: step {1e3 * found.step_seconds:.0f} ms, bubble {found.bubble:.1%}"
        parts.append(f'<text class="axis" x="0" y="{top + 16}">{escape(step)}</text>')
        place = f'<svg x="0" y="{top + 24}" width="{WIDTH}" height="{height}"'
        parts.append(drawn.replace("<svg", place, 1))
        top += height + 40
    label = ", ".join(title for _, title, _ in COMPARED)
    return standalone("\n".join([opening(top, label), *parts, "</svg>"]))


# Title and lines of each box of the search, and its place: column and row.
BOXES = (
    ("1 Blocks and prices", ("ops of the captured graph,", "bytes, kinds of devices"), 0, 0),
    ("2 Joint problem", ("degrees, ZeRO, stages,", "microbatches: estimates"), 1, 0),
    ("3 Proposals", ("one for each mesh,", "in the order of estimates"), 2, 0),
    ("4 Lower and price", ("placements and program of", "one rank, exact prices"), 2, 1),
    ("5 Solve exactly", ("boundaries, schedule,", "recomputation, device order"), 1, 1),
    ("6 The fastest plan", ("two certificates,", "rejected plans, reasons"), 0, 1),
)
ARROWS = (  # from and to, as (column, row), and a label
    ((0, 0), (1, 0), ""),
    ((1, 0), (2, 0), ""),
    ((2, 0), (2, 1), "next"),
    ((2, 1), (1, 1), ""),
    ((1, 1), (2, 0), "not faster: dropped"),
    ((1, 1), (0, 1), ""),
    ((1, 0), (0, 1), "lower bound"),
)
_BOX = (230, 84)  # pixels, width and height
_STEP = (365, 180)


def _center(place: tuple[int, int]) -> tuple[float, float]:
    return place[0] * _STEP[0] + _BOX[0] / 2 + 2, place[1] * _STEP[1] + _BOX[1] / 2 + 2


def _arrow(start: tuple[int, int], end: tuple[int, int], label: str) -> list[str]:
    """Draw an arrow between the borders of two boxes."""
    (x1, y1), (x2, y2) = _center(start), _center(end)
    width, height = _BOX[0] / 2 + 4, _BOX[1] / 2 + 4
    dx, dy = x2 - x1, y2 - y1
    part = min(width / abs(dx) if dx else 9, height / abs(dy) if dy else 9)
    x1, y1, x2, y2 = x1 + part * dx, y1 + part * dy, x2 - part * dx, y2 - part * dy
    line = (
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="var(--soft)" '
        'stroke-width="2" marker-end="url(#head)"/>'
    )
    if not label:
        return [line]
    place = f'x="{(x1 + x2) / 2 + 8:.0f}" y="{(y1 + y2) / 2 + 4:.0f}"'
    text = f'<text class="axis" {place} font-size="13" fill="var(--soft)">{escape(label)}</text>'
    return [line, text]


def search() -> str:
    """Draw the steps from the captured graph to the plan."""
    width, height = 2 * _STEP[0] + _BOX[0] + 4, _STEP[1] + _BOX[1] + 4
    label = "The search: " + ", ".join(title for title, *_ in BOXES)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="var(--soft)"/></marker>'
        "</defs>",
    ]
    for start, end, text in ARROWS:
        parts += _arrow(start, end, text)
    for title, lines, column, row in BOXES:
        x, y = column * _STEP[0] + 2, row * _STEP[1] + 2
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_BOX[0]}" height="{_BOX[1]}" rx="8" '
            'fill="var(--card)" stroke="var(--line)"/>'
        )
        for number, line in enumerate((title, *lines)):
            style = 'font-weight="bold" font-size="16"' if number == 0 else 'font-size="14"'
            parts.append(
                f'<text x="{x + 14}" y="{y + 26 + 22 * number}" fill="var(--ink)" {style}>'
                f"{escape(line)}</text>"
            )
    return standalone("\n".join([*parts, "</svg>"]))


PICTURES: dict[str, Callable[[], str]] = {
    "timeline": timeline,
    "memory": memory,
    "plan": plan,
    "schedules": schedules,
    "search": search,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
