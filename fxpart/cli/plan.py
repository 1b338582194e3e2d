"""``fxpart plan``: plan the partition of a model and write the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import CommandLineRequest, compile_options, json_option
from fxpart.errors import EXIT_INFEASIBLE, error

if TYPE_CHECKING:
    from fxpart.plan.model import Plan
    from fxpart.solver.joint.problem import JointProblem


class _CommandWithConstraints(click.Command):
    """A command whose help lists the constraints."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of constraints."""
        from fxpart.plan.constraint_table import describe_constraints

        with formatter.section("Constraints"):
            formatter.write_dl(describe_constraints())


@click.command(cls=_CommandWithConstraints)
@compile_options
@click.option("--output", "-o", "path", type=click.Path(), help="Plan file, by default stdout.")
@click.option(
    "--dump-annotations", "dump", type=click.Path(),
    help="Write the completed annotations, TOML or JSON by the suffix.",
)  # fmt: skip
@click.option(
    "--from", "source", type=click.Path(), metavar="FILE",
    help="Price a configuration of torchtitan or Megatron-LM, and compare it with the best plan.",
)  # fmt: skip
@click.option("--nproc", metavar="MIN:MAX", help="With --run: plan for these numbers of ranks.")
@click.option("--run", type=click.Path(), help="Run folder in which plans are stored for later.")
@json_option
def command(
    path: str | None,
    dump: str | None,
    source: str | None,
    nproc: str | None,
    run: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Capture TARGET, plan its partition on the cluster, and write the plan.

    With -o plan.json, the costed problem is also written, as plan.problem.json. With --nproc
    MIN:MAX --run DIR, a plan for each of these numbers of ranks is stored for the run in DIR, where
    `fxpart train` finds them when ranks are lost or return. With --from FILE, the decisions of
    another engine's configuration are priced for TARGET on the cluster, and compared with the best
    plan, which -o writes.
    """
    request = CommandLineRequest(**options)
    if source is not None:
        return _compare(request, source, path, as_json)
    if nproc is not None or run is not None:
        return _plan_in_advance(request, nproc, run, as_json)
    if dump is not None and not dump.endswith((".toml", ".json")):
        why = "the output format is taken from the suffix, which is neither .toml nor .json"
        fix = "use a file name with suffix .toml or .json"
        raise error("FXP109", where=f"--dump-annotations {dump}", why=why, fix=fix)
    program = request.compile(request.workload())
    if dump is not None:
        from fxpart.cli.report import write

        write(dump, program.completed_annotations(dump[-5:]))
        output.note(f"wrote {dump}")
    _write(program.plan, program.costed() if path is not None else None, path, as_json)
    return 0


def _compare(request: CommandLineRequest, source: str, path: str | None, as_json: bool) -> int:
    """Compare another engine's configuration with the best plan; write that plan if requested."""
    from fxpart.cli.plan_from import compare_with, print_comparison
    from fxpart.solver.archive import get_problem_path, save_problem

    found = compare_with(request, source)
    if path is not None:
        found.best.plan.dump(path)
        save_problem(found.best.costed(), get_problem_path(path))
        output.note(f"wrote {path} and {get_problem_path(path)}")
    print_comparison(found, as_json)
    return 0


def _plan_in_advance(
    request: CommandLineRequest, nproc: str | None, run: str | None, as_json: bool
) -> int:
    """Make plans for a run's numbers of ranks; return status 3 if there is none for one."""
    from fxpart.checkpoint.run_directory import RunDir
    from fxpart.cli.elastic_run import plan_ahead
    from fxpart.elastic.rank_bounds import RankBounds

    if nproc is None or run is None:
        given, missing = ("--nproc", "--run DIR") if run is None else ("--run", "--nproc MIN:MAX")
        why = "--nproc and --run must be given together"
        raise error("FXP109", where=given, why=why, fix=f"pass {missing}, too")
    folder = RunDir(Path(run))
    with output.show_activity(f"planning {request.target} for {nproc} ranks"):
        refused = plan_ahead(request, RankBounds.parse(nproc), folder)
    if as_json:
        output.data({"plans": str(folder.plans), "refused": refused})
    for ranks, why in refused.items():
        output.note(f"no plan for {ranks} ranks: {why}")
    if not as_json:
        output.text(f"plans in {folder.plans}")
    return EXIT_INFEASIBLE if refused else 0


def _write(
    plan: Plan,
    problem: JointProblem | None,
    path: str | None,
    as_json: bool,
) -> None:
    """Write the plan and its problem to files, or the plan to stdout; print the explanation."""
    from fxpart.report.explanation_text import explain
    from fxpart.solver.archive import get_problem_path, save_problem

    if path is not None:
        assert problem is not None, "a written plan has a costed problem"
        plan.dump(path)
        save_problem(problem, get_problem_path(path))
        output.note(f"wrote {path} and {get_problem_path(path)}")
    if as_json or path is None:
        output.text(plan.dumps().rstrip("\n"))
    (output.note if as_json or path is None else output.text)(explain(plan).rstrip("\n"))
