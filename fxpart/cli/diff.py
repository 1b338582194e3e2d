"""``fxpart diff``: show the differences between two plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import EXIT_DIFFERENCE
from fxpart.plan.model import Plan
from fxpart.units import seconds

if TYPE_CHECKING:
    from fxpart.plan.diff import PlanChange

_TITLES = {"given": "Request", "decision": "Decisions", "prediction": "Predictions"}
_LABELS = {"prediction.step_seconds": "closed form"}  # beside fields whose name could mislead


@click.command()
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@json_option
def command(old: str, new: str, as_json: bool) -> int:
    """Show both step times and each field in which two plans differ.

    Fields are grouped by request, decisions and predictions. Exit status 1 if any differs.
    """
    from fxpart.plan.diff import diff

    plans = Plan.load(old), Plan.load(new)
    changes = diff(*plans)
    was, now = (plan.prediction.expected_seconds for plan in plans)
    if as_json:
        output.data({"step_time": {"old": was, "new": now}, "changes": changes})
    elif not changes:
        output.text("no difference")
    else:
        change = f" ({now / was - 1:+.1%})".replace("%", " %") if was else ""
        output.text(f"step time {seconds(was)} -> {seconds(now)}{change}")
        output.text("\n".join(_lines(changes)))
    return EXIT_DIFFERENCE if changes else 0


def _lines(changes: tuple[PlanChange, ...]) -> list[str]:
    """Return a line for each change, under headings if there are several kinds."""
    several, lines, kind = len({change.kind for change in changes}) > 1, [], ""
    for change in changes:
        if several and change.kind != kind:
            kind = change.kind
            lines.append(_TITLES[kind])
        indent = "  " if several else ""
        label = f" ({_LABELS[change.path]})" if change.path in _LABELS else ""
        values = f"{change.path}{label}: {_show(change.old)} -> {_show(change.new)}"
        lines.append(f"{indent}{values}{_relative(change)}")
    return lines


def _relative(change: PlanChange) -> str:
    """Return the relative change of a predicted number, as " (+3.1 %)"."""
    ends = (change.old, change.new)
    if change.kind != "prediction" or not all(type(x) in (int, float) for x in ends):
        return ""
    return f" ({(change.new / change.old - 1) * 100:+.1f} %)" if change.old else ""


def _show(value: Any) -> str:
    text = "(absent)" if value is None else str(value)
    if isinstance(value, float):
        text = f"{value:.6g}"
    return text if len(text) <= 80 else text[:77] + "..."
