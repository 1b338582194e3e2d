"""``fxpart plan``: choose, and write the choice down."""

from __future__ import annotations

from typing import Any

import click

from fxpart.cli import output
from fxpart.cli.options import Request, compile_options, json_option
from fxpart.errors import error


@click.command()
@compile_options
@click.option("--output", "-o", "path", type=click.Path(), help="The plan file; else stdout.")
@click.option(
    "--dump-annotations", "dump", type=click.Path(),
    help="Write the completed annotations, TOML or JSON by the suffix.",
)  # fmt: skip
@json_option
def command(path: str | None, dump: str | None, as_json: bool, **options: Any) -> int:
    """Capture TARGET, choose its partition on the cluster, and write the plan."""
    from fxpart.report.explain import explain
    from fxpart.solver.joint.archive import beside, save

    request = Request(**options)
    if dump is not None and not dump.endswith((".toml", ".json")):
        fix = "give a file that ends in .toml or .json"
        raise error("FXP109", where=f"--dump-annotations {dump}", why="what format?", fix=fix)
    program = request.compile(request.workload())
    plan = program.plan
    if dump is not None:
        from fxpart.cli.report import write

        write(dump, program.completed_annotations(dump[-5:]))
        output.note(f"wrote {dump}")
    if path is not None:
        plan.dump(path)
        save(program.costed(), beside(path))
        output.note(f"wrote {path} and {beside(path)}")
    if as_json or path is None:
        output.text(plan.dumps().rstrip("\n"))
    (output.note if as_json or path is None else output.text)(explain(plan).rstrip("\n"))
    return 0
