"""``fxpart diff``: what differs between two plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import EXIT_DIFFERENCE
from fxpart.plan.model import Plan

if TYPE_CHECKING:
    from fxpart.plan.diff import PlanChange

_TITLES = {"given": "Given", "decision": "Decided", "prediction": "Predicted"}


@click.command()
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@json_option
def command(old: str, new: str, as_json: bool) -> int:
    """Show each field in which two plans differ: given, decided, predicted.

    Exit status 1 where there is any.
    """
    from fxpart.plan.diff import diff

    changes = diff(Plan.load(old), Plan.load(new))
    if as_json:
        output.data(changes)
    elif not changes:
        output.text("no difference")
    else:
        output.text("\n".join(_lines(changes)))
    return EXIT_DIFFERENCE if changes else 0


def _lines(changes: tuple[PlanChange, ...]) -> list[str]:
    """A line for each change, under headings where they are of several kinds."""
    several, lines, kind = len({change.kind for change in changes}) > 1, [], ""
    for change in changes:
        if several and change.kind != kind:
            kind = change.kind
            lines.append(_TITLES[kind])
        indent = "  " if several else ""
        words = f"{change.path}: {_show(change.old)} -> {_show(change.new)}"
        lines.append(f"{indent}{words}{_relative(change)}")
    return lines


def _relative(change: PlanChange) -> str:
    """By how much a predicted number differs, as " (+3.1 %)"."""
    ends = (change.old, change.new)
    if change.kind != "prediction" or not all(type(x) in (int, float) for x in ends):
        return ""
    return f" ({(change.new / change.old - 1) * 100:+.1f} %)" if change.old else ""


def _show(value: Any) -> str:
    text = "(not there)" if value is None else str(value)
    if isinstance(value, float):
        text = f"{value:.6g}"
    return text if len(text) <= 80 else text[:77] + "..."
