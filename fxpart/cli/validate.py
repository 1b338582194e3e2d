"""``fxpart validate``: check plan files."""

from __future__ import annotations

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import EXIT_INPUT, FxpartError
from fxpart.plan.model import Plan


@click.command()
@click.argument("plans", nargs=-1, type=click.Path())
@click.option("--schema", is_flag=True, help="Print the JSON Schema of a plan file.")
@json_option
def command(plans: tuple[str, ...], schema: bool, as_json: bool) -> int:
    """Check plan files and list all problems."""
    if schema:
        output.data(Plan.schema())
        return 0
    if not plans:
        raise click.UsageError("name a plan file")
    results: dict[str, list[dict[str, str]]] = {}
    for path in plans:
        try:
            plan = Plan.load(path)
        except FxpartError as fault:
            results[path] = output.problems(fault)
            output.note(str(fault))
        else:
            results[path] = []
            if not as_json:
                output.text(f"{path}: valid, {len(plan.stages)} stages on {plan.world} ranks")
                for reason in plan.runnable:
                    output.text(f"  this version cannot train with this plan: {reason}")
    if as_json:
        output.data(
            [{"plan": p, "valid": not faults, "problems": faults} for p, faults in results.items()]
        )
    return EXIT_INPUT if any(results.values()) else 0
