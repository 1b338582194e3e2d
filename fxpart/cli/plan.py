"""``fxpart plan``: choose, and write the choice down."""

from __future__ import annotations

from typing import Any

import click

from fxpart.cli import output
from fxpart.cli.options import Request, compile_options, json_option


@click.command()
@compile_options
@click.option("--output", "-o", "path", type=click.Path(), help="The plan file; else stdout.")
@json_option
def command(path: str | None, as_json: bool, **options: Any) -> int:
    """Capture TARGET, choose its partition on the cluster, and write the plan."""
    from fxpart.report.explain import explain

    request = Request(**options)
    plan = request.compile(request.workload()).plan
    if path is not None:
        plan.dump(path)
        output.note(f"wrote {path}")
    if as_json or path is None:
        output.text(plan.dumps().rstrip("\n"))
    (output.note if as_json or path is None else output.text)(explain(plan).rstrip("\n"))
    return 0
