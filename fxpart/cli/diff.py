"""``fxpart diff``: what differs between two plans."""

from __future__ import annotations

from typing import Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import EXIT_DIFFERENCE
from fxpart.plan import Plan


@click.command()
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@json_option
def command(old: str, new: str, as_json: bool) -> int:
    """Show each field in which two plans differ; exit status 1 where there is any."""
    from fxpart.plan_io.diff import diff

    changes = diff(Plan.load(old), Plan.load(new))
    if as_json:
        output.data(changes)
    elif not changes:
        output.text("no difference")
    for change in () if as_json else changes:
        output.text(f"{change.path}: {_show(change.old)} -> {_show(change.new)}")
    return EXIT_DIFFERENCE if changes else 0


def _show(value: Any) -> str:
    text = "(not there)" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
