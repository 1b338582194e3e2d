"""Write fxpart/docs/supported.md: run ``python -m supported.page`` in ``tests/support/``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from supported.behavior import RIGHT, Behavior
from supported.table import BEHAVIORS

PAGE = Path(__file__).resolve().parents[3] / "fxpart" / "docs" / "supported.md"

DIVIDED = {"microbatches", "pipeline", "replicas"}

INTRODUCTION = """# Supported and refused programs

Each row is a program that the tests train with fxpart and with plain PyTorch in one process.
"Equal" means that weights and buffers agree within rounding. A code is the error with which fxpart
refuses the program.
`python -m supported.page`, run in `tests/support/`, writes this page.

| layout | meaning |
| --- | --- |
| one rank | the whole batch on one rank; the layout of results without one |
| microbatches | the batch divided into 4 on one rank |
| pipeline | 2 stages and 2 microbatches |
| replicas | data parallelism over 2 ranks |
| divided | microbatches, pipeline and replicas |
| tensor | tensor parallelism over 2 ranks |
"""


def cell(outcome: str) -> str:
    """One outcome with the layouts that have it."""
    return "equal" if outcome == RIGHT else f"refused, {outcome}"


def shorten(layouts: list[str]) -> list[str]:
    """Layouts with the common name of those that divide the batch."""
    if not DIVIDED <= set(layouts):
        return layouts
    return [name for name in layouts if name not in DIVIDED] + ["divided"]


def row(entry: Behavior) -> str:
    """One line of the table."""
    layouts: dict[str, list[str]] = {}
    for layout, outcome in entry.outcome.items():
        layouts.setdefault(outcome, []).append(layout)
    if [*entry.outcome] == ["one rank"]:
        text = cell(entry.outcome["one rank"])
    else:
        text = "; ".join(
            f"{cell(code)} ({', '.join(shorten(names))})" for code, names in layouts.items()
        )
    return f"| {entry.construct} | {text} | {entry.reason} |"


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for area, entries in groupby(BEHAVIORS, key=lambda entry: entry.area):
        rows = [row(entry) for entry in entries]
        parts.append(
            "\n".join(
                [f"## {area}\n", "| construct | result | why |", "| --- | --- | --- |", *rows, ""]
            )
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
