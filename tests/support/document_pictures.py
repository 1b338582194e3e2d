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


PICTURES: dict[str, Callable[[], str]] = {
    "timeline": timeline,
    "memory": memory,
    "plan": plan,
    "schedules": schedules,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
